"""The group generator's service: one thread, non-blocking sockets, a :class:`Job` that knows what to do.

A lease is judged by a time before the sockets were last read. So workers whose heartbeats have waited, because this
process stood still, are not evicted. Bad bytes end the connection that they came on, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import random
import selectors
import socket
import threading
import time

from paceline.errors import GeneratorError, UsageError
from paceline.policy.groups import GroupGenerator, Rules
from paceline.train.decentralized.generator.forks import Closeable, close_in_children
from paceline.train.decentralized.generator.job import Job, Settings
from paceline.train.decentralized.generator.messages import ToWorker, decode_from_worker, encode
from paceline.train.decentralized.generator.wire import (
    HANDSHAKE_S,
    MAX_FRAME_TO_SERVICE,
    FrameReader,
    ServiceHandshake,
    Session,
    check_secret,
    format_address,
)

_log = logging.getLogger("paceline.generator")

MAX_STRANGERS = 64
"""So many connections at once may not have proved that they know the secret. More wait to be accepted."""

PATIENCE_S = 1.0
"""A stranger that takes longer makes room for those that wait."""

_MAX_UNSENT = 64 * 1024 * 1024
_READ = 64 * 1024
_SWEEP_S = 1.0


_GOODBYE_S = 0.01
"""How often a service that ends looks whether its workers have left."""


class _Connection:
    """A socket, and what has to be sent through it."""

    def __init__(self, service: GeneratorService, link: socket.socket, name: str, now_s: float) -> None:
        self.name = name
        self.socket = link
        self.frames = FrameReader()
        self.handshake = ServiceHandshake(service.secret)
        self.session: Session | None = None
        self.heard_s = now_s
        self.unsent = bytearray(self.handshake.hello)
        self.is_closing = False
        self.is_closed = False
        self.waits_to_write = False
        self._service = service

    def send(self, message: ToWorker) -> None:
        """Send, at the end of this round of the loop."""
        if self.session is not None and not self.is_closing:
            self.unsent += self.session.seal(self._service.encoded(message))
            self._service.has_unsent.add(self)

    def close(self, reason: str) -> None:
        """Send what is left, and close."""
        if not self.is_closing:
            _log.debug("%s is closed: %s", self.name, reason)
            self.is_closing = True
            self._service.has_unsent.add(self)


class GeneratorService:
    """Forms the groups of one job, in a thread of its own.

        service = GeneratorService("127.0.0.1", 0, secret, Rules(group_size=4))
        service.start()
        client = GeneratorClient([service.address], secret, ...)
        service.stop()

    It listens on ``host`` and ``port`` only; port 0 takes a free one. ``total_steps`` is the number of local steps of
    all workers together after which they are told Enough. ``adapt_group_size`` chooses the group size from measured
    steps and averages; ``link_aware`` groups hosts with links of about the same rate. Workers without a number get
    ``first_number`` and those after it. A worker whose connection ends has ``grace_s`` to come back. For ``settle_s``
    after the first worker has joined, new workers get no number and no job ends: this service may be the successor of
    one that failed, whose workers come one by one. ``seed`` makes formations that are random repeatable.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: bytes = b"",
        rules: Rules | None = None,
        *,
        total_steps: int | None = None,
        adapt_group_size: bool = False,
        link_aware: bool = False,
        first_number: int = 1,
        grace_s: float = 1.0,
        settle_s: float = 3.0,
        seed: int = 0,
    ) -> None:
        if total_steps is not None and total_steps < 1:
            raise UsageError(f"total_steps is {total_steps}: give 1 or more, or None for a job without an end")
        if not (grace_s >= 0 and settle_s >= 0 and first_number >= 0):
            raise UsageError("grace_s, settle_s and first_number must be 0 or more")
        self.secret = check_secret(secret)
        self.has_unsent: set[_Connection] = set()
        self._host, self._port = host, port
        self._rules = rules or Rules()
        self._settings = Settings(total_steps, adapt_group_size, link_aware, first_number, grace_s, settle_s)
        self._seed = seed
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._listener: socket.socket
        self._address = ""
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._selector: selectors.BaseSelector
        self._connections: dict[_Connection, None] = {}
        self._strangers: dict[_Connection, None] = {}
        self._accepts_s = -math.inf  # after this time; then the listener is not polled until then
        self._encoded: tuple[ToWorker | None, bytes] = (None, b"")

    # Called by whoever owns the service

    def start(self) -> None:
        """Listen, and serve until :meth:`stop`."""
        if self._thread is not None:
            raise UsageError("this generator service has been started already")
        self._listener = _listen(self._host, self._port)
        self._address = format_address(self._host, self._listener.getsockname()[1])
        generator = GroupGenerator(self._rules, rng=random.Random(self._seed))
        self._job = Job(generator, random.SystemRandom().getrandbits(63), _now_ms(), self._settings)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        close_in_children(self)
        self._thread = threading.Thread(target=self._run, name="paceline generator", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """``host:port`` where this service listens."""
        if self._thread is None:
            raise UsageError("this generator service has no address before start()")
        return self._address

    @property
    def instance(self) -> int:
        """A random number that tells this service from its predecessors."""
        return self._running_job.instance

    @property
    def is_running(self) -> bool:
        """Whether workers are served."""
        return self._thread is not None and self._thread.is_alive()

    def status(self) -> dict[str, object]:
        """Return counts of workers by phase, of groups and steps, and the groups that wait."""
        with self._lock:
            return self._running_job.status(time.monotonic())

    def stop(self, wait_s: float = 0.0) -> None:
        """Close all connections and end the thread. Workers go on alone, and look for a service.

        At the end of a job, ``wait_s`` lets the workers say goodbye first.
        """
        thread = self._thread
        if thread is None or self._stopping:
            return
        end_s = time.monotonic() + wait_s
        while self._connections and thread.is_alive() and time.monotonic() < end_s:
            time.sleep(_GOODBYE_S)
        self._stopping = True
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"x")
        thread.join()

    def sockets(self) -> list[Closeable]:
        """Return what a forked process has to close."""
        links = [connection.socket for connection in self._connections]
        return [self._listener, self._wake_receiver, self._wake_sender, *links]

    @property
    def _running_job(self) -> Job:
        if self._job is None:
            raise UsageError("start() the generator service first")
        return self._job

    # The thread

    def encoded(self, message: ToWorker) -> bytes:
        """Return the bytes of a message, which often goes to several workers in a row."""
        if self._encoded[0] is not message:
            self._encoded = (message, encode(message))
        return self._encoded[1]

    def _run(self) -> None:
        job = self._running_job
        next_sweep_s = time.monotonic() + _SWEEP_S
        try:
            while not self._stopping:
                begin_s = time.monotonic()
                wake_s = min(job.next_tick_s, next_sweep_s)
                if self._accepts_s > begin_s:
                    wake_s = min(wake_s, self._accepts_s)
                events = self._selector.select(max(0.0, wake_s - begin_s))
                with self._lock:
                    now_s = time.monotonic()
                    for key, mask in events:
                        if key.fileobj is self._listener:
                            self._accept(now_s)
                        elif isinstance(key.data, _Connection):
                            self._handle(key.data, mask, now_s)
                    if now_s >= self._accepts_s:
                        self._accept_now()
                    if now_s >= next_sweep_s:
                        next_sweep_s = now_s + _SWEEP_S
                        self._sweep(now_s)
                    if begin_s >= job.next_tick_s:  # what has come by then is read, even if this process stood still
                        job.tick(begin_s)
                    self._flush(now_s)
        except Exception:
            _log.exception("the group generator has failed; workers go on alone")
        finally:
            for connection in list(self._connections):
                self._end(connection, time.monotonic())
            for closing in (self._selector, self._listener, self._wake_receiver, self._wake_sender):
                closing.close()

    def _accept(self, now_s: float) -> None:
        """Accept all that wait. If there are too many strangers, those that take long go, and new ones wait."""
        while len(self._strangers) < MAX_STRANGERS or self._end_slow_stranger(now_s):
            try:
                link, peer = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    _log.error("cannot accept a worker: %s; raise the limit of open files (ulimit -n)", error.strerror)
                    self._accept_again_s(now_s + _SWEEP_S)
                return
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(self, link, format_address(peer[0], peer[1]), now_s)
            self._connections[connection] = self._strangers[connection] = None
            self._selector.register(link, selectors.EVENT_READ, connection)
            self.has_unsent.add(connection)
        self._accept_again_s(next(iter(self._strangers)).heard_s + PATIENCE_S)

    def _end_slow_stranger(self, now_s: float) -> bool:
        oldest = next(iter(self._strangers))
        if oldest.heard_s + PATIENCE_S > now_s:
            return False
        _log.warning("%s is closed: others wait, and it has not proved that it knows the secret", oldest.name)
        self._end(oldest, now_s)
        return True

    def _accept_again_s(self, when_s: float) -> None:
        """Leave connections that come in the kernel's queue until then, or until a stranger is none any more."""
        if self._accepts_s == -math.inf:
            self._selector.unregister(self._listener)
        self._accepts_s = when_s

    def _accept_now(self) -> None:
        if self._accepts_s != -math.inf:
            self._accepts_s = -math.inf
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _handle(self, connection: _Connection, mask: int, now_s: float) -> None:
        if connection.is_closed:
            return
        if mask & selectors.EVENT_WRITE:
            self.has_unsent.add(connection)
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = connection.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(connection, now_s)
            return
        if connection.is_closing:
            return
        try:
            connection.frames.feed(data)
            self._read_frames(connection, now_s)
        except GeneratorError as error:
            _log.warning("%s is closed: it %s", connection.name, error)
            self._end(connection, now_s)
        except Exception:
            _log.exception("%s is closed: its message could not be served", connection.name)
            self._end(connection, now_s)

    def _read_frames(self, connection: _Connection, now_s: float) -> None:
        while not connection.is_closing and (body := connection.frames.next()) is not None:
            if connection.session is not None:
                connection.heard_s = now_s
                message = decode_from_worker(connection.session.open(body))
                self._running_job.receive(connection, message, now_s, _now_ms())
                continue
            answer, connection.session = connection.handshake.answer(body)
            connection.unsent += answer
            self.has_unsent.add(connection)
            if connection.session is None:
                _log.warning("%s is closed: it does not know this job's secret", connection.name)
                connection.close("wrong secret")
            else:
                self._known(connection)
                connection.heard_s = now_s
                connection.frames.limit = MAX_FRAME_TO_SERVICE

    def _known(self, connection: _Connection) -> None:
        """A connection is no stranger any more: there is room for another one."""
        if connection in self._strangers:
            del self._strangers[connection]
            self._accept_now()

    def _flush(self, now_s: float) -> None:
        """Send what has gathered. Sending can end connections, and then others have something to say."""
        while self.has_unsent:
            connections, self.has_unsent = self.has_unsent, set()
            for connection in connections:
                if not connection.is_closed:
                    self._write(connection, now_s)

    def _write(self, connection: _Connection, now_s: float) -> None:
        try:
            while connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._end(connection, now_s)
            return
        if len(connection.unsent) > _MAX_UNSENT:
            _log.warning("%s is closed: it does not read", connection.name)
            self._end(connection, now_s)
        elif connection.is_closing and not connection.unsent:
            self._end(connection, now_s)
        elif bool(connection.unsent) != connection.waits_to_write:
            connection.waits_to_write = bool(connection.unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            self._selector.modify(connection.socket, events, connection)

    def _sweep(self, now_s: float) -> None:
        """Close connections that nobody uses."""
        unused_s = max(HANDSHAKE_S, 2 * self._rules.lease_s)
        for connection in list(self._connections):
            limit_s = HANDSHAKE_S if connection.session is None or connection.is_closing else unused_s
            attached = connection.session is not None and self._running_job.is_attached(connection)
            if not attached and connection.heard_s + limit_s <= now_s:
                _log.warning("%s is closed: it has said nothing for %.0f s", connection.name, limit_s)
                self._end(connection, now_s)

    def _end(self, connection: _Connection, now_s: float) -> None:
        if connection.is_closed:
            return
        connection.is_closed = connection.is_closing = True
        self._connections.pop(connection, None)
        self._known(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.session is not None:
            self._running_job.closed(connection, now_s)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        code = error.errno or 0  # that of a name that is not found is below zero
        reason = os.strerror(code) if code > 0 else str(error)
        raise GeneratorError(
            f"cannot listen on {format_address(host, port)}: {reason}; give another address, or end what uses it"
        ) from None
    listener.setblocking(False)
    return listener


def _now_ms() -> int:
    return int(time.time() * 1000)
