"""Recursive halving (reduce-scatter) and doubling (all-gather) over a hypercube, folded for any n."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.folding import Folding
from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, IntArray, Kind
from paceline.ir.transfers import Transfers


def _doubling(core: IntArray, border: IntArray) -> Transfers:
    """All-gather in the core, whose i-th rank starts with chunks [border[i], border[i + 1])."""
    place = np.arange(len(core))
    parts = []
    for q in range(len(core).bit_length() - 1):
        low = place >> q << q
        parts.append(
            Transfers(
                step=0,
                source=core,
                destination=core[place ^ (1 << q)],
                chunk=border[low],
                count=border[low + (1 << q)] - border[low],
            )
        )
    return Transfers.sequence(parts)


@algorithm(Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
def halving_doubling(collective: Collective) -> Draft:
    """Recursive halving, then recursive doubling; pairs of ranks fold into one when n is not a power of two.

    Any n. Steps: log2 n for either half when n = 2^q; else floor(log2 n), and one step before and one after (of a
    reduce-scatter, of an all-gather, or of both together). Bytes a rank: (n - 1)/n of the buffer for either half when
    n = 2^q; else the ranks of a folded pair move up to a buffer more each way in an all-reduce, up to one and a half in
    either half alone (bruck has no such cost). Lateness: as for the ring, the whole work remains.

    Source: Rabenseifner, "Optimization of collective reduction operations", 2004; Thakur, Rabenseifner and Gropp, 2005.
    """
    ranks, fold = collective.num_ranks, Folding.of(collective.num_ranks)
    if collective.kind is Kind.ALL_REDUCE:
        num_chunks = len(fold.core)
        gather = _doubling(fold.core, np.arange(num_chunks + 1, dtype=np.int32))
        parts = [
            fold.hand_in(chunk=0, count=num_chunks, reduce=True),
            gather.mirrored(reduce=True),
            gather,
            fold.hand_out(chunk=0, count=num_chunks),
        ]
        return num_chunks, Transfers.sequence(parts)
    border = np.append(fold.core, ranks).astype(np.int32)  # a keeper's chunks and its folded rank's are neighbours
    gather = _doubling(fold.core, border)
    if collective.kind is Kind.REDUCE_SCATTER:
        parts = [
            fold.hand_in(chunk=0, count=ranks, reduce=True),
            gather.mirrored(reduce=True),
            fold.hand_out(chunk=fold.folded, count=1),
        ]
    else:
        # A folded rank lacks the chunks below its own, and those above it (the last may lack none above).
        below = fold.hand_out(chunk=0, count=fold.folded)
        above = [
            Transfers(step=0, source=k, destination=f, chunk=f + 1, count=ranks - f - 1)
            for k, f in zip(fold.keeper.tolist(), fold.folded.tolist(), strict=True)
            if f < ranks - 1
        ]
        parts = [
            fold.hand_in(chunk=fold.folded, count=1, reduce=False),
            gather,
            Transfers.overlay([below, *above]),
        ]
    return ranks, Transfers.sequence(parts)
