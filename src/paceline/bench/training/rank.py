"""One rank of a replay: the model wrapped as its strategy says, one training iteration at a time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.rank_process.messages import Prepare, Ready, Setup
from paceline.bench.training.profile import load_profile
from paceline.bench.training.replay import LEARNING_RATE, ReplayModel, groups_of
from paceline.bench.training.scaling import Scale
from paceline.bench.training.strategies import ALONE, AUTO, CHECKED_STEPS, DEAR, SHARDED, VARIABLE, Buckets, Job
from paceline.errors import UsageError
from paceline.train.dear.scaler import GradScaler
from paceline.train.dear.wrapper import DataParallel

_PREFETCHED_GROUPS = 2
_MAX_NORM = 1e12  # clipping takes its time, and changes nothing: weights can be checked


class ReplayRank:
    """A rank; an iteration is zero_grad, forward, backward and a step."""

    def __init__(self, setup: Setup) -> None:
        warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
        torch.set_num_threads(1)
        dist.init_process_group(setup.backend)
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.job = msgspec.json.decode(os.environ[VARIABLE], type=Job)
        self.profile = Scale(self.job.size_factor, self.job.time_factor).apply(load_profile(self.job.model))
        versions = {"paceline": version("paceline")} if setup.backend == "paceline" else {}
        self.ready = Ready(self.rank, self.num_ranks, {**versions, "torch": str(torch.__version__)})
        self.barrier: Callable[[], object] = dist.barrier
        self.replay: ReplayModel | None = None
        self.model: nn.Module | None = None
        self.scaler: torch.amp.GradScaler | None = None
        self.inputs = torch.zeros(1)

    def prepare(self, order: Prepare) -> int:
        """Wrap the model with buckets of ``count`` bytes, and count wrong weights after some steps without sleep."""
        self.model = None  # the old one's hooks go first
        groups = groups_of(self.profile, order.count) if self.job.strategy == "fsdp2" else None
        self.replay = ReplayModel(self.profile, self.rank, groups, order.between_s)
        buckets = Buckets(order.count, order.first_count)
        self.model, self.optimizer = wrap(self.job.strategy, self.replay, buckets)
        self.scaler = scaler_for(self.model) if self.job.scaler else None
        self.replay.pace.enabled = buckets == AUTO  # a search measures iterations from the first on
        for _ in range(CHECKED_STEPS):
            self.run()
        self.replay.pace.enabled = True
        return 0 if self.job.strategy == ALONE else self.replay.wrong_elements(CHECKED_STEPS, self.num_ranks)

    def run(self) -> None:
        """One iteration. Without communication a barrier keeps the ranks in step, as communication does."""
        assert self.model is not None
        if self.job.strategy == ALONE:
            self.barrier()
        train(self.model, self.optimizer, self.inputs, clips=self.job.clip, scaler=self.scaler)

    def close(self) -> None:
        """Leave the group."""
        self.model = self.replay = None
        dist.destroy_process_group()


def wrap(strategy: str, model: ReplayModel, buckets: Buckets) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model as a strategy trains it, and its optimizer."""
    if buckets == AUTO and not strategy.startswith(DEAR):
        raise UsageError(f"{strategy} does not find a bucket size by itself: give it one")
    if strategy == "fsdp2":
        sharded = _fully_sharded(model)
        return sharded, torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    if strategy == ALONE:
        return model, optimizer
    if strategy.startswith(DEAR):
        bucket_mb: float | str = "auto" if buckets == AUTO else buckets.size / 1e6
        return DataParallel(model, optimizer, sharded=SHARDED in strategy, bucket_mb=bucket_mb), optimizer
    # The list of the first bucket's size and of all others is what DDP makes of its defaults. PyTorch's megabytes have
    # 1024 * 1024 bytes. Views spare DDP a copy, as users are advised.
    caps: Any = [size / 2**20 for size in (buckets.first, buckets.size) if size]
    return DistributedDataParallel(model, bucket_cap_mb_list=caps, gradient_as_bucket_view=True), optimizer


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    *,
    clips: bool = False,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """One iteration, as training loops have it."""
    optimizer.zero_grad()
    loss = model(inputs).sum()
    torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
    if clips:
        if scaler is not None:
            scaler.unscale_(optimizer)
        clip(model)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def scaler_for(model: nn.Module) -> torch.amp.GradScaler:
    """The scaler that users of each strategy take. Its factor is 1 and stays so: weights can be checked."""
    kind = GradScaler if isinstance(model, DataParallel) else torch.amp.GradScaler
    return kind("cpu", init_scale=1.0, growth_interval=2**31 - 1)


def clip(model: nn.Module) -> None:
    """Clip the gradients as the users of each strategy do."""
    if isinstance(model, DataParallel):
        model.clip_grad_norm_(_MAX_NORM)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)


def _fully_sharded(model: ReplayModel) -> nn.Module:
    """A group a bucket; gathered parameters stay, and are gathered ahead, as FSDP2 can.

    Without asynchronous gathers FSDP2 would overlap nothing on a CPU, which has no streams.
    """
    from torch.distributed.device_mesh import init_device_mesh  # slow to import, for one strategy of six
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    groups: list[Any] = list(model)
    for group in groups:
        fully_shard(group, mesh=mesh, reshard_after_forward=False)
    sharded: Any = fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for number, group in enumerate(groups):
        group.set_modules_to_forward_prefetch(groups[number + 1 : number + 1 + _PREFETCHED_GROUPS])
    sharded._set_unshard_async_op(True)
    wrapped: nn.Module = sharded
    return wrapped
