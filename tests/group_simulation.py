"""Workers of a group generator in simulated time: no gradients, only when steps and groups begin and end."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from paceline.policy.groups import (
    Abort,
    Commit,
    GroupGenerator,
    Joined,
    Message,
    Solo,
    Start,
)


class Simulation:
    """Workers that make steps and ask for a group after each.

    ``compute_s`` gives the time of a worker's step that begins at a time, ``group_s`` that of an average of members.
    With ``overlap`` a worker goes on at once, asks again when its group has ended, and stands still only where a step
    ends ``lead`` steps after the one it last asked for. Without, it stands still until it has its answer.
    """

    def __init__(
        self,
        generator: GroupGenerator,
        hosts: Sequence[str],
        compute_s: Callable[[int, float], float],
        group_s: Callable[[Sequence[int]], float],
        *,
        overlap: bool = False,
        lead: int = 1,
    ) -> None:
        self.generator = generator
        self.compute_s = compute_s
        self.group_s = group_s
        self.overlap = overlap
        self.lead = lead
        self.now_s = 0.0
        self.steps = [0] * len(hosts)
        self.epochs = [0] * len(hosts)
        self.commits: list[tuple[float, tuple[int, ...], float]] = []  # when, who, how long it took
        self.waits_s: list[float] = []  # from request to Start or Solo
        self._asked_s: dict[int, float] = {}
        self._asked_at_step: dict[int, int] = {}
        self._stands: set[int] = set()
        self._step_s = [0.0] * len(hosts)
        self._started_s: dict[int, float] = {}
        self._events: list[tuple[float, int, str, int, int]] = []
        self._count = itertools.count()
        for worker, host in enumerate(hosts):
            self._hear(generator.join(worker, host, 0.0))
            self._begin(worker)

    def run(self, until_s: float, tick_s: float = 0.05) -> None:
        """Go on until a time."""
        self._at(self.now_s, "tick", 0, 0)
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, kind, worker, serial = heapq.heappop(self._events)
            if kind == "tick":
                for alive in range(len(self.steps)):
                    self._hear(self.generator.heartbeat(alive, self.now_s, self.epochs[alive]))
                self._hear(self.generator.tick(self.now_s))
                if self.now_s + tick_s <= until_s:
                    self._at(self.now_s + tick_s, "tick", 0, 0)
            elif kind == "end":
                self._hear(self.generator.finished(worker, serial, True, self.now_s, self.epochs[worker]))
            else:
                self.steps[worker] += 1
                self._after_step(worker)
        self.now_s = until_s

    def _after_step(self, worker: int) -> None:
        asks = worker not in self._asked_at_step
        if asks:
            self._asked_at_step[worker] = self.steps[worker]
            self._asked_s[worker] = self.now_s
        ahead = self.steps[worker] - self._asked_at_step[worker]
        if self.overlap and ahead < self.lead:
            self._begin(worker)
        else:
            self._stands.add(worker)
        if asks:
            step_s = self._step_s[worker] if self.overlap else None
            self._hear(self.generator.request(worker, self.now_s, self.epochs[worker], step_s))

    def _begin(self, worker: int) -> None:
        self._step_s[worker] = self.compute_s(worker, self.now_s)
        self._at(self.now_s + self._step_s[worker], "step", worker, 0)

    def _hear(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Joined):
                self.epochs[message.worker] = message.epoch
            if isinstance(message, Start):
                self._started_s[message.serial] = self.now_s
                for member in message.members:
                    self._at(self.now_s + self.group_s(message.members), "end", member, message.serial)
            if isinstance(message, (Start, Solo)):
                self.waits_s += [self.now_s - self._asked_s[member] for member in message.to]
            if isinstance(message, Commit):
                self.commits.append((self.now_s, message.members, self.now_s - self._started_s[message.serial]))
            if isinstance(message, (Commit, Abort, Solo)):
                for member in message.to:
                    self._answered(member)

    def _answered(self, worker: int) -> None:
        asked = self._asked_at_step.pop(worker)
        if worker in self._stands:
            self._stands.remove(worker)
            if self.overlap and self.steps[worker] > asked:
                self._after_step(worker)  # the step that ended meanwhile asks now
            else:
                self._begin(worker)

    def _at(self, when_s: float, kind: str, worker: int, serial: int) -> None:
        heapq.heappush(self._events, (when_s, next(self._count), kind, worker, serial))
