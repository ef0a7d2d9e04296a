"""Multicast: the network replicates, so each byte is sent once."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.registry import Draft, algorithm
from paceline.algorithms.ring import ring_reduce_scatter
from paceline.errors import UsageError
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfer, Transfers


def multicast_all_gather(num_ranks: int, chains: int, pieces: int) -> Transfers:
    """Chunks [r * pieces, (r + 1) * pieces) go from rank r to all others; each chain has one sender at a time."""
    start = np.arange(chains) * num_ranks // chains
    length = np.diff(np.append(start, num_ranks))
    place = np.arange(num_ranks) - np.repeat(start, length)
    rank, piece = np.ogrid[:num_ranks, :pieces]
    everyone = np.arange(num_ranks)
    others_of = np.stack([np.delete(everyone, rank) for rank in range(num_ranks)])
    return Transfers(
        step=(place[rank] * pieces + piece).ravel(),
        source=(rank + 0 * piece).ravel(),
        destination=np.repeat(others_of, pieces, axis=0).ravel(),
        chunk=(rank * pieces + piece).ravel(),
        first=np.arange(num_ranks * pieces + 1) * (num_ranks - 1),
    )


@algorithm(Kind.BROADCAST, Kind.ALL_GATHER, Kind.ALL_REDUCE, multicast=True)
def multicast(collective: Collective, *, chains: int = 1, pieces: int = 1) -> Draft:
    """Each owner multicasts its part to all others; ``chains`` owners at a time, so that receivers are not flooded.

    An all-reduce is a reduce-scatter round the ring, and then this all-gather of what each rank has summed.

    Any n, any number of chains up to n. The ranks form chains of neighbours; in an all-gather the t-th rank of every
    chain sends in step t. Steps: ceil(n / chains) times ``pieces``; an all-reduce has (n - 1) ``pieces`` before that.
    Bytes a rank: it sends 1/n of the buffer and receives (n - 1)/n; in an all-reduce it sends one buffer and receives
    2(n - 1)/n, which a ring also sends; in a broadcast the root sends one buffer. Lateness: only the late rank's own
    part waits; an all-reduce waits as a ring does.

    Source: Khalilov et al., "Network-offloaded bandwidth-optimal broadcast and allgather for distributed AI", 2024.
    """
    ranks = collective.num_ranks
    if chains > ranks:
        raise UsageError(f"{ranks} ranks form at most {ranks} chains, not {chains}")
    if collective.kind is Kind.BROADCAST:
        others = tuple(rank for rank in range(ranks) if rank != collective.root)
        rows = [Transfer(piece, collective.root, others, piece, 1, False) for piece in range(pieces)]
        return pieces, Transfers.from_rows(rows)
    gather = multicast_all_gather(ranks, chains, pieces)
    if collective.kind is Kind.ALL_GATHER:
        return ranks * pieces, gather
    return ranks * pieces, Transfers.sequence([ring_reduce_scatter(ranks, pieces), gather])
