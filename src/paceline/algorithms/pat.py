"""PAT: parallel aggregated trees; ceil(log2 n) steps like Bruck, far neighbours first."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.halves import from_all_gather
from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


def _all_gather(num_ranks: int) -> Transfers:
    """In the step of distance d, who is a multiple of 2d away from a chunk's owner passes it on by d."""
    parts = []
    distance = 1 << ((num_ranks - 1).bit_length() - 1)
    while distance:
        rank, offset = np.ogrid[:num_ranks, : num_ranks - distance : 2 * distance]
        parts.append(
            Transfers(
                step=0,
                source=rank + 0 * offset,
                destination=(rank + distance) % num_ranks + 0 * offset,
                chunk=(rank - offset) % num_ranks,
            )
        )
        distance //= 2
    return Transfers.sequence(parts)


@algorithm(Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
def pat(collective: Collective) -> Draft:
    """A binomial tree from every rank at once, farthest hop first, hops of one step in one message.

    Any n. Steps: ceil(log2 n) for either half, the fewest possible. Bytes a rank: (n - 1)/n of the buffer for either
    half. The first messages go far and are small, the last go to a neighbour and are large: kinder to the upper
    levels of a network than Bruck. Lateness: the whole work remains.

    Source: Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations at scale", 2025 (NCCL).
    """
    return from_all_gather(collective, collective.num_ranks, _all_gather(collective.num_ranks))
