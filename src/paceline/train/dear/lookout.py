"""How many buckets are all-reduced in backpropagation: rank 0 tries, a few steps each, and decides.

It measures iterations from step() to step() and asks :mod:`paceline.policy.early` what to try next; the others follow
what it says in the agreement of a step. As networks change, it searches again after a while.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable

from paceline.policy.early import Trial, next_num_early

log = logging.getLogger("paceline.dear")

STEPS_PER_TRIAL = 4

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
        self._times_s: list[float] = []
        self._trials: list[Trial] = []
        self._num_early = 0

    def next_num_early(self) -> int | None:
        """Rank 0, once a step: how many to all-reduce from the next round on; None to go on as before."""
        if self._rests:
            self._rests -= 1
            return None
        now_s = self._clock()
        if self._last_s is not None:
            self._times_s.append(now_s - self._last_s)
        self._last_s = now_s
        if len(self._times_s) <= STEPS_PER_TRIAL:
            return None
        # The first iteration has begun as those of the trial before.
        self._trials.append(Trial(self._num_early, statistics.median(self._times_s[1:])))
        self._times_s.clear()
        chosen = next_num_early(self._trials, self._most)
        if any(chosen == trial.num_early for trial in self._trials):
            log.info("%d of %d buckets are all-reduced in backpropagation", chosen, self._most + 1)
            self._trials.clear()
            self._rests, self._last_s = LOOK_AGAIN_STEPS, None
        changed, self._num_early = chosen != self._num_early, chosen
        return chosen if changed else None
