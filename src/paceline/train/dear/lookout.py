"""How many buckets are all-reduced in backpropagation: rank 0 tries, a few steps each, and decides.

What it watches is the lag: how long after its last gradients have left all are reduced and agreed on. The question to
ask next is :mod:`paceline.policy.early`'s. As networks change, it asks again after a while.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from paceline.policy.early import Trial, next_num_early

STEPS_PER_TRIAL = 5

WARM_UP_STEPS = 10
"""The first steps with new buckets are not like the others: memory is touched for the first time."""

LOOK_AGAIN_STEPS = 1000
"""So many steps after the end of a search the next one begins."""


class Lookout:
    """The search for one layout of buckets; they travel in halves when it begins."""

    def __init__(self, num_buckets: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most = num_buckets - 1  # the bucket that leaves last has nothing to hide behind
        self._clock = clock
        self._rests = WARM_UP_STEPS
        self._last_s: float | None = None
        self._trials: list[Trial] = []
        self._lags_s: list[float] = []
        self._times_s: list[float] = []
        self._num_early = 0

    def saw(self, lag_s: float) -> None:
        """A step has ended, with this lag.

        The step in which a trial was decided on is still one as before: it only starts the clock.
        """
        now_s = self._clock()
        if self._rests:
            self._rests -= 1
        elif self._last_s is not None:
            self._times_s.append(now_s - self._last_s)
            self._lags_s.append(lag_s)
        self._last_s = now_s

    def next_num_early(self) -> int | None:
        """Rank 0, once a step: how many to all-reduce from the next round on; None to go on as before."""
        if self._rests:
            return None
        if not self._trials and self._num_early:
            return self._try(0)
        if len(self._lags_s) < STEPS_PER_TRIAL:
            return None
        measured = map(statistics.median, (self._lags_s, self._times_s))
        self._trials.append(Trial(self._num_early, *measured))
        chosen = next_num_early(self._trials, self._most)
        if any(chosen == trial.num_early for trial in self._trials):
            self._trials.clear()
            self._rests = LOOK_AGAIN_STEPS
        return self._try(chosen)

    def _try(self, num_early: int) -> int | None:
        self._last_s = None
        self._lags_s.clear()
        self._times_s.clear()
        changed, self._num_early = num_early != self._num_early, num_early
        return num_early if changed else None
