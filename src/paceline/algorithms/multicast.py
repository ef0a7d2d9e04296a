"""Multicast: the network replicates, so each byte is sent once."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.registry import Draft, algorithm
from paceline.errors import UsageError
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfer, Transfers


@algorithm(Kind.BROADCAST, Kind.ALL_GATHER)
def multicast(collective: Collective, *, chains: int = 1, pieces: int = 1) -> Draft:
    """Each owner multicasts its part to all others; ``chains`` owners at a time, so that receivers are not flooded.

    Any n, any number of chains up to n. The ranks form chains of neighbours; in an all-gather the t-th rank of every
    chain sends in step t. Steps: ceil(n / chains) times ``pieces``. Bytes a rank: it sends 1/n of the buffer and
    receives (n - 1)/n; in a broadcast the root sends one buffer. Lateness: only the late rank's own part waits.

    Source: Khalilov et al., "Network-offloaded bandwidth-optimal broadcast and allgather for distributed AI", 2024.
    """
    ranks = collective.num_ranks
    if chains > ranks:
        raise UsageError(f"{ranks} ranks form at most {ranks} chains, not {chains}")
    if collective.kind is Kind.BROADCAST:
        others = tuple(rank for rank in range(ranks) if rank != collective.root)
        rows = [Transfer(piece, collective.root, others, piece, 1, False) for piece in range(pieces)]
        return pieces, Transfers.from_rows(rows)
    start = np.arange(chains) * ranks // chains
    length = np.diff(np.append(start, ranks))
    place = np.arange(ranks) - np.repeat(start, length)
    rank, piece = np.ogrid[:ranks, :pieces]
    everyone = np.arange(ranks)
    others_of = np.stack([np.delete(everyone, rank) for rank in range(ranks)])
    return ranks * pieces, Transfers(
        step=(place[rank] * pieces + piece).ravel(),
        source=(rank + 0 * piece).ravel(),
        destination=np.repeat(others_of, pieces, axis=0).ravel(),
        chunk=(rank * pieces + piece).ravel(),
        first=np.arange(ranks * pieces + 1) * (ranks - 1),
    )
