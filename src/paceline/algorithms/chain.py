"""The pipelined chain: pieces of the buffer follow one another down a line of ranks."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


def chain_broadcast(num_ranks: int, pieces: int) -> Transfers:
    """From rank 0 down to the last rank, piece after piece."""
    piece, rank = np.ogrid[:pieces, : num_ranks - 1]
    return Transfers(step=piece + rank, source=rank + 0 * piece, destination=rank + 1, chunk=piece)


@algorithm(Kind.BROADCAST, Kind.REDUCE)
def chain(collective: Collective, *, pieces: int = 8) -> Draft:
    """Root, root + 1, root + 2, ...: each rank passes on a piece while it receives the next.

    Any n, any number of pieces. Steps: n - 2 + pieces. Bytes a rank: one buffer in, one buffer out, so with many
    pieces the time is one buffer over a port, which is optimal. Lateness: a late rank delays all behind it.

    Source: folklore; the pipelined broadcast of Worringen, 2003, and of NCCL.
    """
    ranks = (collective.root + np.arange(collective.num_ranks)) % collective.num_ranks
    spread = chain_broadcast(collective.num_ranks, pieces).relabelled(ranks=ranks)
    return pieces, spread if collective.kind is Kind.BROADCAST else spread.mirrored(reduce=True)
