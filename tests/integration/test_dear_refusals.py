"""What DataParallel does not serve is refused in words that say what to do, and a rank's death is heard of by all."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dear_models import OPTIMIZERS, build, dear, fit, loss_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.errors import FileFormatError, UnsupportedError, UsageError
from ranks import BACKEND, Member, Ranks, run_ranks


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


class Passing(torch.optim.Optimizer):
    """An optimizer of a framework, like Accelerate's: it passes calls on to the user's, and has nothing of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state


def wrapping_twice(me: Member) -> None:
    """Gradients are reduced once: other wrappers around DataParallel, or inside of it, are refused."""
    cpu = torch.device("cpu")

    def refused(match: str, call: Any, error: type[Exception] = UsageError) -> None:
        with pytest.raises(error, match=match):
            call()

    for make in (lambda: build("mlp"), lambda: nn.Sequential(build("mlp"), nn.Linear(3, 3))):
        net = make()
        model = paceline.DataParallel(net, _sgd(net))
        refused("DistributedDataParallel around paceline", lambda model=model: DistributedDataParallel(model))
        refused("DistributedDataParallel around paceline", lambda net=net: DistributedDataParallel(net[0]))
        outer = nn.Sequential(model, nn.Linear(3, 3))
        refused("DistributedDataParallel around paceline", lambda outer=outer: DistributedDataParallel(outer))
        model.close()
        DistributedDataParallel(net)
    model, _ = dear("mlp")
    refused("FullyShardedDataParallel around paceline", lambda: FullyShardedDataParallel(model, device_id=cpu))
    model, _ = dear("mlp")
    refused(
        "once: in DataParallel or FSDP", lambda: FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True)
    )
    model, optimizer = dear("mlp")
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (me.world_size,)))
    loss_of(model, "mlp", 0, me.rank).backward()
    refused("parameter 0.weight was replaced after it was wrapped, as fully_shard does", optimizer.step)

    for wrapper in (DistributedDataParallel, lambda net: FullyShardedDataParallel(net, device_id=cpu)):
        inner = wrapper(build("mlp"))
        for net in (inner, nn.Sequential(inner, nn.Linear(3, 3))):
            refused(
                f"around {type(inner).__name__} would reduce gradients twice: wrap the module",
                lambda net=net: paceline.DataParallel(net, _sgd(net)),
            )
    sharded = fully_shard(build("mlp"), mesh=dist.init_device_mesh("cpu", (me.world_size,)))
    refused("is a DTensor", lambda: paceline.DataParallel(sharded, _sgd(sharded)), UnsupportedError)

    net = build("mlp")
    passing = Passing(_sgd(net))
    refused(r"Passing only passes calls on to another optimizer \(SGD\)", lambda: paceline.DataParallel(net, passing))
    fit(paceline.DataParallel(net, passing.optimizer), passing.optimizer, "mlp", me, 2)


@pytest.mark.filterwarnings("default")
def test_gradients_are_not_reduced_twice() -> None:
    run_ranks(wrapping_twice, 2)


