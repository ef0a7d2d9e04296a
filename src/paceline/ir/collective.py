"""What a collective promises: which rank has which chunk before, and which must have it after.

A collective cuts its buffer into chunks. For each chunk some ranks are *contributors* (they hold an input)
and some are *needers* (they must end with the sum of all contributors' inputs, each counted once; with one
contributor, that is a copy). The whole family is these two columns:

===============  ====================  ====================  ==========================
collective       contributors          needers               chunks, k >= 1
===============  ====================  ====================  ==========================
all-reduce       every rank            every rank            k
reduce-scatter   every rank            the chunk's owner     k * n
all-gather       the chunk's owner     every rank            k * n
broadcast        the root              every rank            k
reduce           every rank            the root              k
gather           the chunk's owner     the root              k * n
scatter          the root              the chunk's owner     k * n
all-to-all       the chunk's sender    the chunk's receiver  k * n * n
barrier          every rank            every rank            1, empty; counting twice is harmless
===============  ====================  ====================  ==========================

Owners hold runs of chunks in rank order, as torch.distributed lays out its buffers: chunk c of C belongs to
rank ``c // k``; in an all-to-all it goes from rank ``c // (k n)`` to rank ``c // k mod n``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from paceline.errors import ScheduleError, UsageError

IntArray = npt.NDArray[np.int32]

MAX_RANKS = 32768
"""More ranks than any schedule here serves: a proof needs a bit for each pair of ranks."""

MAX_CHUNKS = 1 << 20
"""More chunks than any schedule here needs; it bounds what a hostile file can make us allocate."""


class Kind(str, Enum):
    """The nine collectives, by the names the command line uses."""

    ALL_REDUCE = "allreduce"
    REDUCE_SCATTER = "reducescatter"
    ALL_GATHER = "allgather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "alltoall"
    BARRIER = "barrier"

    def __str__(self) -> str:
        """The plain name, in every Python version."""
        return self.value

    @classmethod
    def parse(cls, text: str) -> Kind:
        """Accept ``allreduce``, ``all-reduce``, ``all_reduce`` and ``AllReduce`` alike."""
        name = text.lower().replace("-", "").replace("_", "")
        try:
            return cls(name)
        except ValueError:
            names = ", ".join(kind.value for kind in cls)
            raise UsageError(f"there is no collective {text!r}; there are {names}") from None


ROOTED = frozenset({Kind.BROADCAST, Kind.REDUCE, Kind.GATHER, Kind.SCATTER})
REDUCING = frozenset({Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE, Kind.BARRIER})
_OWNED = frozenset({Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.GATHER, Kind.SCATTER})


@dataclass(frozen=True)
class Collective:
    """One collective over ranks 0 .. num_ranks - 1.

    >>> Collective(Kind.BROADCAST, num_ranks=8, root=3)
    """

    kind: Kind
    num_ranks: int
    root: int = 0

    def __post_init__(self) -> None:
        """Refuse what no schedule could serve."""
        if not 1 <= self.num_ranks <= MAX_RANKS:
            raise ScheduleError(f"{self.kind} needs 1 to {MAX_RANKS} ranks, not {self.num_ranks}")
        if not 0 <= self.root < self.num_ranks:
            raise ScheduleError(f"root {self.root} is not one of the ranks 0 to {self.num_ranks - 1}")
        if self.root and self.kind not in ROOTED:
            raise ScheduleError(f"{self.kind} has no root: leave it at 0")

    def __str__(self) -> str:
        """``allreduce of 8 ranks``, ``broadcast of 8 ranks from 3``."""
        root = f" with root {self.root}" if self.kind in ROOTED else ""
        return f"{self.kind} of {self.num_ranks} ranks{root}"

    @property
    def idempotent(self) -> bool:
        """Whether counting a contribution twice is harmless: true of a barrier's 'I am here'."""
        return self.kind is Kind.BARRIER

    @property
    def chunk_unit(self) -> int:
        """The number of chunks is a multiple of this."""
        if self.kind in _OWNED:
            return self.num_ranks
        if self.kind is Kind.ALL_TO_ALL:
            return self.num_ranks * self.num_ranks
        return 1

    def check_num_chunks(self, num_chunks: int) -> None:
        """Raise ScheduleError unless the buffer can be cut into so many chunks."""
        if not 1 <= num_chunks <= MAX_CHUNKS:
            raise ScheduleError(f"a schedule has 1 to {MAX_CHUNKS} chunks, not {num_chunks}")
        if num_chunks % self.chunk_unit:
            raise ScheduleError(
                f"the chunks of {self} come in multiples of {self.chunk_unit}, and {num_chunks} is none"
            )
        if self.kind is Kind.BARRIER and num_chunks != 1:
            raise ScheduleError(f"a barrier has one chunk, not {num_chunks}")

    def chunk_bytes(self, size_bytes: float, num_chunks: int) -> float:
        """Bytes of one chunk.

        ``size_bytes`` is the buffer that torch.distributed and nccl-tests speak of: the tensor of an
        all-reduce, broadcast or reduce; the whole output of an all-gather or gather; the whole input of a
        reduce-scatter or scatter; what one rank sends in an all-to-all. A barrier moves none.
        """
        if self.kind is Kind.BARRIER:
            return 0.0
        if self.kind is Kind.ALL_TO_ALL:
            return size_bytes * self.num_ranks / num_chunks
        return size_bytes / num_chunks

    def contributor(self, chunks: IntArray, num_chunks: int) -> IntArray | None:
        """The rank that holds each of these chunks before; None when every rank holds an input."""
        if self.kind in (Kind.BROADCAST, Kind.SCATTER):
            return np.full_like(chunks, self.root)
        if self.kind in (Kind.ALL_GATHER, Kind.GATHER, Kind.ALL_TO_ALL):
            return chunks // (num_chunks // self.num_ranks)
        return None

    def needer(self, chunks: IntArray, num_chunks: int) -> IntArray | None:
        """The rank that must hold each of these chunks after; None when every rank must."""
        if self.kind in (Kind.REDUCE, Kind.GATHER):
            return np.full_like(chunks, self.root)
        if self.kind in (Kind.REDUCE_SCATTER, Kind.SCATTER):
            return chunks // (num_chunks // self.num_ranks)
        if self.kind is Kind.ALL_TO_ALL:
            return chunks // (num_chunks // self.num_ranks**2) % self.num_ranks
        return None
