"""What of the all-gathers has its place in backpropagation: what was tried in, a number of buckets out. Pure.

A reduce-scatter hides behind backpropagation and an all-gather behind the next forward pass. Where the links have time
to spare in backpropagation, some buckets can be gathered there too: an all-reduce, one collective in place of two, and
less to hide in the forward pass. PipeDAP fills idle slots in this way. With too many of them the last reduce-scatter is
late. So the number is tried: quarters first, then the middle between the best and the better of its neighbours, or the
other.

The buckets are spread evenly over the model. If they were those that are ready first, all that is left to gather would
belong to the first layers, and be needed at once when the forward pass begins; spread, computation lies in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_TRIALS = 8


@dataclass(frozen=True)
class Trial:
    """So many buckets were all-reduced, and an iteration took so long."""

    num_early: int
    iteration_s: float


def early_buckets(num_early: int, num_buckets: int) -> list[bool]:
    """Return for each bucket, in the order of the forward pass, whether it is all-reduced.

    The first bucket never is: it leaves last, and has nothing to hide behind.

    >>> "".join("R" if early else "." for early in early_buckets(2, 7))
    '.R..R..'
    """
    most = num_buckets - 1
    return [False] * min(1, num_buckets) + [
        (left + 1) * num_early // most > left * num_early // most for left in reversed(range(most))
    ]


def next_num_early(trials: Sequence[Trial], most: int) -> int:
    """What to try after these trials; if it is one that was tried, it is the answer.

    >>> trials = []
    >>> while (chosen := next_num_early(trials, most=20)) not in [trial.num_early for trial in trials]:
    ...     trials.append(Trial(chosen, iteration_s=1.0 + 0.01 * abs(chosen - 13)))
    >>> [trial.num_early for trial in trials], chosen
    ([0, 5, 10, 15, 20, 12, 13, 14], 13)
    """
    tried = {trial.num_early: trial.iteration_s for trial in trials}
    for quarter in range(5):
        if quarter * most // 4 not in tried:
            return quarter * most // 4
    best = min(tried, key=lambda number: tried[number])
    below = max((number for number in tried if number < best), default=best)
    above = min((number for number in tried if number > best), default=best)
    for neighbour in sorted((below, above), key=lambda number: tried[number]):
        middle = (best + neighbour) // 2
        if middle not in tried and len(trials) < MOST_TRIALS:
            return middle
    return best
