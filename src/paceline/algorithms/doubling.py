"""Recursive doubling: partners swap whole buffers at distances 1, 2, 4, ..."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.folding import Folding
from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


@algorithm(Kind.ALL_REDUCE, Kind.BARRIER, num_moves=lambda c, _: c.num_ranks * c.num_ranks.bit_length())
def doubling(collective: Collective) -> Draft:
    """Partners at distance 1, 2, 4, ... swap and add their whole buffers.

    Any n (pairs of ranks fold into one when n is not a power of two). Steps: ceil(log2 n), plus one when n is not a
    power of two. Bytes a rank: as many buffers as steps, so for small buffers. Each rank sets
    aside one buffer. Lateness: the whole work remains. As a barrier, which needs a power of two to be as short as
    dissemination, it has partners wait for each other: of ranks that share cores the slowest is sooner done.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    fold = Folding.of(collective.num_ranks)
    place = np.arange(len(fold.core))
    swaps = [
        Transfers(step=0, source=fold.core, destination=fold.core[place ^ (1 << q)], chunk=0, reduce=True)
        for q in range(len(fold.core).bit_length() - 1)
    ]
    return 1, Transfers.sequence([fold.hand_in(chunk=0, count=1, reduce=True), *swaps, fold.hand_out(chunk=0, count=1)])
