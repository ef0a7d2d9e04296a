"""Folding: how algorithms for 2^q ranks serve any n.

With n = 2^q + e, the first 2e ranks form pairs; the odd one of a pair hands its part to the even one, stays out,
and is handed the result. The even ones and the ranks that have no partner are the *core*, 2^q ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.ir.collective import IntArray
from paceline.ir.transfers import Transfers


@dataclass(frozen=True)
class Folding:
    """Who is in the core, in rank order, and who is folded into whom."""

    core: IntArray
    folded: IntArray
    keeper: IntArray

    @classmethod
    def of(cls, num_ranks: int) -> Folding:
        """The folding of n ranks."""
        extra = num_ranks - (1 << (num_ranks.bit_length() - 1))
        keeper = np.arange(0, 2 * extra, 2, dtype=np.int32)
        rest = np.arange(2 * extra, num_ranks, dtype=np.int32)
        return cls(core=np.concatenate((keeper, rest)), folded=keeper + 1, keeper=keeper)

    def hand_in(self, *, chunk: npt.ArrayLike, count: npt.ArrayLike, reduce: bool) -> Transfers:
        """Folded ranks hand these chunks to their keepers."""
        if not len(self.folded):
            return Transfers.none()
        return Transfers(step=0, source=self.folded, destination=self.keeper, chunk=chunk, count=count, reduce=reduce)

    def hand_out(self, *, chunk: npt.ArrayLike, count: npt.ArrayLike) -> Transfers:
        """Keepers hand these chunks to the folded ranks."""
        if not len(self.folded):
            return Transfers.none()
        return Transfers(step=0, source=self.keeper, destination=self.folded, chunk=chunk, count=count)