def refusals(me: Member, folder: str) -> None:
    wrap = paceline.DataParallel

    def refused(match: str, call: Any, error: type[Exception] = UsageError) -> None:
        with pytest.raises(error, match=match):
            call()

    net = build("mlp")
    refused("wraps a torch.nn.Module", lambda: wrap(3, _sgd(net)))
    refused("takes one optimizer", lambda: wrap(net, [_sgd(net), _sgd(net)]))
    refused("takes the optimizer", lambda: wrap(net, None))
    refused("not the module's", lambda: wrap(net, _sgd(build("mlp"))))
    refused("is not in the optimizer", lambda: wrap(net, torch.optim.SGD(net[0].parameters(), lr=0.1)))
    refused("positive number", lambda: dear("mlp", bucket_mb=0))
    refused("or 'auto'", lambda: dear("mlp", bucket_mb="often"))
    mesh = dist.init_device_mesh("cpu", (1, me.world_size))
    refused("one dimension", lambda: dear("mlp", device_mesh=mesh))
    refused("not both", lambda: dear("mlp", device_mesh=mesh, process_group=dist.group.WORLD))
    with open(f"{folder}/{me.rank}.json", "w") as file:
        file.write("{}")
    broken = f"{folder}/{me.rank}.json"
    refused("delete it to search anew", lambda: dear("mlp", bucket_mb="auto", tuning_file=broken), FileFormatError)
    for make in (torch.optim.LBFGS, torch.optim.Adafactor, type("Mine", (torch.optim.SGD,), {})):
        refused("elementwise=True", lambda make=make: wrap(net, make(net.parameters()), sharded=True), UnsupportedError)
    sparse = nn.Embedding(4, 4, sparse=True)
    refused("sparse=False", lambda: wrap(sparse, _sgd(sparse)), UnsupportedError)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    refused("nothing to train", lambda: wrap(frozen, _sgd(frozen)))
    lazy = nn.LazyLinear(3)
    refused("lazy module", lambda: wrap(lazy, _sgd(lazy)))
    other = nn.Linear(2 + me.rank, 2)
    if me.rank:
        refused("has another model than rank 0", lambda: wrap(other, _sgd(other)))
    else:
        refused("rank 1 has another model", lambda: wrap(other, _sgd(other)))

    for sharded in (False, True):
        model, optimizer = dear("mlp", sharded=sharded)
        fit(model, optimizer, "mlp", me, 2)
        second = _sgd(model.module)
        loss_of(model, "mlp", 5, me.rank).backward()
        refused("made with another optimizer", second.step)
        optimizer.step()
        refused(
            "added or replaced",
            lambda model=model: model.module[0].register_parameter("x", nn.Parameter(torch.ones(1))),
        )
        refused("is added", lambda model=model: model.module.add_module("x", nn.Linear(2, 2)))
        refused("wrap a module once", lambda model=model, optimizer=optimizer: wrap(model.module, optimizer))
        model.module[0].weight.requires_grad_(False)
        refused("was True when it was wrapped", optimizer.step)
        model.module[0].weight.requires_grad_(True)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        refused("has other parameters", optimizer.step)
        del optimizer.param_groups[-1]
        fit(model, optimizer, "mlp", me, 2)


def test_refusals_say_what_to_do(tmp_path: Any) -> None:
    run_ranks(refusals, 2, str(tmp_path), backend="gloo")


def dies(me: Member, phase: str, sharded: bool) -> str:
    """The last rank kills itself in the given phase; the others say what they heard."""
    net = build("mlp")
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    model = paceline.DataParallel(net, optimizer, sharded=sharded, bucket_mb=0.002)
    fit(model, optimizer, "mlp", me, 3)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if me.rank == me.world_size - 1:
        if phase == "forward":
            net[2].register_forward_pre_hook(die)
        elif phase == "backward":
            net[2].register_full_backward_hook(die)
        else:
            optimizer.register_step_pre_hook(die)
    try:
        fit(model, optimizer, "mlp", me, 20, 3)
    except dist.DistBackendError as error:
        return str(error)
    return "nothing"


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo names no ranks, and may hang for its time limit")
@pytest.mark.parametrize(("phase", "sharded"), [("forward", False), ("backward", True), ("step", False)])
def test_the_death_of_a_rank_in_any_phase_is_heard_of(phase: str, sharded: bool) -> None:
    with Ranks(_survive, 3, phase, sharded, join=False) as ranks:
        for outcome in ranks.outcomes(60, [0, 1]):
            assert "rank 2" in (outcome.value or ""), outcome


def _survive(me: Member, phase: str, sharded: bool) -> str:
    me.join()
    return dies(me, phase, sharded)


def leaves(me: Member, sharded: bool) -> None:
    """The loop ends after step(), with everything under way, and the process leaves."""
    me.join()
    model, optimizer = dear("mlp", sharded=sharded)
    fit(model, optimizer, "mlp", me, 5)
    if me.rank == 1:
        model.synchronize()
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded", [False, True])
def test_leaving_right_after_a_step_harms_nobody(sharded: bool) -> None:
    with Ranks(leaves, 3, sharded, join=False) as ranks:
        ranks.results(60)
