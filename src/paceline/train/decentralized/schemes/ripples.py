"""Ripples: groups formed by a generator average their weights, beside the next steps or between two of them."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import GeneratorError, UsageError
from paceline.policy.groups import Formation, Rules
from paceline.train.decentralized.generator.client import GeneratorClient
from paceline.train.decentralized.generator.messages import (
    Abort,
    Average,
    Commit,
    Detached,
    Enough,
    Joined,
    Left,
    Refused,
    Solo,
    Start,
)
from paceline.train.decentralized.generator.service import GeneratorService
from paceline.train.decentralized.hosts import host_name, own_address
from paceline.train.decentralized.mesh import GroupMesh
from paceline.train.decentralized.schemes.scheme import Scheme, Worker

_log = logging.getLogger("paceline.decentralized")

_STANDBYS = 8
"""So many of the first workers can run the generator; the others only use it."""

_FIRST_GROUP_SIZE = 2


@dataclass
class _Averaged:
    """A group average that awaits Commit: add ``difference`` to the weights then."""

    serial: int
    difference: torch.Tensor
    num_members: int
    began_s: float
    took_s: float


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
        rules = _rules(group_size, formation, slow_factor, patience_s, lease_s, longest_average_s)
        self._overlap = overlap
        self._longest_s = longest_average_s
        self._service: GeneratorService | None = None
        # Shared by the training thread, the two threads here and the client's, under this condition:
        self._changed = threading.Condition()
        self._may_ask = False  # no request or average is under way
        self._ready: _Averaged | None = None  # committed, to be applied
        self._replacement: torch.Tensor | None = None  # others' mean for a worker whose own weights are old
        self._joined = self._copying = self._finishing = self._ended = False
        self._mean: torch.Tensor | None = None  # the answer to average()
        self._refused = ""
        self._detached = ""
        # The groups' thread alone:
        self._averaged: _Averaged | None = None
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
        for thread in self._threads:
            thread.start()
        self._client = self._connect(rules, group_size == "auto", link_aware)
        self._await(lambda: self._joined and not self._copying, "the generator has not let this worker in")
        self._apply()

    # Joining.

    def _connect(self, rules: Rules, adapts: bool, link_aware: bool) -> GeneratorClient:
        place = self.worker.generator
        if place is not None:
            addresses, secret = [place.address], place.secret
        else:
            addresses, secret = self._start_services(rules, adapts, link_aware)
        return GeneratorClient(
            addresses,
            secret,
            worker=None if place is not None else self.mesh.worker,
            host=host_name(),
            address=self.mesh.address,
            on_message=self._on_message,
            fresh=place is not None,
            lease_s=rules.lease_s,
        )

    def _start_services(self, rules: Rules, adapts: bool, link_aware: bool) -> tuple[list[str], bytes]:
        """Start a generator beside this worker if it is one of the first; return where all are, and their secret."""
        mesh = self.mesh
        assert isinstance(mesh, GroupMesh)
        shared: list[Any] = [secrets.token_bytes(32)]
        dist.broadcast_object_list(shared, group=mesh.group, group_src=0)
        secret: bytes = shared[0]
        mine, error = "", ""
        if mesh.worker < _STANDBYS:
            try:
                self._service = GeneratorService(
                    own_address(),
                    0,
                    secret,
                    rules,
                    total_steps=self.worker.total_steps,
                    adapt_group_size=adapts,
                    link_aware=link_aware,
                )
                self._service.start()
                mine = self._service.address
            except (OSError, GeneratorError, UsageError) as problem:
                error = str(problem)
        said: list[tuple[str, str]] = [("", "")] * mesh.num_workers
        dist.all_gather_object(said, (mine, error), group=mesh.group)
        addresses = [address for address, _ in said if address]
        if not addresses:
            raise GeneratorError(f"no worker could start the group generator: {said[0][1]}")
        return addresses, secret

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
            last, self._last = self._last, None
            steps, self._steps_untold = self._steps_untold, 0
            if last is None:
                self._client.request(steps=steps, step_s=step_s)
            else:
                self._client.request(
                    steps=steps,
                    step_s=step_s,
                    average_s=last.took_s,
                    average_bytes=last.difference.numel() * last.difference.element_size(),
                    group_size=last.num_members,
                )
        if not self._overlap and not self.done.is_set():
            with self.waiting(), self._changed:
                self._changed.wait_for(lambda: self._may_ask or self._ready or self._refused or self.done.is_set())
            self._apply()
        self._step_began_s = time.perf_counter()

    def _apply(self) -> None:
        """Change the weights as averages that have ended say."""
        with self._changed:
            ready, self._ready = self._ready, None
            replacement, self._replacement = self._replacement, None
        if replacement is not None:
            self.weights.write(replacement)
            self._client.ready()
        elif ready is not None:
            self.weights.add(ready.difference)
            self._last = ready
        if replacement is not None or ready is not None:
            with self._changed:
                self._may_ask = True

    def _check(self) -> None:
        if self._refused:
            raise GeneratorError(self._refused)

    # Messages. The client's thread calls this, and must not wait.

    def _on_message(self, message: object) -> None:
        if isinstance(message, (Start, Commit, Abort)):
            if isinstance(message, Abort):
                self.mesh.give_up(message.serial, message.reason)
            self._groups.put(message)
        if isinstance(message, Joined):
            self.mesh.join(message.worker)
        if isinstance(message, (Average, Commit, Abort)):
            if isinstance(message, Average) and message.replaces is not None:
                self.mesh.give_up(message.replaces, "it is tried again with the workers that are left")
            self._globals.put(message)
        with self._changed:
            if isinstance(message, Joined):
                self._joined, self._detached = True, ""
                self._copying = message.copy
                self._may_ask = not message.copy
            elif isinstance(message, Solo):
                self._may_ask = not self._copying
            elif isinstance(message, Detached):
                self._detached = message.reason
                self._groups.put(message)
                self._globals.put(message)
            elif isinstance(message, Refused):
                self._refused = message.reason
            elif isinstance(message, Enough):
                self.done.set()
            elif isinstance(message, Left):
                _log.debug("worker %d has left its groups", self.mesh.worker)
            self._changed.notify_all()

    def _serve(self, inbox: queue.SimpleQueue[Any], act: Any) -> None:
        while (message := inbox.get()) is not None:
            try:
                act(message)
            except Exception:  # a fault here must not end the thread: others wait for its answers
                _log.exception("worker %d could not serve %s", self.mesh.worker, type(message).__name__)

    # Groups.

    def _on_group_message(self, message: object) -> None:
        if isinstance(message, Start):
            self._average_group(message)
            return
        averaged, self._averaged = self._averaged, None
        if isinstance(message, Detached):
            self._may_ask_again()
        elif averaged is None or averaged.serial != getattr(message, "serial", -1):
            self._averaged = averaged
            if isinstance(message, Abort):
                self._may_ask_again()
        elif isinstance(message, Commit):
            averaged.took_s = time.perf_counter() - averaged.began_s
            size = averaged.difference.numel() * averaged.difference.element_size()
            self.statistics.count_average(averaged.num_members, size, averaged.took_s)
            with self._changed:
                self._ready = averaged
                self._changed.notify_all()
            if self._finishing:
                self._apply()  # the training thread makes no more steps
        else:
            self._may_ask_again()

    def _average_group(self, start: Start) -> None:
        begin = time.perf_counter()
        snapshot, mean = self.weights.new(), self.weights.new()
        self.weights.read(snapshot)
        mean.copy_(snapshot)
        addresses = dict(zip(start.members, start.addresses, strict=True))
        try:
            self.mesh.reduce(mean, start.members, start.serial, addresses=addresses, timeout_s=self._longest_s)
        except RuntimeError as error:  # of c10d: a member is lost or late
            self.statistics.failed_groups += 1
            _log.info("worker %d: group %d has failed: %s", self.mesh.worker, start.serial, error)
            self._client.finished(start.serial, ok=False)
            return
        self._averaged = _Averaged(start.serial, mean.sub_(snapshot), len(start.members), begin, 0.0)
        self._client.finished(start.serial, ok=True)

    def _may_ask_again(self) -> None:
        with self._changed:
            self._may_ask = not self._copying
            self._changed.notify_all()

    # Averages of all workers: for average(), for a worker that joins, and at the end.

    _global: tuple[Average, torch.Tensor] | None = None  # done, and to be committed

    def _on_average(self, message: object) -> None:
        if isinstance(message, Average):
            self._average_all(message)
        elif self._global is not None and (
            isinstance(message, Detached) or getattr(message, "serial", -1) == self._global[0].serial
        ):
            average, vector = self._global
            self._global = None
            # A generator that is lost behind the last average leaves nothing to wait for: the others have it, too.
            if isinstance(message, Commit) or (isinstance(message, Detached) and average.final):
                self._take(average, vector)

    def _average_all(self, average: Average) -> None:
        vector = self.weights.new(self.weights.num_weights)
        if self.mesh.worker in average.contributors:
            if self._finishing:
                self._apply()
            self.weights.read(vector)
        else:
            vector.zero_()
        addresses = dict(zip(average.members, average.addresses, strict=True))
        try:
            self.mesh.reduce(
                vector, average.members, average.serial, mean=False, addresses=addresses, timeout_s=self._longest_s
            )
        except RuntimeError as error:
            _log.info("worker %d: average %d has failed: %s", self.mesh.worker, average.serial, error)
            self._client.average_finished(average.serial, ok=False)
            return
        self._global = average, vector.div_(len(average.contributors))
        self._client.average_finished(average.serial, ok=True)

    def _take(self, average: Average, vector: torch.Tensor) -> None:
        with self._changed:
            if self.mesh.worker not in average.receivers:
                return
            if average.final:
                self._ended = True
            if self._copying:
                self._copying = False
                self._ready, self._replacement = None, vector
            self._mean = vector
            self._changed.notify_all()

    def average(self) -> torch.Tensor:
        """Return the mean of all live workers' weights. The others go on training."""
        with self._changed:
            self._mean = None
        self._client.ask_average()
        with self.waiting():
            self._await(lambda: self._mean is not None or bool(self._detached), "the workers' mean has not come")
        if self._mean is None:
            raise GeneratorError(f"there is no mean of all workers: {self._detached}")
        return self._mean

    def finish(self) -> None:
        """Serve the groups that are left, wait until all workers have ended, and take their mean."""
        with self._changed:
            self._finishing = True
        self._apply()
        self._client.drain()
        with self.waiting():
            self._await(lambda: self._ended, "finish(): the other workers have not ended")
        assert self._mean is not None
        self.weights.write(self._mean)

    def _await(self, condition: Any, otherwise: str) -> None:
        limit_s = self.worker.timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: condition() or self._refused, limit_s):
                why = f": {self._detached}" if self._detached else ""
                raise GeneratorError(f"{otherwise} within {limit_s:.0f} s{why}")
            self._check()

    def close(self) -> None:
        """Leave the job, and end the generator if it runs here."""
        self._client.close()
        for inbox in (self._groups, self._globals):
            inbox.put(None)
        for thread in self._threads:
            thread.join(self._longest_s)
        if self._service is not None:
            self._service.stop()


def _rules(
    group_size: int | str, formation: str, slow_factor: float, patience_s: float, lease_s: float, longest_s: float
) -> Rules:
    if group_size != "auto" and not isinstance(group_size, int):
        raise UsageError(f'group_size is {group_size!r}: give a number of 2 or more, or "auto"')
    kinds = {one.value: one for one in Formation}
    if formation not in kinds:
        raise UsageError(f"there is no formation {formation!r}: choose one of {', '.join(kinds)}")
    return Rules(
        group_size=_FIRST_GROUP_SIZE if isinstance(group_size, str) else group_size,
        formation=kinds[formation],
        slow_factor=slow_factor,
        patience_s=patience_s,
        longest_average_s=longest_s,
        lease_s=lease_s,
    )
