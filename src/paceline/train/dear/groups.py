"""The two process groups of a wrapper, one for each half of an all-reduce, so that neither queues behind the other.

All all-gathers go through one group; reduce-scatters, and the few small things between them, through the other. In
each, every rank issues the same operations in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from torch.distributed.device_mesh import DeviceMesh

from paceline.config import Options
from paceline.errors import UsageError

_ALL_REDUCE = AllreduceOptions()
_REDUCE_SCATTER = ReduceScatterOptions()
_ALL_GATHER = AllgatherOptions()
for _options in (_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER):
    _options.asyncOp = True


def all_reduce(tensor: torch.Tensor, group: Any) -> dist.Work:
    """Launch the all-reduce of a sum. Here and below, what torch.distributed would do in Python costs more than all
    else of a small bucket, so the group is called itself."""
    work: dist.Work = group.allreduce([_real(tensor)], _ALL_REDUCE)
    return work


def reduce_scatter(shard: torch.Tensor, flat: torch.Tensor, group: Any) -> dist.Work:
    """Launch a reduce-scatter of sums."""
    work: dist.Work = group.reduce_scatter_single(_real(shard), _real(flat), _REDUCE_SCATTER)
    return work


def all_gather(flat: torch.Tensor, shard: torch.Tensor, group: Any) -> dist.Work:
    """Launch an all-gather."""
    work: dist.Work = group.all_gather_single(_real(flat), _real(shard), _ALL_GATHER)
    return work


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(frozen=True)
class Groups:
    """``reduce`` and ``gather`` have the same ranks as ``parent``, the group the user gave."""

    parent: Any
    reduce: Any
    gather: Any
    rank: int
    num_ranks: int

    def part(self) -> None:
        """Leave the two groups, when all ranks have done what they had to do in them."""
        dist.barrier(group=self.reduce)
        for group in (self.reduce, self.gather):
            dist.destroy_process_group(group)


def make_groups(process_group: Any, device_mesh: DeviceMesh | None) -> Groups:
    """Find the user's group, and make two with the same ranks; all its ranks do so together."""
    if process_group is not None and device_mesh is not None:
        raise UsageError("pass process_group or device_mesh, not both")
    if not dist.is_initialized():
        raise UsageError("there is no process group: call torch.distributed.init_process_group() first")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise UsageError(
                f"DataParallel takes a mesh of one dimension, not {device_mesh.ndim}: pass the part to replicate over, "
                "like device_mesh['replicate']"
            )
        process_group = device_mesh.get_group(mesh_dim=0)
    parent = process_group if process_group is not None else dist.group.WORLD
    if parent == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError("this rank is not in the process group: make DataParallel on the group's ranks only")
    rank, num_ranks = dist.get_rank(parent), dist.get_world_size(parent)
    if num_ranks == 1:
        return Groups(parent, parent, parent, rank, 1)
    gather = _twin(parent, "gather", Options(in_turn=True))
    return Groups(parent, _twin(parent, "reduce"), gather, rank, num_ranks)


def _twin(parent: Any, half: str, options: Options | None = None) -> Any:
    """A group like the parent; options are for ours only."""
    backends = dist.get_backend_config(parent)
    ours = all(entry.endswith(":paceline") for entry in backends.split(","))
    return dist.new_group(
        dist.get_process_group_ranks(parent),
        timeout=_timeout(parent),
        backend=backends,
        pg_options=options if ours else None,
        use_local_synchronization=True,
        group_desc=f"dear {half}",
        sort_ranks=False,
    )


def _timeout(parent: Any) -> Any:
    """The parent's time limit where its backend tells; the backend's usual one elsewhere."""
    for device in (torch.device("cpu"), torch.device("cuda")):
        try:
            options = parent._get_backend(device).options
        except (RuntimeError, AttributeError):
            continue
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None
