"""Who keeps arriving late, from how long each rank spent in the same collectives: numbers in, decision out.

Ranks leave an all-reduce together, give or take a message. So whoever spent the least time in it came last, and the
difference to who spent the most is how late: no clock needs to be synchronised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

_MOSTLY = 0.75
"""A rank is late if it is so in this share of the steps."""

_SHARE_OF_TRANSFER = 0.1
"""Less than this share of what the collective takes without waiting is none: ranks do not leave in one moment."""

_KEEP = (0.75, 3.0)
"""A lateness that is this many times what was decided before, or anything between, changes nothing."""


def lateness_s(spent_s: Sequence[Sequence[float]]) -> list[float]:
    """The median lateness of each rank; ``spent_s[rank][step]`` is the time it spent."""
    return [median(of_rank) for of_rank in _by_step(spent_s)]


def latecomers(
    spent_s: Sequence[Sequence[float]], before: Mapping[int, float], *, least_s: float = 0.005
) -> dict[int, float]:
    """Seconds by rank of those who keep arriving late; ``before`` is what was decided last.

    Seconds are powers of two, rounded down, so that the same schedule serves while lateness wanders. A rank becomes
    late above a threshold and stays so down to half of it. When most are late, nobody is: then a few are early, and
    nothing is gained.

    >>> latecomers([[0.9, 0.8], [0.9, 0.8], [0.1, 0.1]], {})
    {2: 0.5}
    """
    transfer_s = median(map(min, zip(*spent_s, strict=True)))
    enter_s = max(least_s, _SHARE_OF_TRANSFER * transfer_s)
    found: dict[int, float] = {}
    for rank, late_s in enumerate(_by_step(spent_s)):
        threshold_s = enter_s / 2 if rank in before else enter_s
        if sum(late >= threshold_s for late in late_s) >= _MOSTLY * len(late_s):
            found[rank] = _settled(median(late_s), before.get(rank))
    return found if 2 * len(found) <= len(spent_s) else {}


def _by_step(spent_s: Sequence[Sequence[float]]) -> list[list[float]]:
    most = [max(step) for step in zip(*spent_s, strict=True)]
    return [[longest - spent for longest, spent in zip(most, of_rank, strict=True)] for of_rank in spent_s]


def _settled(late_s: float, before_s: float | None) -> float:
    if before_s is not None and _KEEP[0] * before_s <= late_s <= _KEEP[1] * before_s:
        return before_s
    return 2.0 ** math.floor(math.log2(late_s))
