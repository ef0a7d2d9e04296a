"""The dissemination barrier."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


@algorithm(Kind.BARRIER)
def dissemination(collective: Collective) -> Draft:
    """In step s, rank r tells rank r + 2^s of everybody it has heard of.

    Any n. Steps: ceil(log2 n), the fewest possible. Messages are empty. Lateness: nobody leaves before the late rank.

    Source: Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
    """
    ranks = collective.num_ranks
    step, rank = np.ogrid[: (ranks - 1).bit_length(), :ranks]
    return 1, Transfers(
        step=step, source=rank + 0 * step, destination=(rank + (1 << step)) % ranks, chunk=0, reduce=True
    )
