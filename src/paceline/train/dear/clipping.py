"""The norm of all gradients, from the shards: each rank's part, and one all-reduce of a number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def total_norm(shards: Iterable[torch.Tensor], norm_type: float, group: Any) -> torch.Tensor:
    """The norm over all ranks' shards, the same on every rank. Padding is zero and adds nothing."""
    norms = torch.stack([torch.linalg.vector_norm(shard, norm_type, dtype=torch.float32) for shard in shards]).double()
    if norm_type == float("inf"):
        norm = norms.max()
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm.float()
    norm = norms.pow(norm_type).sum()
    dist.all_reduce(norm, group=group)
    return norm.pow(1.0 / norm_type).float()


def scale_to(shards: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the shards so that the norm is at most this, as :func:`torch.nn.utils.clip_grad_norm_` does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for shard in shards:
        shard.mul_(factor.to(shard.dtype))
