"""Direct: every chunk goes straight from where it is to where it is needed."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.halves import from_all_gather
from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


def direct_all_gather(num_ranks: int) -> Transfers:
    """Rank r sends chunk r to r + 1, then to r + 2, ..."""
    distance, rank = np.ogrid[1:num_ranks, :num_ranks]
    return Transfers(step=distance, source=rank, destination=(rank + distance) % num_ranks, chunk=rank)


def _from_root(root: int, num_ranks: int, *, own_chunk_each: bool) -> Transfers:
    others = (root + np.arange(1, num_ranks)) % num_ranks
    chunk = others if own_chunk_each else np.zeros_like(others)
    return Transfers(step=np.arange(num_ranks - 1), source=root, destination=others, chunk=chunk)


@algorithm(
    Kind.ALL_REDUCE,
    Kind.REDUCE_SCATTER,
    Kind.ALL_GATHER,
    Kind.BROADCAST,
    Kind.REDUCE,
    Kind.GATHER,
    Kind.SCATTER,
)
def direct(collective: Collective) -> Draft:
    """Every rank sends to every other in turn: rank r to r + 1, then r + 2, ... (rooted: the root only).

    Any n. Steps: n - 1 (all-reduce: 2(n - 1)). Bytes as for the ring; a broadcast or reduce loads its root with
    n - 1 buffers. Lateness: only messages from or to the late rank wait, but a port serves them in order.

    Source: folklore; the all-reduce is the "scatter-reduce-allgather" of many parameter-server designs.
    """
    ranks = collective.num_ranks
    if collective.kind in (Kind.BROADCAST, Kind.SCATTER):
        scatter = collective.kind is Kind.SCATTER
        return (ranks if scatter else 1), _from_root(collective.root, ranks, own_chunk_each=scatter)
    if collective.kind in (Kind.REDUCE, Kind.GATHER):
        gather = collective.kind is Kind.GATHER
        spread = _from_root(collective.root, ranks, own_chunk_each=gather)
        return (ranks if gather else 1), spread.mirrored(reduce=not gather)
    return from_all_gather(collective, ranks, direct_all_gather(ranks))
