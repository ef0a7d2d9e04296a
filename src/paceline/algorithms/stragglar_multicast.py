"""StragglAR whose finished chunks are spread by multicast.

While rank S is late, the other n - 1 ranks reduce-scatter among themselves, as in
:mod:`~paceline.algorithms.stragglar`. After its arrival S receives the partial sum of chunk r in round r, adds its own
part, and multicasts the complete chunk in round r + 1, while it receives the next one. So each rank receives one
message a round, and nobody but S sends more than its own partial sums.

The last chunk leaves S in round K at the earliest, so K + 1 rounds are at most one more than the least possible;
without multicast at least K - 1 + ceil(log2 n) are needed.
"""

from __future__ import annotations

import numpy as np

from paceline.algorithms.registry import Draft, algorithm
from paceline.algorithms.stragglar import check, reduce_scatter_to
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


def exchange(num_ranks: int, pieces: int) -> Transfers:
    """The rounds after the arrival of the last rank, n - 1; rank c mod (n - 1) has the partial sum of chunk c."""
    early, num_chunks = num_ranks - 1, pieces * (num_ranks - 1)
    chunk, late = np.arange(num_chunks), np.full(num_chunks, early)
    return Transfers(
        step=np.concatenate((chunk, chunk + 1)),
        source=np.concatenate((chunk % early, late)),
        destination=np.concatenate((late, np.tile(np.arange(early), num_chunks))),
        chunk=np.concatenate((chunk, chunk)),
        reduce=np.arange(2 * num_chunks) < num_chunks,
        first=np.concatenate((chunk, num_chunks + early * np.arange(num_chunks + 1))),
    )


@algorithm(Kind.ALL_REDUCE, min_ranks=3, multicast=True)
def stragglar_multicast(collective: Collective, *, late: int = 0, pieces: int = 1) -> Draft:
    """Reduce-scatter without the late rank, which then completes each chunk and multicasts it to all.

    Any n >= 3, any late rank, K = (n - 1) ``pieces`` chunks. Steps: (n - 2) ``pieces`` before the late rank is needed,
    then K + 1. Bytes: after the arrival the late rank receives one buffer and sends one, an early rank receives one and
    sends 1/(n - 1); all together send 2 buffers, where ``stragglar`` sends n. An early rank moves (n - 2)/(n - 1) of
    one before. Lateness: if the late rank comes (n - 2)/(n - 1) of a buffer time after the others or later, 1 + 1/K of
    a buffer time remains after its arrival; if it comes earlier the reduce-scatter goes on, without restart.

    Source: the reduce-scatter of Devraj et al., 2025, and the multicast of Khalilov et al., 2024; Paceline's own.
    """
    ranks = collective.num_ranks
    check(ranks, late, pieces)
    num_chunks = pieces * (ranks - 1)
    owner = (np.arange(num_chunks) % (ranks - 1)).astype(np.int32)
    parts = [reduce_scatter_to(owner, ranks - 1), exchange(ranks, pieces)]
    label = [rank for rank in range(ranks) if rank != late] + [late]
    return num_chunks, Transfers.sequence(parts).relabelled(ranks=label)
