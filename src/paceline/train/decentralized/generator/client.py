"""A worker's side of the group generator: a thread that keeps it a member, whatever becomes of the service.

The client is in one of these states. Only ``attached`` lets messages through; in the others a request is answered with
Solo at once, and all else that is said is dropped, because a service that has not heard it will not count on it.

===========  ===========================================  ==============================================================
state        event                                        becomes
===========  ===========================================  ==============================================================
searching    an address answers and knows the secret      joining: Join is sent
searching    no address answers                           searching, after a pause that grows up to a second
joining      Joined                                       attached; a Drain or AskAverage of before is said again
attached     Evicted                                      joining, with ``stale=True``
attached     the connection ends, or is silent for the    searching; on_message gets Detached, and Solo if a request
             lease; this process stood still so long      is unanswered
attached     an earlier address answers, and no group     joining, there
             and no average is under way
any          Refused, or all addresses refuse             ended; on_message gets Refused
===========  ===========================================  ==============================================================
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from paceline.errors import GeneratorError, RefusedError, UsageError
from paceline.train.decentralized.generator.connecting import Link
from paceline.train.decentralized.generator.forks import Closeable, close_in_children
from paceline.train.decentralized.generator.messages import (
    MAX_ADDRESS,
    MAX_RATE,
    MAX_SECONDS,
    MAX_STEPS_AT_ONCE,
    MAX_WORKERS,
    Abort,
    Alive,
    AskAverage,
    Average,
    AverageFinished,
    Commit,
    Detached,
    Drain,
    Evicted,
    Finished,
    Goodbye,
    Heartbeat,
    Join,
    Joined,
    Ready,
    Refused,
    Request,
    Solo,
    Start,
    ToService,
    ToWorker,
)
from paceline.train.decentralized.generator.search import ServiceSearch
from paceline.train.decentralized.generator.wire import HANDSHAKE_S, check_secret, parse_address

_log = logging.getLogger("paceline.generator")

_GOODBYE_S = 1.0


class GeneratorClient:
    """Joins a job and stays in it, in a thread of its own.

        client = GeneratorClient(["10.0.0.1:29600"], secret, worker=None, host="node3", address="10.0.0.3:4000",
                                 on_message=queue.put, fresh=True)
        client.request(step_s=0.1, steps=1)        # on_message gets Solo, or Start and later Commit or Abort
        client.finished(serial, ok=True)
        client.close()

    ``addresses`` are those of the job's generators. The first that answers is used; while it is not the very first,
    the client moves back as soon as an earlier one answers. ``worker`` is the worker's number, or None to be given one.
    ``fresh``: this process does not have the weights that the others began with. Workers with another ``model`` than
    the first one's are refused.

    ``on_message`` is called in the client's thread with each message of ``messages.py``, perhaps before the constructor
    has returned. It must be quick: as long as it runs, nobody says that this worker is alive. Methods may be called
    from any thread and never wait for the network. Joined may come again at any time. With ``copy=True`` the worker has
    to get the weights before it asks for groups again, and to call :meth:`ready` then. After Detached or Evicted no
    group or average that had begun will be committed. After Refused the client does nothing any more.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        secret: bytes,
        *,
        worker: int | None,
        host: str,
        address: str,
        on_message: Callable[[object], None],
        fresh: bool,
        rate_bytes_per_s: float | None = None,
        lease_s: float = 30.0,
        model: str = "",
    ) -> None:
        if not addresses:
            raise UsageError("give the address of at least one generator")
        for place in addresses:
            parse_address(place)
        if worker is not None and not 0 <= worker < MAX_WORKERS:
            raise UsageError(f"worker is {worker}: it must be from 0 to {MAX_WORKERS - 1}, or None")
        if not lease_s > 0 or (rate_bytes_per_s is not None and not 0 < rate_bytes_per_s <= MAX_RATE):
            raise UsageError("lease_s and rate_bytes_per_s must be above 0")
        if len(address) > MAX_ADDRESS:
            raise UsageError(f"address has {len(address)} characters: at most {MAX_ADDRESS} are passed on")
        self._search = ServiceSearch(list(dict.fromkeys(addresses)))
        self._secret = check_secret(secret)
        self._given, self._host, self._address = worker, host[:255], address
        self._on_message = on_message
        self._model = model[:255]
        self._rate_bytes_per_s = rate_bytes_per_s
        self._lease_s = lease_s
        # Shared with callers, under the lock
        self._lock = threading.Lock()
        self._is_attached = False
        self._outgoing: deque[ToService] = deque()
        self._solos = 0  # to be answered by the client itself
        self._is_asking = False  # a request has no answer yet
        self._unreported_steps = 0
        self._is_draining = False
        self._asks = 0  # for averages of all workers that have not ended
        self._asks_served = 0  # of these, the ones that the average under way serves
        self._fresh, self._stale = fresh, False
        self._is_closing = False
        # The thread's own
        self._average: int | None = None  # the one under way that this worker receives
        self._link: Link | None = None
        self._attempt: Link | None = None
        self._attempt_ends_s = 0.0
        self._better: tuple[Link, float] | None = None
        self._heard_s = self._beat_s = 0.0
        self._has_told_detached = False
        self._previous: tuple[int, int] | None = None
        self._process = random.SystemRandom().getrandbits(63)
        self._epoch_seen = self._serial_seen = self._steps_seen = self._highest_seen = 0
        self._under_way: set[int] = set()
        self._ended = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        close_in_children(self)
        self._thread = threading.Thread(target=self._run, name="paceline generator client", daemon=True)
        self._thread.start()

    # What a worker says

    @property
    def is_attached(self) -> bool:
        """Whether a service has this worker as a member now."""
        return self._is_attached

    @property
    def worker(self) -> int | None:
        """The worker's number, or None before the first Joined."""
        return self._given if self._previous is None else self._previous[1]

    def request(
        self,
        *,
        steps: int = 1,
        step_s: float | None = None,
        average_s: float = 0.0,
        average_bytes: float = 0.0,
        group_size: int = 0,
    ) -> None:
        """Ask for a group. ``steps`` are the local steps since the last request; ``average_*`` of the last average."""
        numbers = (steps, step_s or 0.0, average_s, average_bytes, group_size)
        if not all(0 <= number < math.inf for number in numbers):
            raise UsageError("steps, step_s, average_s, average_bytes and group_size must be 0 or more")
        step_s = None if step_s is None else min(step_s, MAX_SECONDS)
        average_s, average_bytes = min(average_s, MAX_SECONDS), min(average_bytes, MAX_RATE)
        with self._lock:
            self._unreported_steps += steps
            self._is_asking = True
            if self._is_attached:
                reported = min(self._unreported_steps, MAX_STEPS_AT_ONCE)
                self._unreported_steps -= reported
                self._outgoing.append(Request(step_s, average_s, average_bytes, group_size, reported))
            else:
                self._solos += 1
        self._wake()

    def finished(self, serial: int, ok: bool) -> None:
        """The group's average is done, or has failed."""
        self._say(Finished(serial, ok))

    def drain(self) -> None:
        """Make no more steps. Left follows, and then an Average that is final."""
        with self._lock:
            self._is_draining = True
        self._say(Drain())

    def ready(self) -> None:
        """The worker has the weights that it had to copy."""
        with self._lock:
            self._fresh = self._stale = False
        self._say(Ready())

    def ask_average(self) -> None:
        """Ask for the mean of all workers: an Average that has this worker among its receivers."""
        with self._lock:
            self._asks += 1
        self._say(AskAverage())

    def average_finished(self, serial: int, ok: bool) -> None:
        """This worker's part of an Average is done, or has failed."""
        self._say(AverageFinished(serial, ok))

    def close(self, wait_s: float = 2.0) -> None:
        """Leave the job, and end the thread. Wait for that at most ``wait_s``."""
        self._is_closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def sockets(self) -> list[Closeable]:
        """Return what a forked process has to close."""
        links = (self._link, self._attempt, self._better[0] if self._better else None)
        return [self._wake_receiver, self._wake_sender, *(link.socket for link in links if link is not None)]

    def _say(self, message: ToService) -> None:
        with self._lock:
            if self._is_attached:
                self._outgoing.append(message)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread wakes anyway; closed: it has ended
            self._wake_sender.send(b"x")

    # The thread

    def _run(self) -> None:
        last_s = _clock_s()
        try:
            while not (self._is_closing or self._ended):
                self._wait()
                now_s = _clock_s()
                if now_s - last_s > self._lease_s:
                    self._stood_still(now_s - last_s)
                last_s = now_s
                self._keep_connected(now_s)
                self._speak(now_s)
                self._answer_requests()
        except Exception:
            _log.exception("the group generator's client has failed; this worker goes on alone")
            self._end(Refused("the group generator's client has failed; see the log"))
        finally:
            self._close_links()
            self._wake_receiver.close()
            self._wake_sender.close()

    def _wait(self) -> None:
        """Wait for sockets, and serve them."""
        poll = select.poll()
        poll.register(self._wake_receiver, select.POLLIN)
        links = [link for link in (self._link, self._attempt, self._better and self._better[0]) if link is not None]
        for link in links:
            poll.register(link.socket, link.events)
        now_s = _clock_s()
        wake_s = now_s + self._lease_s / 4
        if self._link is not None:
            wake_s = min(wake_s, self._beat_s + self._lease_s / 3)
        if self._attempt is not None:
            wake_s = min(wake_s, self._attempt_ends_s)
        elif self._link is None:
            wake_s = min(wake_s, self._search.next_s)
        ready = dict(poll.poll(max(0.0, wake_s - now_s) * 1000))
        if ready.pop(self._wake_receiver.fileno(), 0):
            with contextlib.suppress(BlockingIOError):
                self._wake_receiver.recv(4096)
        events = {link: ready.get(link.socket.fileno(), 0) for link in links}
        for link, mask in events.items():
            if mask and link in (self._link, self._attempt, self._better and self._better[0]):
                self._serve(link, mask)

    def _serve(self, link: Link, mask: int) -> None:
        try:
            messages = link.serve(mask)
        except GeneratorError as error:
            if link is self._link:
                self._detach(str(error))
            elif link is self._attempt:
                self._attempt_failed(error)
            else:
                self._drop_better()
            return
        if link is self._link:
            self._heard_s = _clock_s()
            for message in messages:
                if self._link is link and not self._ended:
                    self._hear(message)

    # Connections

    def _keep_connected(self, now_s: float) -> None:
        if self._link is not None and self._heard_s + self._lease_s <= now_s:
            silent_s = now_s - self._heard_s
            self._detach(f"the generator at {self._link.address} was silent for {silent_s:.1f} s")
        if self._attempt is not None and self._attempt.is_open:
            self._attempt_succeeded(now_s)
        elif self._attempt is not None and self._attempt_ends_s <= now_s:
            self._attempt_failed(GeneratorError(f"the generator at {self._attempt.address} does not answer"))
        if self._better is not None:
            if not self._under_way:
                self._move()
            elif self._better[1] <= now_s:
                self._drop_better()
        if self._attempt is None and self._search.next_s <= now_s and not self._ended:
            self._try_next(now_s)

    def _try_next(self, now_s: float) -> None:
        """Begin an attempt at the next address: any, or an earlier one while a later one serves."""
        address = self._search.next_address()
        if address is None or self._better is not None:
            self._search.wait(now_s, self._lease_s)
            return
        self._attempt_ends_s = now_s + min(HANDSHAKE_S, self._lease_s)
        try:
            self._attempt = Link(address, self._secret)
        except GeneratorError as error:
            self._attempt_failed(error)

    def _attempt_succeeded(self, now_s: float) -> None:
        link, self._attempt = self._attempt, None
        assert link is not None
        if self._link is None:
            self._attach(link)
        else:
            self._better = (link, now_s + self._lease_s)
            self._search.wait(now_s, self._lease_s)

    def _attempt_failed(self, error: GeneratorError) -> None:
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        now_s = _clock_s()
        if isinstance(error, RefusedError):
            _log.error("%s", error)
            was_last = self._search.refused(now_s, self._lease_s)
            if self._search.is_hopeless:
                self._end(Refused(str(error)))
                return
        else:
            was_last = self._search.failed(now_s, self._lease_s)
        if was_last and self._link is None:
            self._tell_detached(str(error))

    def _attach(self, link: Link) -> None:
        self._link = link
        self._heard_s = self._beat_s = _clock_s()
        self._search.found(link.address, self._heard_s, self._lease_s)
        self._join()

    def _join(self) -> None:
        with self._lock:
            fresh, stale = self._fresh, self._stale
        self._send(
            Join(
                self._given,
                self._host,
                self._address,
                self._previous,
                stale,
                fresh,
                self._rate_bytes_per_s,
                self._process,
                self._epoch_seen,
                self._serial_seen,
                self._steps_seen,
                self._highest_seen,
                self._model,
            )
        )

    def _move(self) -> None:
        """Leave the service for one whose address is given earlier."""
        assert self._better is not None
        link, self._better = self._better[0], None
        self._send(Goodbye())
        self._detach(f"moves back to the generator at {link.address}")
        self._attach(link)

    def _drop_better(self) -> None:
        if self._better is not None:
            self._better[0].close()
            self._better = None

    def _stood_still(self, pause_s: float) -> None:
        with self._lock:
            self._stale = True
        if self._link is not None:
            self._detach(f"this process stood still for {pause_s:.1f} s")

    def _detach(self, reason: str) -> None:
        """The connection is of no use any more."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        self._drop_better()
        self._search.lost(_clock_s())
        self._suspend()
        self._has_told_detached = False
        self._tell_detached(reason)

    def _suspend(self) -> None:
        """No service has this worker as a member."""
        self._under_way.clear()
        with self._lock:
            self._is_attached = False
            self._outgoing.clear()
            self._solos = int(self._is_asking)
            self._asks_served, self._average = 0, None

    def _tell_detached(self, reason: str) -> None:
        if not self._has_told_detached:
            self._has_told_detached = True
            _log.warning("no group generator: %s; this worker goes on alone", reason)
            self._tell(Detached(reason))

    def _end(self, message: Refused) -> None:
        _log.error("%s", message.reason)
        self._ended = True
        self._suspend()
        self._tell(message)
        self._answer_requests()

    def _close_links(self) -> None:
        if self._link is not None and self._link.is_open and self._is_closing and not self._ended:
            with contextlib.suppress(GeneratorError, OSError):
                self._speak(_clock_s())
                self._link.send(Goodbye())
                end_s = _clock_s() + _GOODBYE_S
                while self._link.has_unsent and _clock_s() < end_s:
                    select.select([], [self._link.socket], [], 0.1)
                    self._link.write()
        with self._lock:
            self._is_attached = False
        for link in (self._link, self._attempt, self._better and self._better[0]):
            if link is not None:
                link.close()

    # Messages

    def _speak(self, now_s: float) -> None:
        """Send what callers have said, and a heartbeat, whose answer tells that the service lives."""
        if self._link is None:
            return
        while True:
            with self._lock:
                if not self._outgoing:
                    break
                message = self._outgoing.popleft()
            self._send(message)
        if self._link is not None and self._beat_s + self._lease_s / 3 <= now_s:
            self._beat_s = now_s
            self._send(Heartbeat())

    def _send(self, message: ToService) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except GeneratorError as error:
            self._detach(str(error))
            return
        if isinstance(message, AverageFinished):
            self._under_way.discard(message.serial)

    def _answer_requests(self) -> None:
        with self._lock:
            solos, self._solos = self._solos, 0
            if solos:
                self._is_asking = False
        for _ in range(solos):
            self._tell(Solo())

    def _hear(self, message: ToWorker) -> None:
        if isinstance(message, Alive):
            self._steps_seen = max(self._steps_seen, message.steps)
            self._highest_seen = max(self._highest_seen, message.highest_worker)
            return
        if isinstance(message, Refused):
            self._end(message)
            return
        if isinstance(message, Joined):
            self._joined(message)
        elif isinstance(message, (Start, Average)):
            self._under_way.add(message.serial)
            self._epoch_seen = max(self._epoch_seen, message.epoch)
            self._serial_seen = max(self._serial_seen, message.serial)
            self._highest_seen = max(self._highest_seen, *message.members)
        elif isinstance(message, (Commit, Abort)):
            self._under_way.discard(message.serial)
        with self._lock:
            if isinstance(message, (Start, Solo)):
                self._is_asking = False
            elif isinstance(message, Average) and self.worker in message.receivers:
                self._asks_served, self._average = self._asks, message.serial
            elif isinstance(message, (Commit, Abort)) and message.serial == self._average:
                self._asks, self._asks_served = self._asks - self._asks_served, 0
            elif isinstance(message, Evicted):
                self._stale = True
        if isinstance(message, Evicted):
            self._suspend()
            self._join()
        self._tell(message)

    def _joined(self, message: Joined) -> None:
        _log.info("worker %d has joined%s", message.worker, ", and copies weights" if message.copy else "")
        self._previous = (message.instance, message.worker)
        self._lease_s = min(self._lease_s, message.lease_s)
        self._epoch_seen = max(self._epoch_seen, message.epoch)
        self._highest_seen = max(self._highest_seen, message.worker)
        self._has_told_detached = False
        with self._lock:
            if not message.copy:
                self._fresh = self._stale = False
            elif not self._fresh:
                self._stale = True
            if not self._is_attached:
                self._is_attached = True
                if self._asks:
                    self._outgoing.append(AskAverage())
                if self._is_draining:
                    self._outgoing.append(Drain())

    def _tell(self, message: object) -> None:
        try:
            self._on_message(message)
        except Exception:
            _log.exception("on_message failed for %s", type(message).__name__)


def _clock_s() -> float:
    """Seconds, including those that this machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
