"""The ring: every rank talks to its two neighbours only."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.halves import from_all_gather
from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


def ring_all_gather(num_ranks: int, pieces: int) -> Transfers:
    """Chunks [r * pieces, (r + 1) * pieces) go once round the ring, from rank r upwards to rank r - 1."""
    hop, owner, piece = np.ogrid[: num_ranks - 1, :num_ranks, :pieces]
    return Transfers(
        step=hop * pieces + piece,
        source=(owner + hop) % num_ranks,
        destination=(owner + hop + 1) % num_ranks,
        chunk=owner * pieces + piece,
    )


def ring_reduce_scatter(num_ranks: int, pieces: int) -> Transfers:
    """Chunks [r * pieces, (r + 1) * pieces) go once round the ring, from rank r + 1 upwards to rank r, and add up.

    The same way round as the all-gather: so each port hears one neighbour only, also in an all-reduce of which some
    ranks are in the second half already. Two that send to one port fill its queue until it drops.
    """
    hop, owner, piece = np.ogrid[: num_ranks - 1, :num_ranks, :pieces]
    return Transfers(
        step=hop * pieces + piece,
        source=(owner + hop + 1) % num_ranks,
        destination=(owner + hop + 2) % num_ranks,
        chunk=owner * pieces + piece,
        reduce=True,
    )


@algorithm(Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
def ring(collective: Collective, *, pieces: int = 1) -> Draft:
    """Reduce-scatter round the ring, then all-gather round the ring.

    Any n. Steps: n - 1 for either half, times ``pieces``. Bytes a rank sends and receives: (n - 1)/n of the
    buffer for either half, which is optimal. Lateness: a late rank stalls every chunk on its way round, so
    the whole 2(n - 1)/n remains after its arrival.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    ranks = collective.num_ranks
    return from_all_gather(
        collective, ranks * pieces, ring_all_gather(ranks, pieces), ring_reduce_scatter(ranks, pieces)
    )
