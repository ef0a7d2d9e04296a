"""Ripples: groups formed by a generator average their weights, beside the next steps or between two of them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import GeneratorError
from paceline.train.decentralized.generator.client import GeneratorClient
from paceline.train.decentralized.generator.messages import (
    Abort,
    Average,
    Commit,
    Detached,
    Enough,
    Evicted,
    Joined,
    Left,
    Refused,
    Solo,
    Start,
)
from paceline.train.decentralized.generator.service import GeneratorService
from paceline.train.decentralized.hosts import host_name
from paceline.train.decentralized.mesh import GroupMesh
from paceline.train.decentralized.schemes.ripples_start import read_rules, start_services
from paceline.train.decentralized.schemes.scheme import Scheme, Worker

_log = logging.getLogger("paceline.decentralized")

_LOOK_S = 0.5
_CLOSING_S = 10.0
_GOODBYES_S = 2.0
"""So long a generator outlives its job, until the other workers have left it."""
_COPY_ATTEMPTS = 3


@dataclass
class _Averaged:
    """A group average that awaits Commit: add ``difference`` to the weights then."""

    serial: int
    difference: torch.Tensor
    num_members: int
    num_copies: int  # how often this worker had been told to copy weights when it began
    began_s: float
    took_s: float = 0.0


class Ripples(Scheme):
    """Each worker asks for a group after a step, and averages its weights with the group's members.

    With ``overlap=True`` (the default) the worker goes on with its steps meanwhile. The average starts from a snapshot
    of the weights; when the mean has come, the next step boundary adds mean - snapshot. So local progress is kept, and
    the sum over all workers is what it was. At most one average of a worker is under way. With ``overlap=False``, as
    published, the worker stands still until its group has averaged.

    ``group_size`` is a number, or "auto" to choose it from the measured times of steps and averages. ``formation`` is
    "first_come", "division", "inter_intra" (for several workers on a host) or "random". ``link_aware`` groups hosts
    with links of about the same rate. ``patience_s`` is how long a group waits for a member that does not come;
    ``lease_s``, how long a silent worker stays a member; ``longest_average_s``, how long one average may take.

    The generator runs beside the first worker, and the next ones stand by: if it is lost they take over. Or it runs
    apart (``paceline generator``); then workers may come and go.

    Four threads work together. The training thread asks for groups and changes the weights, between two steps. The
    client's thread hears what the generator says; it alone decides whether a group or an average is still wanted. One
    thread averages with groups and one with all workers, each in the order of what has been heard.
    """

    def __init__(
        self,
        worker: Worker,
        overlap: bool = True,
        group_size: int | str = "auto",
        formation: str = "first_come",
        link_aware: bool = True,
        slow_factor: float = 1.5,
        patience_s: float = 10.0,
        lease_s: float = 30.0,
        longest_average_s: float = 60.0,
    ) -> None:
        super().__init__(worker)
        rules = read_rules(
            group_size, formation, slow_factor, patience_s, lease_s, longest_average_s, extra_arrivals=int(overlap)
        )
        self._overlap = overlap
        self._longest_s = longest_average_s
        self._lease_s = lease_s
        self._service: GeneratorService | None = None
        self._client: GeneratorClient | None = None
        # Shared by all threads, under this condition:
        self._changed = threading.Condition()
        self._may_ask = False  # no request or average is under way
        self._ready: list[_Averaged] = []  # committed, to be applied
        self._replacement: torch.Tensor | None = None  # others' mean for a worker whose own weights are old
        self._joined = self._copying = self._finishing = False
        self._num_copies = self._num_failed_copies = 0
        self._group: int | None = None  # the serial of the group that has started and not ended
        self._average: Average | None = None  # the average of all workers that has started and not ended
        self._wants_mean = False
        self._mean: torch.Tensor | None = None  # the answer to average()
        self._final: torch.Tensor | None = None  # the last mean of all
        self._uncommitted_final: torch.Tensor | None = None  # the generator was lost before it said Commit
        self._failed = ""  # why the mean that average() or finish() waits for does not come
        self._refused = ""
        self._detached = ""
        self._detached_at_s = 0.0
        # The groups' thread alone:
        self._averaged: _Averaged | None = None
        self._snapshot: torch.Tensor | None = None
        # The averages' thread alone:
        self._global: tuple[Average, torch.Tensor] | None = None  # done, and to be committed
        # The training thread alone:
        self._steps_untold = 0
        self._step_began_s = time.perf_counter()
        self._last: _Averaged | None = None
        self._groups: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._globals: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, args=(inbox, act), name=f"paceline {name}", daemon=True)
            for name, inbox, act in (
                ("groups", self._groups, self._on_group_message),
                ("averages", self._globals, self._on_average),
            )
        ]
        try:
            place = self.worker.generator
            if place is not None:
                addresses, secret = [place.address], place.secret
            else:
                self._service, addresses, secret = start_services(worker, rules, group_size == "auto", link_aware)
            self._client = GeneratorClient(
                addresses,
                secret,
                worker=None if place is not None else self.mesh.worker,
                host=host_name(),
                address=self.mesh.address,
                on_message=self._on_message,
                fresh=place is not None,
                lease_s=rules.lease_s,
                model=worker.model,
            )
            for thread in self._threads:  # they answer through the client
                thread.start()
            self._await(lambda: self._joined and not self._copying, "the generator has not let this worker in")
            self._apply()
            if isinstance(self.mesh, GroupMesh):
                dist.barrier(group=self.mesh.group)  # nobody ends the training before all have joined
        except BaseException:
            self.close()
            raise

    @property
    def _connected(self) -> GeneratorClient:
        assert self._client is not None
        return self._client

    # Steps.

    def after_step(self) -> None:
        """Apply an average that has come, and ask for the next one if none is under way."""
        step_s = time.perf_counter() - self._step_began_s
        self._steps_untold += 1
        self._apply()
        with self._changed:
            self._check()
            asks, self._may_ask = self._may_ask, False
        if asks:
            self._ask(step_s)
        if not self._overlap:
            with self.waiting(), self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._may_ask
                        or self._ready
                        or self._replacement is not None
                        or self._refused
                        or self.done.is_set()
                    )
                )
            self._apply()
        self._step_began_s = time.perf_counter()

    def _ask(self, step_s: float) -> None:
        last, self._last = self._last, None
        steps, self._steps_untold = self._steps_untold, 0
        if last is None:
            self._connected.request(steps=steps, step_s=step_s)
        else:
            self._connected.request(
                steps=steps,
                step_s=step_s,
                average_s=last.took_s,
                average_bytes=last.difference.numel() * last.difference.element_size(),
                group_size=last.num_members,
            )

    def _apply(self) -> None:
        """Change the weights as averages that have ended say."""
        with self._changed:
            ready, self._ready = self._ready, []
            replacement, self._replacement = self._replacement, None
        if replacement is not None:
            self.weights.write(replacement)
            self._connected.ready()
        for one in ready:
            self.weights.add(one.difference)
            self._last = one
        if replacement is not None or ready:
            self._may_ask_again()

    def _may_ask_again(self) -> None:
        with self._changed:
            self._may_ask = not self._copying and self._group is None
            self._changed.notify_all()

    def _check(self) -> None:
        if self._refused:
            raise GeneratorError(self._refused)

    # Messages. The client's thread calls this, and must not wait.

    def _on_message(self, message: object) -> None:
        if isinstance(message, Joined):
            message = self._join(message)
        with self._changed:
            given_up = self._note(message)
            self._changed.notify_all()
        for serial, reason in given_up:
            try:
                self.mesh.give_up(serial, reason)
            except Exception as error:  # the group is broken, or closed
                _log.debug("worker %d: %d cannot be given up: %s", self.mesh.worker, serial, error)
        if isinstance(message, (Start, Commit)):
            self._groups.put(message)
        if isinstance(message, (Average, Commit, Abort, Detached, Evicted)):
            self._globals.put(message)

    def _note(self, message: object) -> list[tuple[int, str]]:
        """Change what is shared; return which operations are to be given up, and why."""
        if isinstance(message, Start):
            self._group = message.serial
        elif isinstance(message, Average):
            self._average = message
            if message.replaces is not None:
                return [(message.replaces, "it is tried again with the workers that are left")]
        elif isinstance(message, (Commit, Abort)):
            return self._note_end(message)
        elif isinstance(message, (Detached, Evicted)):
            return self._note_loss(message)
        elif isinstance(message, Joined):
            self._note_joined(message)
        elif isinstance(message, Solo):
            self._may_ask = not self._copying
        elif isinstance(message, Refused):
            self._refused = message.reason
        elif isinstance(message, Enough):
            self.done.set()
        elif isinstance(message, Left):
            _log.debug("worker %d has left its groups", self.mesh.worker)
        return []

    def _note_end(self, message: Commit | Abort) -> list[tuple[int, str]]:
        average = self._average
        if message.serial == self._group:
            self._group = None
            if isinstance(message, Abort):  # after Commit, when it has been applied
                self._may_ask = not self._copying
        elif average is not None and message.serial == average.serial:
            self._average = None
            if isinstance(message, Abort) and self.mesh.worker in average.receivers:
                self._note_failed_average(message.reason)
        return [(message.serial, message.reason)] if isinstance(message, Abort) else []

    def _note_failed_average(self, reason: str) -> None:
        """The generator has given up an average that this worker waits for."""
        if self._copying:
            self._num_failed_copies += 1
            self._connected.ask_average()
        if not self._copying or self._num_failed_copies >= _COPY_ATTEMPTS:
            self._failed = reason

    def _note_loss(self, message: Detached | Evicted) -> list[tuple[int, str]]:
        """Nothing that has begun will be committed."""
        lost = [self._group] if self._group is not None else []
        lost += [self._average.serial] if self._average is not None else []
        self._group = self._average = None
        self._may_ask = not self._copying
        if isinstance(message, Detached):
            self._detached, self._detached_at_s = message.reason, time.monotonic()
        return [(serial, f"worker {self.mesh.worker} has lost the generator") for serial in lost]

    def _join(self, message: Joined) -> Joined | Refused:
        try:
            self.mesh.join(message.worker)
        except Exception as error:
            return Refused(f"worker {message.worker} cannot be reached by others: {error}")
        return message

    def _note_joined(self, message: Joined) -> None:
        self._joined, self._detached = True, ""
        self._copying = message.copy
        self._may_ask = not message.copy
        if message.copy:  # its own weights, and what was averaged with them, are old
            self._num_copies += 1
            self._ready, self._replacement = [], None
        elif self._wants_mean:
            self._connected.ask_average()

    def _serve(self, inbox: queue.SimpleQueue[Any], act: Callable[[Any], None]) -> None:
        while (message := inbox.get()) is not None:
            try:
                act(message)
            except Exception:  # a fault here must not end the thread: others wait for its answers
                _log.exception("worker %d could not serve %s", self.mesh.worker, type(message).__name__)

    # Groups.

    def _on_group_message(self, message: Start | Commit | threading.Event) -> None:
        if isinstance(message, Start):
            self._average_group(message)
        elif isinstance(message, threading.Event):
            message.set()
        elif self._averaged is not None and self._averaged.serial == message.serial:
            averaged, self._averaged = self._averaged, None
            self._commit(averaged)

    def _commit(self, averaged: _Averaged) -> None:
        averaged.took_s = time.perf_counter() - averaged.began_s
        size = averaged.difference.numel() * averaged.difference.element_size()
        self.statistics.count_average(averaged.num_members, size, averaged.took_s)
        with self._changed:
            if averaged.num_copies == self._num_copies:
                self._ready.append(averaged)
            self._changed.notify_all()
        if self._finishing:
            self._apply()  # the training thread makes no more steps

    def _average_group(self, start: Start) -> None:
        begin = time.perf_counter()
        with self._changed:
            if start.serial != self._group:
                return  # it has ended already
            num_copies = self._num_copies
        try:
            size = self.weights.size
            if self._snapshot is None or self._snapshot.numel() != size:
                self._snapshot = self.weights.new(size)
            self.weights.read(self._snapshot)
            mean = self._snapshot.clone()
            addresses = dict(zip(start.members, start.addresses, strict=True))
            self.mesh.reduce(mean, start.members, start.serial, addresses=addresses, timeout_s=self._longest_s)
            difference = self.weights.difference(mean, self._snapshot)
        except Exception as error:  # most often of c10d: a member is lost or late
            self.statistics.failed_groups += 1
            _log.info("worker %d: group %d has failed: %s", self.mesh.worker, start.serial, error)
            self._connected.finished(start.serial, ok=False)
            return
        self._averaged = _Averaged(start.serial, difference, len(start.members), num_copies, begin)
        self._connected.finished(start.serial, ok=True)

    # Averages of all workers: for average(), for a worker that joins, and at the end.

    def _on_average(self, message: Average | Commit | Abort | Detached | Evicted) -> None:
        if isinstance(message, Average):
            self._average_all(message)
        elif self._global is not None:
            average, vector = self._global
            if isinstance(message, (Detached, Evicted)):
                self._global = None
                if average.final:
                    with self._changed:
                        self._uncommitted_final = vector
            elif message.serial == average.serial:
                self._global = None
                if isinstance(message, Commit):
                    self._take(average, vector)

    def _average_all(self, average: Average) -> None:
        with self._changed:
            if self._average is not average:
                return  # it has ended already
        try:
            vector = self._part_of(average)
            addresses = dict(zip(average.members, average.addresses, strict=True))
            self.mesh.reduce(
                vector, average.members, average.serial, mean=False, addresses=addresses, timeout_s=self._longest_s
            )
        except Exception as error:
            _log.info("worker %d: average %d has failed: %s", self.mesh.worker, average.serial, error)
            self._connected.average_finished(average.serial, ok=False)
            return
        self._global = average, vector.div_(len(average.contributors))
        self._connected.average_finished(average.serial, ok=True)

    def _part_of(self, average: Average) -> torch.Tensor:
        """Return what this worker adds to an average."""
        vector = self.weights.new(self.weights.num_weights)
        if self.mesh.worker not in average.contributors:
            return vector.zero_()
        if average.final:
            served = threading.Event()  # the groups' thread has applied what was committed
            self._groups.put(served)
            served.wait(self._longest_s)
            # The last mean is done already, and perhaps others have heard its Commit: they are gone with it.
            if self._uncommitted_final is not None:
                return vector.copy_(self._uncommitted_final)
        self.weights.read(vector)
        return vector

    def _take(self, average: Average, vector: torch.Tensor) -> None:
        with self._changed:
            if self.mesh.worker not in average.receivers:
                return
            if average.final:
                self._final = vector
            if self._copying:
                self._copying = False
                self._num_failed_copies = 0
                self._replacement = vector
            self._mean, self._wants_mean = vector, False
            self._changed.notify_all()

    def average(self) -> torch.Tensor:
        """Return the mean of all live workers' weights. The others go on training."""
        with self._changed:
            self._mean, self._wants_mean, self._failed = None, True, ""
        self._connected.ask_average()
        with self.waiting():
            self._await(lambda: self._mean is not None or self._is_alone, "the workers' mean has not come")
        with self._changed:
            self._wants_mean = False
            if self._mean is None:
                raise GeneratorError(f"there is no mean of all workers: {self._detached}")
            return self._mean

    @property
    def _is_alone(self) -> bool:
        """Whether no generator has been there for so long that a job would have found another one."""
        return bool(self._detached) and time.monotonic() - self._detached_at_s > self._lease_s

    def finish(self) -> None:
        """Serve the groups that are left, wait until all workers have ended, and take their mean."""
        with self._changed:
            self._finishing, self._failed = True, ""
        self._apply()
        self._connected.drain()
        with self.waiting():
            self._await(
                lambda: (
                    self._final is not None
                    or (self._uncommitted_final is not None and (self._is_alone or bool(self._refused)))
                ),
                "finish(): the other workers have not ended",
            )
        final = self._final if self._final is not None else self._uncommitted_final
        assert final is not None
        self.weights.write(final)

    def _await(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait until the condition holds; raise an error if it will not."""
        limit_s = self.worker.timeout_s
        end_s = time.monotonic() + limit_s
        with self._changed:
            while not condition():
                self._check()
                if self._failed:
                    raise GeneratorError(f"{otherwise}: {self._failed}")
                if time.monotonic() >= end_s:
                    why = f": {self._detached}" if self._detached else ""
                    raise GeneratorError(f"{otherwise} within {limit_s:.0f} s{why}")
                self._changed.wait(min(_LOOK_S, max(0.0, end_s - time.monotonic())))

    def close(self) -> None:
        """Leave the job, and end the generator if it runs here."""
        if self._client is not None:
            self._client.close()
            self._on_message(Detached("this worker has left"))
        for inbox in (self._groups, self._globals):
            inbox.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_CLOSING_S)
        if self._service is not None:
            self._service.stop(wait_s=_GOODBYES_S if self._final is not None else 0.0)
