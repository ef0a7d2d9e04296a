"""A rank of a torch.distributed backend, called the way training scripts call it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch
import torch.distributed as dist

from . import pattern
from .messages import Prepare, Ready, Setup


class TorchRank:
    """Buffers and calls of one rank; the group comes from torchrun's variables."""

    def __init__(self, setup: Setup) -> None:
        dist.init_process_group(setup.backend)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.messages = setup.messages
        versions = {"paceline": version("paceline")} if setup.backend == "paceline" or setup.messages else {}
        self.ready = Ready(self.rank, self.num_ranks, {**versions, "torch": str(torch.__version__)})
        self.run: Callable[[], object] = dist.barrier
        self.barrier: Callable[[], object] = dist.barrier

    def prepare(self, order: Prepare) -> int:
        """Make the buffers, and check one run on real data."""
        if order.operation == "barrier":
            self.run = dist.barrier
            return 0
        dtype = getattr(torch, order.dtype)
        question = (order.operation, self.rank, self.num_ranks, order.count)
        values = torch.from_numpy(pattern.given(*question))
        given = _empty(len(values), dtype, order.memory).copy_(values)
        expected = torch.from_numpy(pattern.expected(*question)).to(dtype)
        in_place = order.operation in ("allreduce", "broadcast")
        result = given if in_place else _empty(len(expected), dtype, order.memory).fill_(pattern.POISON)
        self.run = self._call(order, given, result)
        self.run()
        wrong = int((result != expected).sum())
        given.zero_()  # sums of zeros stay zeros, however many iterations follow
        return wrong

    def _call(self, order: Prepare, given: torch.Tensor, result: torch.Tensor) -> Callable[[], object]:
        operation = order.operation
        if operation == "allreduce" and self.messages:
            from paceline import all_reduce

            return lambda: all_reduce(result, late=order.late_s)
        if operation == "allreduce":
            return lambda: dist.all_reduce(result)
        if operation == "broadcast":
            return lambda: dist.broadcast(result, 0)
        if operation == "allgather":
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return lambda: gather(result, given)
        if operation == "reducescatter":
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            return lambda: scatter(result, given)
        if operation == "alltoall":
            return lambda: dist.all_to_all_single(result, given)
        after, before = (self.rank + 1) % self.num_ranks, (self.rank - 1) % self.num_ranks

        def shift() -> None:
            receiving = dist.irecv(result, before)
            sending = dist.isend(given, after)
            for work in (receiving, sending):
                if work is not None:
                    work.wait()

        return shift

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def _empty(count: int, dtype: torch.dtype, memory: str) -> torch.Tensor:
    """A tensor as torch allocates it, or in memory of numpy, which asks the kernel for huge pages."""
    if memory == "torch":
        return torch.empty(count, dtype=dtype)
    return torch.from_numpy(np.empty(count * dtype.itemsize, dtype=np.uint8)).view(dtype)
