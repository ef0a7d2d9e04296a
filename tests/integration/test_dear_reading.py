"""A model that is read between steps shows the new weights, however it is read.

Each reader is run right after step(), when nothing has arrived yet, on a model that is trained beside one by DDP; two
ranks agree with it in every bit.
"""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dear_models import apart, ddp, dear, fit, weights
from torch import nn

import paceline
from paceline.train.dear.bucket import Phase
from ranks import Member, run_ranks


def _saved(model: nn.Module) -> nn.Module:
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    return torch.load(stored, weights_only=False)


def _first(model: nn.Module) -> nn.Parameter:
    return getattr(model, "module", model)[0].weight


class Double(torch.autograd.Function):
    """What libraries for quantisation and fused layers are made of."""

    @staticmethod
    def forward(_: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ inputs


class Itself(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class PastPython(torch.autograd.Function):
    """Reads a parameter as a C++ extension does, which asks nobody."""

    @staticmethod
    def forward(_: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.utils.dlpack.from_dlpack(torch._C._to_dlpack(weight)).clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


READERS: dict[str, Callable[[Any], torch.Tensor]] = {
    "sum": lambda model: _first(model).sum(),
    "kept": lambda model: model.kept * 1.0,
    "state_dict": lambda model: model.module.state_dict()["0.weight"],
    "wrapper's state_dict": lambda model: next(iter(model.state_dict().values())),
    "deepcopy": lambda model: _first(copy.deepcopy(model.module)),
    "deepcopy of the wrapper": lambda model: _first(copy.deepcopy(model)),
    "pickle": lambda model: _first(pickle.loads(pickle.dumps(model.module))),
    "torch.save": lambda model: _first(_saved(model.module)),
    "data": lambda model: _first(model).data,
    "detach": lambda model: _first(model).detach(),
    "numpy": lambda model: torch.from_numpy(_first(model).detach().numpy()),
    "foreach": lambda model: torch._foreach_mul(list(model.module.parameters()), 1.0)[0],
    "vector": lambda model: nn.utils.parameters_to_vector(model.module.parameters())[:768].view(48, 16),
    "index": lambda model: _first(model)[:],
    "inner forward": lambda model: model.module[0](torch.eye(16)).detach().T - model.module[0].bias[:, None],
    "optimizer's group": lambda model: model.optimizer.param_groups[0]["params"][0].clone(),
    "parameters": lambda model: next(model.parameters()).clone(),
    "in place": lambda model: _first(model).data.mul_(1.0),
    "written": lambda model: torch.add(torch.zeros(48, 16), _first(model).detach()),
    "out": lambda model: torch.cat([_first(model), _first(model)])[:48],
    "function of autograd": lambda model: Double.apply(_first(model)) / 2,
    "function of autograd that keeps it": lambda model: Project.apply(torch.eye(16), _first(model)).T,
    "function of autograd that returns it": lambda model: Itself.apply(_first(model)) + 0,
    "derivative along": lambda model: torch.func.jvp(lambda w: w * 1.0, (_first(model),), (torch.ones(48, 16),))[0],
    "inside of vmap": lambda model: torch.func.vmap(lambda one: _first(model) @ one)(torch.eye(16)).T,
    "averaged": lambda model: _first(torch.optim.swa_utils.AveragedModel(model.module).module),
}


def read(me: Member, sharded: bool) -> None:
    reference, theirs = ddp("mlp")
    model, ours = dear("mlp", sharded=sharded)
    model.kept = _first(model)
    for step, (name, reader) in enumerate(READERS.items()):
        fit(reference, theirs, "mlp", me, 1, step)
        fit(model, ours, "mlp", me, 1, step)
        waiting = [bucket.phase is Phase.PENDING for bucket in model._pipe.buckets]
        assert step == 0 or all(waiting), "nothing is under way, so this shows nothing"
        wanted = _first(reference).detach()
        wanted = wanted.sum() if name == "sum" else wanted
        found = reader(model).detach()
        assert found.shape == wanted.shape, name
        assert torch.allclose(found, wanted, rtol=0, atol=1e-6 if name == "inner forward" else 0.0), name
        assert type(found) in (torch.Tensor, nn.Parameter), name
    fit(reference, theirs, "mlp", me, 2)
    fit(model, ours, "mlp", me, 2)
    if me.rank == 0:  # one rank alone looks, while the others wait for it
        assert torch.equal(
            ours.state[_first(model)]["momentum_buffer"].flatten()[:8].cpu(), _momentum(theirs, reference)
        )
        assert apart(weights(reference), weights(model)) == 0
    dist.barrier()
    assert model.module[0].weight.__class__ is nn.Parameter or sharded or me.rank
    model.synchronize()
    assert all(type(parameter) is nn.Parameter for parameter in model.module.parameters())


def _momentum(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.Tensor:
    return optimizer.state[_first(model)]["momentum_buffer"].flatten()[:8]


@pytest.mark.parametrize("sharded", [False, True])
def test_every_way_of_reading_shows_new_weights(sharded: bool) -> None:
    run_ranks(read, 2, sharded)


def overlaps(me: Member, sharded: bool, in_time: bool) -> tuple[list[int], list[list[str]], str, list[Any]]:
    """Order of use is learnt, updates wait for their use, and what was hidden is told.

    ``in_time``: all gathers end before the first layer; otherwise all but that of the first bucket seem to go on.
    """

    class Backwards(nn.Module):
        """Registers its layers from the last to the first."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 3 if step == 0 else 16) for step in range(4))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                inputs = layer(inputs)
            return inputs

    net = Backwards()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = paceline.DataParallel(net, optimizer, sharded=sharded, bucket_mb=0.0005)
    phases: list[int] = []

    def wait_for_all(*_: object) -> None:
        gathers = [bucket.gather for bucket in model._pipe.buckets if bucket.gather is not None]
        while not all(gather.is_completed() for gather in gathers):
            time.sleep(0.001)

    if in_time:
        net.layers[3].register_forward_pre_hook(wait_for_all)
    else:
        model._pipe.feed._arrived = lambda _: iter(())  # type: ignore[method-assign]
    net.layers[2].register_forward_pre_hook(
        lambda *_: phases.append(sum(bucket.phase is Phase.PENDING for bucket in model._pipe.buckets))
    )
    fit(model, optimizer, "mlp", me, 6)
    names = [[model._pipe.names[index] for index in bucket.indexes] for bucket in model._pipe.buckets]
    step = model.overlap.steps[-3]
    return phases, names, step.line(), [(one.operation, one.done_s is not None) for one in step.flights]


@pytest.mark.parametrize("in_time", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_updates_wait_for_their_use_in_the_order_learnt(sharded: bool, in_time: bool) -> None:
    for phases, names, line, flights in run_ranks(overlaps, 2, sharded, in_time):
        used = [name.split(".")[1] for bucket in names for name in bucket if name.endswith("weight")]
        assert used == ["3", "2", "1", "0"]
        first = sum(any(name.startswith("layers.3") for name in bucket) for bucket in names)
        assert 0 < first < len(names) - 1
        assert phases[-1] == (0 if in_time else len(names) - first), "what has arrived is brought up to date together"
        assert line.startswith("step 4: communication ")
        assert "hidden" in line
        assert "exposed" in line
        assert sorted(operation for operation, _ in flights) == sorted(
            ["reduce-scatter", "all-gather"] * len(names) + ["agreement"]
        ), "before step 4 rank 0 has not seen enough to decide on all-reduces"
        assert all(done for _, done in flights)


UNSEEN: dict[str, Callable[[nn.Module], Callable[[], torch.Tensor]]] = {
    "alias": lambda model: _first(model).detach().clone,
    "C++": lambda model: lambda: PastPython.apply(_first(model)),
    "vmap": lambda model: lambda: torch.func.vmap(lambda row: row * 1.0)(_first(model)),
    "grad": lambda model: lambda: torch.func.grad(lambda w: (w * w).sum() / 2)(_first(model)),
}
"""What C++ does with a bare parameter without asking Python."""


def unseen(me: Member) -> None:
    """Stale until synchronize(); asking the wrapper for its parameters does that."""
    model, optimizer = dear("mlp")
    fit(model, optimizer, "mlp", me, 2)
    for step, (name, reader) in enumerate(UNSEEN.items()):
        read = reader(model)
        before = read().detach()
        fit(model, optimizer, "mlp", me, 1, step)
        assert not torch.equal(_updated(model, name), before), name
        assert torch.equal(read(), _first(model)), name


def _updated(model: paceline.DataParallel, name: str) -> torch.Tensor:
    """The first weight, after synchronize() or its like."""
    if name == "vmap":
        return dict(model.named_parameters())["module.0.weight"].detach()
    model.synchronize()
    return _first(model).detach()


def test_what_cannot_be_seen_is_up_to_date_after_synchronize() -> None:
    run_ranks(unseen, 2)
