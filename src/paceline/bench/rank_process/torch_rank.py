"""A rank of a torch.distributed backend, called the way training scripts call it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

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
        self.group_beside: dist.ProcessGroup | None = None
        self.run: Callable[[], object] = dist.barrier
        self.barrier: Callable[[], object] = dist.barrier

    def prepare(self, order: Prepare) -> int:
        """Make the buffers, and check one run on real data."""
        if order.operation == "barrier":
            self.run = dist.barrier
            return 0
        first = self._prepared(order, order.operation)
        if not order.beside:
            self.run = self._call(order, *first[:2])
            self.run()
            return _wrong(*first)
        self.group_beside = self.group_beside or dist.new_group()
        second = self._prepared(order, order.beside)
        starts = [
            self._start(operation, *buffers[:2], group)
            for operation, buffers, group in (
                (order.operation, first, None),
                (order.beside, second, self.group_beside),
            )
        ]

        def both() -> None:
            for work in [start() for start in starts]:
                work.wait()

        self.run = both
        both()
        return _wrong(*first) + _wrong(*second)

    def _prepared(self, order: Prepare, operation: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is given to an operation, where its result will be, and the result expected."""
        dtype = getattr(torch, order.dtype)
        question = (operation, self.rank, self.num_ranks, order.count)
        values = torch.from_numpy(pattern.given(*question))
        given = _empty(len(values), dtype, order.memory).copy_(values)
        expected = torch.from_numpy(pattern.expected(*question)).to(dtype)
        in_place = operation in ("allreduce", "broadcast")
        result = given if in_place else _empty(len(expected), dtype, order.memory).fill_(pattern.POISON)
        return given, result, expected

    def _start(
        self, operation: str, given: torch.Tensor, result: torch.Tensor, group: dist.ProcessGroup | None
    ) -> Callable[[], dist.Work]:
        """Start an operation that runs beside another; its work is waited for."""
        how: dict[str, Any] = {"group": group, "async_op": True}
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: dist.all_reduce(result, **how),
            "broadcast": lambda: dist.broadcast(result, 0, **how),
            "allgather": lambda: _all_gather(result, given, **how),
            "reducescatter": lambda: _reduce_scatter(result, given, **how),
            "alltoall": lambda: dist.all_to_all_single(result, given, **how),
        }
        return calls[operation]

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
            return lambda: _all_gather(result, given)
        if operation == "reducescatter":
            return lambda: _reduce_scatter(result, given)
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


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _wrong(given: torch.Tensor, result: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements are wrong; then zeros are given, whose sums stay zeros, however many iterations follow."""
    wrong = int((result != expected).sum())
    given.zero_()
    return wrong


def _empty(count: int, dtype: torch.dtype, memory: str) -> torch.Tensor:
    """A tensor as torch allocates it, or in memory of numpy, which asks the kernel for huge pages."""
    if memory == "torch":
        return torch.empty(count, dtype=dtype)
    return torch.from_numpy(np.empty(count * dtype.itemsize, dtype=np.uint8)).view(dtype)
