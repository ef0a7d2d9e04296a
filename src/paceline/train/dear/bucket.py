"""A bucket at run time: its buffers, and where it is in an iteration.

====================  ==============================================================================
phase                 what holds
====================  ==============================================================================
IDLE                  parameters and gradients are the user's; backpropagation may be filling them
REDUCING              gradients have left to be added up; ``p.grad`` is empty for autograd
PENDING               step() was called; the parameters are old until what is gathered has arrived
====================  ==============================================================================

IDLE -> REDUCING: the last gradient is there (or a step wants it). REDUCING -> PENDING: step(). PENDING -> IDLE: the
first use of a parameter. REDUCING -> IDLE: somebody reads or drops gradients before step().
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn

from paceline.train.dear.buckets import Layout


class Phase(Enum):
    """Where a bucket is; see the table above."""

    IDLE = 0
    REDUCING = 1
    PENDING = 2


class Bucket:
    """Parameters that travel together. ``flat`` is all of it, ``shard`` what this rank owns.

    ``all_reduced`` changes when a round begins: if it is set the sums come whole, with no all-gather after step().
    """

    def __init__(self, number: int, layout: Layout, parameters: Sequence[nn.Parameter]) -> None:
        self.number = number
        self.layout = layout
        self.indexes = [slot.index for slot in layout.slots]
        self.parameters = [parameters[index] for index in self.indexes]
        first = self.parameters[0]
        self.flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        self.shard = torch.zeros(layout.shard_numel, dtype=first.dtype, device=first.device)
        self.views = [
            self.flat.as_strided(parameter.size(), parameter.stride(), slot.offset)
            for parameter, slot in zip(self.parameters, layout.slots, strict=True)
        ]
        self.phase = Phase.IDLE
        self.missing: set[int] = set()
        self.used: list[bool] = [False] * len(self.indexes)
        self.dropped: set[int] = set()
        self.all_reduced = False
        self.reduction: dist.Work | None = None
        self.gather: dist.Work | None = None

    @property
    def size_bytes(self) -> int:
        """Of the flat buffer."""
        return self.flat.numel() * self.flat.element_size()

    @property
    def sums(self) -> torch.Tensor:
        """What this rank gets of the sums over all ranks: all of them, or its shard."""
        return self.flat if self.all_reduced else self.shard

    def part(self, rank: int) -> torch.Tensor:
        """A rank's part of the flat buffer."""
        begin = rank * self.layout.shard_numel
        return self.flat[begin : begin + self.layout.shard_numel]

    def own(self, rank: int) -> torch.Tensor:
        """The part of the sums that this rank answers for."""
        return self.part(rank) if self.all_reduced else self.shard

    def await_all(self) -> None:
        """Expect a gradient for every parameter."""
        self.missing = set(self.indexes)
