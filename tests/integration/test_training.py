"""Training, end to end, with what PyTorch builds on collectives: the weights must be those of Gloo.

Each way of training runs on real processes from the same seeds three times: on Gloo, on the backend under test, and in
one process on the whole batch. With two ranks the backends must agree in every bit, as a + b has only one order. With
four they may add in different orders: the weights, of size about one, agree within ``BETWEEN_ORDERS``, which is a
hundred roundings of float32. One process sums its batch in another order still, and Adam divides by roots of sums:
``AGAINST_ONE_PROCESS``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ranks import BACKEND, Member, run_ranks

BETWEEN_ORDERS = 1e-5
AGAINST_ONE_PROCESS = 1e-4
STEPS = 6
BATCH = 24
Weights = dict[str, np.ndarray]


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 3))


def _batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of a step's batch; parts are of one size, so that the mean of means is the mean."""
    dice = torch.Generator().manual_seed(100 + step)
    inputs, targets = torch.randn(BATCH, 16, generator=dice), torch.randn(BATCH, 3, generator=dice)
    return inputs.chunk(parts)[part], targets.chunk(parts)[part]


def _fit(model: nn.Module, optimizer: torch.optim.Optimizer, part: int = 0, parts: int = 1) -> None:
    for step in range(STEPS):
        inputs, targets = _batch(step, part, parts)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def _weights(model: nn.Module) -> Weights:
    full = {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in model.state_dict().items()}
    return {name.removeprefix("module."): weight.detach().numpy().copy() for name, weight in full.items()}


def _sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def data_parallel(me: Member) -> Weights:
    """DDP, with buckets so small that several are in flight at once."""
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.002)
    _fit(model, _sgd(model.parameters()), me.rank, me.world_size)
    return _weights(model)


def data_parallel_compressed(me: Member) -> Weights:
    """DDP with gradients sent as float16: a hook chained to the futures of our works."""
    model = DistributedDataParallel(_model())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    _fit(model, _sgd(model.parameters()), me.rank, me.world_size)
    return _weights(model)


