"""The averages of all workers: asked for by workers, to give a newcomer its weights, and the last one. Pure.

One average is under way at a time, because each worker executes them in the order of their serial numbers. Who asks
while one is under way receives the next. It fails if a member could not finish it, as then others wait in vain, if a
member has gone, or if it takes too long. Then it is made again for all its receivers with those that are left, under a
new serial number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from paceline.train.decentralized.generator.messages import Abort, Average, Commit, ToWorker

MAX_ATTEMPTS = 100
"""So often an average is made for the same receivers before it is given up. A process that died is dropped after a
second; until then attempts with it fail, one after another."""


class _Running:
    def __init__(self, average: Average, attempt: int, now_s: float) -> None:
        self.average = average
        self.attempt = attempt
        self.since_s = now_s
        self.unfinished = set(average.members)
        self.receivers = set(average.receivers)  # that are still there


class Averages:
    """Who waits for an average, and the one that is under way. Workers are told through ``send``."""

    def __init__(
        self, take_serial: Callable[[], int], send: Callable[[Iterable[int], ToWorker], None], longest_s: float
    ) -> None:
        self._take_serial = take_serial
        self._send = send
        self._longest_s = longest_s
        self._running: _Running | None = None
        self._waiting: set[int] = set()
        self._attempt = 0  # of what waits, if it has failed
        self._replaces: int | None = None
        self.had_final: set[int] = set()
        """The workers whose final average has ended, well or not."""

    # Wishes

    def ask(self, worker: int) -> None:
        """The worker wants the mean of all workers. If it is asking already, once is enough."""
        self._waiting.add(worker)

    def withdraw(self, worker: int) -> None:
        """The worker needs no average any more."""
        self._waiting.discard(worker)

    @property
    def is_running(self) -> bool:
        """Whether one is under way, so that no other can start."""
        return self._running is not None

    @property
    def waiting(self) -> set[int]:
        """The workers that have asked, for an average that has not started."""
        return set(self._waiting)

    def start(
        self, contributors: Iterable[int], addresses: Mapping[int, str], epoch: int, now_s: float, *, final: bool
    ) -> None:
        """Start one for those that wait, or a final one for all. ``addresses`` has all workers that are connected."""
        receivers = set(addresses) if final else self._waiting & set(addresses)
        if not receivers:
            return
        members = sorted({*contributors, *receivers})
        average = Average(
            self._take_serial(),
            epoch,
            tuple(members),
            tuple(addresses[member] for member in members),
            tuple(sorted(contributors)),
            tuple(sorted(receivers)),
            final,
            self._replaces,
        )
        self._running = _Running(average, self._attempt + 1, now_s)
        self._attempt, self._replaces = 0, None
        self._waiting -= receivers
        self._send(members, average)

    # What becomes of it

    def finished(self, worker: int, serial: int, ok: bool) -> None:
        """A member is done. Ignored if it is none, or has said so already."""
        running = self._running
        if running is None or running.average.serial != serial or worker not in running.unfinished:
            return
        running.unfinished.discard(worker)
        if not ok:
            self._fail(running, f"worker {worker} could not finish it")
        elif not running.unfinished:
            self._commit(running)

    def gone(self, worker: int) -> None:
        """A worker is not there any more."""
        self._waiting.discard(worker)
        running = self._running
        if running is not None and worker in running.average.members:
            done = worker not in running.unfinished
            running.unfinished.discard(worker)
            running.receivers.discard(worker)
            if not done:
                self._fail(running, f"worker {worker} has gone")
        self.had_final.discard(worker)

    def tick(self, now_s: float) -> None:
        """Give up an average that takes too long."""
        running = self._running
        if running is not None and running.since_s + self._longest_s <= now_s:
            late = _names(running.unfinished)
            self._fail(running, f"worker {late} did not finish it within {now_s - running.since_s:.1f} s")

    @property
    def next_tick_s(self) -> float:
        """When :meth:`tick` next has something to do."""
        return self._running.since_s + self._longest_s if self._running else math.inf

    def _commit(self, running: _Running) -> None:
        average, self._running = running.average, None
        self._send(average.members, Commit(average.serial))
        if average.final:
            self.had_final |= set(average.members)

    def _fail(self, running: _Running, reason: str) -> None:
        """Make it again, or give it up. Nobody takes its result, so all receivers have the same in the end."""
        average, self._running = running.average, None
        if not running.receivers:
            self._send(running.unfinished, Abort(average.serial, reason))
        elif running.attempt < MAX_ATTEMPTS:
            self._attempt, self._replaces = running.attempt, average.serial
            self._waiting |= running.receivers
            return
        else:
            told = average.members if average.final else running.receivers | running.unfinished
            self._send(told, Abort(average.serial, f"average of all workers, attempt {running.attempt}: {reason}"))
        if average.final:
            self.had_final |= set(average.members)


def _names(workers: Iterable[int]) -> str:
    return ", ".join(str(worker) for worker in sorted(workers))
