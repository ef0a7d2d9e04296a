"""Buffers, like running statistics, are rank 0's, as in DDP: broadcast before a forward pass if they changed.

Of the forward passes that train, only the first of a step does so: a rank that has to try one again after an error must
not broadcast alone.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Buffers:
    """The buffers of a module, broadcast in one operation for each dtype."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self._module = module
        self._group = group
        self.stale = False
        self._step = -1
        self.any = any(True for _ in module.buffers())

    def due(self, step: int, *, trains: bool) -> bool:
        """Whether to broadcast before a forward pass, when so many steps were made."""
        if not self.stale or (trains and step == self._step):
            return False
        if trains:
            self._step = step
        return True

    def broadcast(self, source: int = 0) -> None:
        """Make all ranks' buffers those of one rank of the group.

        Written past autograd's version counters, so that a graph made before is still good for backward().
        """
        by_kind: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for buffer in self._module.buffers():
            if buffer.numel():
                by_kind[buffer.dtype, buffer.device].append(buffer.data)
        for some in by_kind.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in some])
            dist.broadcast(flat, group=self._group, group_src=source)
            for buffer, part in zip(some, torch.split(flat, [buffer.numel() for buffer in some]), strict=True):
                buffer.copy_(part.view(buffer.shape))
        self.stale = False
