"""The order in which a model uses its parameters: learnt in one iteration, checked in all others. Pure.

Order is a matter of speed only. A bucket that is needed earlier than expected is waited for, and that is all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

PATIENCE = 3
"""So many iterations in another order, one after another, and it is learnt anew; then twice as many, and so on."""


def learnt(uses: Sequence[int], num_parameters: int) -> list[int]:
    """All parameters by first use; those that were not used come last, as they were registered.

    >>> learnt([2, 0, 2], 4)
    [2, 0, 1, 3]
    """
    return list(dict.fromkeys((*uses, *range(num_parameters))))


def out_of_order(arrivals: Sequence[int]) -> bool:
    """Whether buckets were needed in another order than theirs; one that was not needed is no offence."""
    return any(later < earlier for earlier, later in itertools.pairwise(arrivals))


def worth_learning(streak: int, times_learnt: int) -> bool:
    """Whether so many iterations out of order, in a row, justify learning; patience doubles each time."""
    patience: int = PATIENCE * 2 ** max(0, times_learnt - 1)
    return streak >= patience
