"""From one all-gather, its whole family: mirrored it is a reduce-scatter, and the two in turn are an all-reduce."""

from __future__ import annotations

from paceline.algorithms.registry import Draft
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


def from_all_gather(
    collective: Collective, num_chunks: int, gather: Transfers, scatter: Transfers | None = None
) -> Draft:
    """The schedule of this collective that a given all-gather implies; its reduce-scatter may be given too."""
    if collective.kind is Kind.ALL_GATHER:
        return num_chunks, gather
    scatter = gather.mirrored(reduce=True) if scatter is None else scatter
    if collective.kind is Kind.REDUCE_SCATTER:
        return num_chunks, scatter
    return num_chunks, Transfers.sequence([scatter, gather])
