"""Binomial trees: the number of ranks that have it doubles each step."""

from __future__ import annotations

from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfer, Transfers


def _tree(num_ranks: int) -> list[tuple[int, int, int, int]]:
    """(step, parent, child, size of the child's subtree), root 0; the largest subtrees first."""
    edges = []
    depth = (num_ranks - 1).bit_length()
    for step in range(depth):
        distance = 1 << (depth - 1 - step)
        for parent in range(0, num_ranks, 2 * distance):
            child = parent + distance
            if child < num_ranks:
                edges.append((step, parent, child, min(distance, num_ranks - child)))
    return edges


@algorithm(Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER)
def binomial(collective: Collective) -> Draft:
    """A binomial tree rooted at the root, its largest subtree served first.

    Any n. Steps: ceil(log2 n), the fewest possible. Bytes: the root moves ceil(log2 n) buffers in a broadcast or
    reduce, (n - 1)/n of one in a gather or scatter. Lateness: a late rank delays its subtree (reduce: its ancestors).

    Source: folklore; Thakur, Rabenseifner and Gropp, 2005.
    """
    ranks, root = collective.num_ranks, collective.root
    whole_buffer = collective.kind in (Kind.BROADCAST, Kind.REDUCE)
    rows = []
    for step, parent, child, size in _tree(ranks):
        source, target = (parent + root) % ranks, (child + root) % ranks
        runs = [(0, 1)] if whole_buffer else _cyclic_run(target, size, ranks)
        rows += [Transfer(step, source, (target,), chunk, count, False) for chunk, count in runs]
    spread = Transfers.from_rows(rows)
    num_chunks = 1 if whole_buffer else ranks
    if collective.kind in (Kind.BROADCAST, Kind.SCATTER):
        return num_chunks, spread
    return num_chunks, spread.mirrored(reduce=collective.kind is Kind.REDUCE)


def _cyclic_run(first: int, size: int, modulus: int) -> list[tuple[int, int]]:
    """The numbers first, first + 1, ... modulo the modulus, as one or two runs (start, count)."""
    straight = min(size, modulus - first)
    return [(first, straight)] + ([(0, size - straight)] if size > straight else [])
