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
from torch import nn

from paceline.train.dear.buckets import Layout
from paceline.train.dear.overlap import Launched


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
        self.size_bytes = self.flat.numel() * self.flat.element_size()
        self.views = [
            self.flat.as_strided(parameter.size(), parameter.stride(), slot.offset)
            for parameter, slot in zip(self.parameters, layout.slots, strict=True)
        ]
        self._lent: list[torch.Tensor | None] = [None] * len(self.indexes)
        self.phase = Phase.IDLE
        self.missing: set[int] = set()
        self.used: list[bool] = [False] * len(self.indexes)
        self.dropped: set[int] = set()
        self.all_reduced = False
        self.reduction: Launched | None = None
        self.gather: Launched | None = None

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

    def lend(self, position: int) -> torch.Tensor:
        """A parameter's part of ``flat`` as a gradient for the user, who may let the tensor have other memory."""
        lent = self._lent[position] = self.views[position].detach()
        return lent

    def has_lent(self, position: int, gradient: torch.Tensor) -> bool:
        """Whether this gradient was lent, and is still in its place in ``flat``."""
        view = self.views[position]
        return (
            gradient is self._lent[position]
            and gradient.data_ptr() == view.data_ptr()
            and gradient.stride() == view.stride()
        )

    def await_all(self) -> None:
        """Expect a gradient for every parameter."""
        self.missing = set(self.indexes)
