"""How long an iteration takes, from step() to step(): what both searches of rank 0 measure of what they try."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

STEPS_PER_TRIAL = 5
"""Iterations of a trial. The first pays for the change and does not count; of the others it is the median."""


class Laps:
    """Looks at the clock once a step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last_s: float | None = None
        self._times_s: list[float] = []

    def lap(self) -> float | None:
        """A step has ended: seconds of an iteration if that was the last of a trial."""
        now_s = self._clock()
        if self._last_s is not None:
            self._times_s.append(now_s - self._last_s)
        self._last_s = now_s
        if len(self._times_s) < STEPS_PER_TRIAL:
            return None
        iteration_s = statistics.median(self._times_s[1:])
        self._times_s.clear()
        return iteration_s

    def pass_over(self) -> None:
        """What happened since the last step is no part of an iteration."""
        self._last_s = self._clock()

    def stop(self) -> None:
        """The next step begins a trial, and what happens until then is no part of it."""
        self._last_s = None
