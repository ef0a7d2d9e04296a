"""How many buckets are all-reduced in backpropagation: rank 0 tries, a few steps each, and decides.

It measures iterations from step() to step() and asks :mod:`paceline.policy.early` what to try next; the others follow
what it says in the agreement of a step. As networks change, it searches again after a while.
"""

from __future__ import annotations

import logging

from paceline.policy.early import Trial, next_num_early
from paceline.train.dear.laps import Laps
from paceline.units import format_duration

log = logging.getLogger("paceline.dear")

WARM_UP_STEPS = 10
"""The first steps with new buckets are not like the others: memory is touched for the first time."""

LOOK_AGAIN_STEPS = 1000
"""So many steps after the end of a search the next one begins."""


class Lookout:
    """The search for one layout of buckets; they travel in halves when it begins."""

    def __init__(self, num_buckets: int, laps: Laps | None = None) -> None:
        self._most = num_buckets - 1  # the bucket that leaves last has nothing to hide behind
        self._laps = laps or Laps()
        self._rests = WARM_UP_STEPS
        self._trials: list[Trial] = []
        self._num_early = 0

    def next_num_early(self) -> int | None:
        """Rank 0, once a step: how many to all-reduce from the next round on; None to go on as before."""
        if self._rests:
            self._rests -= 1
            return None
        iteration_s = self._laps.lap()
        if iteration_s is None:
            return None
        self._trials.append(Trial(self._num_early, iteration_s))
        log.info(
            "early all-reduces: %d of %d buckets take %s an iteration",
            self._num_early,
            self._most + 1,
            format_duration(iteration_s),
        )
        chosen = next_num_early(self._trials, self._most)
        if any(chosen == trial.num_early for trial in self._trials):
            log.info("early all-reduces: %d of %d buckets are best", chosen, self._most + 1)
            self._trials.clear()
            self._rests = LOOK_AGAIN_STEPS
            self._laps.stop()
        changed, self._num_early = chosen != self._num_early, chosen
        return chosen if changed else None
