"""What of the all-gathers has its place in backpropagation: what was tried in, a number of buckets out. Pure.

A reduce-scatter hides behind backpropagation and an all-gather behind the next forward pass. Where the links have time
to spare in backpropagation, what is ready first can be gathered there too: an all-reduce, one collective in place of
two, and less to hide in the forward pass. PipeDAP fills idle slots in this way. Too many of them make the last
reduce-scatter late, and the more the later: so the number is found by halving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLACK = 0.0075
"""Reductions may lag behind by this share of an iteration more than they do anyway: less cannot be told from chance."""


@dataclass(frozen=True)
class Trial:
    """So many buckets, the first that are ready, were all-reduced; how long then the others lagged behind, usually."""

    num_early: int
    lag_s: float
    iteration_s: float


def next_num_early(trials: Sequence[Trial], most: int) -> int:
    """What to try after these trials, of which the first is of none; one that was tried is the answer.

    >>> lags_s = {0: 0.020, 5: 0.021, 8: 0.020, 9: 0.035}
    >>> trials = [Trial(0, 0.020, 1.0)]
    >>> while (chosen := next_num_early(trials, most=10)) not in [trial.num_early for trial in trials]:
    ...     trials.append(Trial(chosen, lags_s[chosen], 1.0))
    >>> [trial.num_early for trial in trials], chosen
    ([0, 5, 8, 9], 8)
    """
    limit_s = trials[0].lag_s + SLACK * trials[0].iteration_s
    above = min((trial.num_early for trial in trials if trial.lag_s > limit_s), default=most + 1)
    below = max(trial.num_early for trial in trials if trial.lag_s <= limit_s and trial.num_early < above)
    return (below + above) // 2
