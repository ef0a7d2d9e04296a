"""Bruck: all-gather in ceil(log2 n) steps for any n, near neighbours first."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.halves import from_all_gather
from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


def _all_gather(num_ranks: int) -> Transfers:
    """Before the step of distance d a rank holds chunks r .. r + d - 1 (cyclic), and fetches the next d of them."""
    rank = np.arange(num_ranks)
    parts = []
    distance = 1
    while distance < num_ranks:
        size = min(distance, num_ranks - distance)
        straight = np.minimum(size, num_ranks - rank)
        wraps = rank[straight < size]
        source = np.concatenate((rank, wraps))
        order = np.argsort(source, kind="stable")  # the two runs of a rank are neighbours: one message
        parts.append(
            Transfers(
                step=0,
                source=source[order],
                destination=(source[order] - distance) % num_ranks,
                chunk=np.concatenate((rank, np.zeros_like(wraps)))[order],
                count=np.concatenate((straight, size - straight[wraps]))[order],
            )
        )
        distance *= 2
    return Transfers.sequence(parts)


@algorithm(Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
def bruck(collective: Collective) -> Draft:
    """Bruck's all-gather over distances 1, 2, 4, ...; mirrored, a reduce-scatter; both, an all-reduce.

    Any n. Steps: ceil(log2 n) for either half, the fewest possible. Bytes a rank: (n - 1)/n of the buffer for either
    half, optimal too. The last messages are the largest and go farthest. Lateness: the whole work remains.

    Source: Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing systems",
    1997; the all-reduce from its mirror image: Träff, "Optimal, non-pipelined reduce-scatter and allreduce", 2024.
    """
    return from_all_gather(collective, collective.num_ranks, _all_gather(collective.num_ranks))