def sharded_optimizer(me: Member) -> Weights:
    """ZeroRedundancyOptimizer: every rank keeps a part of Adam's state and broadcasts its weights."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns at import: for the ranks only

    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    _fit(model, optimizer, me.rank, me.world_size)
    optimizer.consolidate_state_dict(0)
    if me.rank == 0:
        assert len(optimizer.state_dict()["state"]) == 6
    return _weights(model)


def _sharded(me: Member, shape: tuple[int, ...], precision: torch.dtype | None = None) -> nn.Sequential:
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    assert mesh.size() == me.world_size
    model = _model()
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=precision)
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return model


def fully_sharded(me: Member, precision: torch.dtype | None = None) -> Weights:
    """FSDP2 over all ranks."""
    model = _sharded(me, (me.world_size,), precision)
    _fit(model, _adam(model.parameters()), me.rank, me.world_size)
    return _weights(model)


def hybrid_sharded(me: Member) -> Weights:
    """FSDP2 in groups of two ranks, replicated between the groups."""
    model = _sharded(me, (me.world_size // 2, 2))
    _fit(model, _adam(model.parameters()), me.rank, me.world_size)
    return _weights(model)


def tensor_parallel(me: Member) -> Weights:
    """Linear layers cut by columns and by rows; every rank sees the whole batch."""
    mesh = init_device_mesh("cpu", (me.world_size,))
    model = parallelize_module(_model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _fit(model, _sgd(model.parameters()))
    return _weights(model)


def _in_one_process(optimizer_of: Callable[[object], torch.optim.Optimizer]) -> Weights:
    model = _model()
    _fit(model, optimizer_of(model.parameters()))
    return _weights(model)


def _close(result: Weights, wanted: Weights, atol: float) -> None:
    assert result.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(result[name], wanted[name], rtol=0, atol=atol, err_msg=name)


WAYS: list[tuple[Callable[..., Weights], Callable[[object], torch.optim.Optimizer], float]] = [
    (data_parallel, _sgd, AGAINST_ONE_PROCESS),
    (data_parallel_compressed, _sgd, 0.01),  # float16 has eleven bits
    (sharded_optimizer, _adam, AGAINST_ONE_PROCESS),
    (fully_sharded, _adam, AGAINST_ONE_PROCESS),
    (tensor_parallel, _sgd, AGAINST_ONE_PROCESS),
]


@pytest.mark.parametrize(("way", "optimizer_of", "atol"), WAYS, ids=lambda value: getattr(value, "__name__", ""))
def test_two_ranks_train_to_the_bits_of_gloo(
    way: Callable[..., Weights], optimizer_of: Callable[[object], torch.optim.Optimizer], atol: float
) -> None:
    gloo, ours = run_ranks(way, 2, backend="gloo"), run_ranks(way, 2, backend=BACKEND)
    for rank in range(2):
        _close(ours[rank], gloo[rank], 0.0)
        _close(ours[rank], ours[0], 0.0)
    _close(ours[0], _in_one_process(optimizer_of), atol)


@pytest.mark.parametrize("way", [data_parallel, fully_sharded, hybrid_sharded], ids=lambda way: way.__name__)
def test_four_ranks_train_as_gloo_does(way: Callable[..., Weights]) -> None:
    gloo, ours = run_ranks(way, 4, backend="gloo"), run_ranks(way, 4, backend=BACKEND)
    for rank in range(4):
        _close(ours[rank], ours[0], 0.0)
        _close(ours[rank], gloo[rank], BETWEEN_ORDERS)
    _close(ours[0], _in_one_process(_sgd if way is data_parallel else _adam), AGAINST_ONE_PROCESS)


def test_mixed_precision_trains_to_the_bits_of_gloo() -> None:
    gloo = run_ranks(fully_sharded, 2, torch.bfloat16, backend="gloo")
    ours = run_ranks(fully_sharded, 2, torch.bfloat16, backend=BACKEND)
    _close(ours[0], gloo[0], 0.0)


def redistributions(me: Member) -> None:
    """DTensor from every placement to every other, over even and uneven sizes, on one- and two-dimensional meshes."""
    whole = torch.arange(7 * 8, dtype=torch.float32).reshape(7, 8)
    mesh = init_device_mesh("cpu", (me.world_size,))
    for start in (Shard(0), Shard(1), Replicate()):
        for end in (Shard(0), Shard(1), Replicate()):
            moved = distribute_tensor(whole, mesh, [start]).redistribute(mesh, [end])
            assert torch.equal(moved.full_tensor(), whole), (start, end)
    for end in (Shard(0), Shard(1), Replicate()):
        added = DTensor.from_local(whole * (me.rank + 1), mesh, [Partial()]).redistribute(mesh, [end])
        assert torch.equal(added.full_tensor(), whole * sum(range(1, me.world_size + 1))), end
    if me.world_size == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        moved = distribute_tensor(whole, square, [Shard(0), Shard(1)]).redistribute(square, [Shard(1), Replicate()])
        assert torch.equal(moved.full_tensor(), whole)


@pytest.mark.parametrize("world_size", [2, 4])
def test_redistribution(world_size: int) -> None:
    run_ranks(redistributions, world_size)


def save(me: Member, folder: str) -> Weights:
    """Train fully sharded, save, and return the weights."""
    model = _sharded(me, (me.world_size,))
    _fit(model, _adam(model.parameters()), me.rank, me.world_size)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder)
    return _weights(model)


def load(me: Member, folder: str) -> Weights:
    """Load into a model that is sharded over another number of ranks."""
    model = _sharded(me, (me.world_size,))
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    weights = _weights(model)
    dist.barrier()
    return weights


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2)])
def test_checkpoint_moves_between_numbers_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    saved = run_ranks(save, before, str(tmp_path))
    for loaded in run_ranks(load, after, str(tmp_path)):
        _close(loaded, saved[0], 0.0)
