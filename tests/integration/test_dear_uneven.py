"""Clipping, uneven inputs, other groups, other optimizers, compiled modules: on two and three real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from dear_models import MODES, OPTIMIZERS, apart, build, dear, deciding, fit, loss_of, was_all_reduced, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import paceline
from ranks import Member, run_ranks

ROUNDING = 2e-6


def _same_everywhere(model: nn.Module) -> bool:
    for value in weights(model).values():
        first = value.clone()
        dist.broadcast(first, 0)
        if not torch.equal(first, value):
            return False
    return True


def clips(me: Member) -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        net = build("mlp")
        theirs = OPTIMIZERS["sgd"](net.parameters())
        reference = DistributedDataParallel(net)
        wanted = []
        for step in range(5):
            theirs.zero_grad()
            loss_of(reference, "mlp", step, me.rank).backward()
            wanted.append(float(nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type)))
            theirs.step()
        for mode in MODES:
            with deciding(mode):
                model, ours = dear("mlp", sharded=mode == "sharded")
                for step in range(5):
                    ours.zero_grad()
                    loss_of(model, "mlp", step, me.rank).backward()
                    norm = model.clip_grad_norm_(0.1, norm_type)
                    assert abs(float(norm) - wanted[step]) < 1e-5 * wanted[step]
                    ours.step()
            assert mode != "restless" or was_all_reduced(model)
            assert apart(weights(reference), weights(model)) < ROUNDING


def test_clipping_uses_the_norm_of_all_gradients() -> None:
    run_ranks(clips, 3)


def joins(me: Member) -> list[float]:
    """Ranks with 3, 5 and 7 inputs; a scheduler, clipping and BatchNorm besides."""
    found = []
    for mode in MODES:
        net = build("cnn")
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        with deciding(mode):
            model = paceline.DataParallel(net, optimizer, sharded=mode == "sharded", bucket_mb=0.0005)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        with deciding(mode), model.join(divide_by_initial_world_size=False):
            for step in range(3 + 2 * me.rank):
                optimizer.zero_grad()
                loss_of(model, "cnn", step, me.rank).backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                scheduler.step()
        assert mode != "restless" or was_all_reduced(model)
        assert _same_everywhere(model)
        fit(model, optimizer, "cnn", me, 2, 20)  # all together again
        model.load_state_dict(model.state_dict())
        found.append(float(next(iter(model.state_dict().values())).sum()))
        assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))
    return found


def follows(me: Member) -> list[float]:
    """Against one process that takes the mean over the ranks that have inputs, or over all."""
    found = []
    for mode, initial in (("gathered", True), ("restless", False), ("sharded", False)):
        net = build("mlp")
        alone = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for step in range(3 + 2 * (me.world_size - 1)):
            active = [rank for rank in range(me.world_size) if step < 3 + 2 * rank]
            alone.zero_grad()
            for rank in active:
                (loss_of(net, "mlp", step, rank) / (me.world_size if initial else len(active))).backward()
            alone.step()
        mine = build("mlp")
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
        with deciding(mode):
            model = paceline.DataParallel(mine, optimizer, sharded=mode == "sharded", bucket_mb=0.002)
        with deciding(mode), model.join(divide_by_initial_world_size=initial):
            fit(model, optimizer, "mlp", me, 3 + 2 * me.rank)
        found.append(apart(weights(net), weights(model)))
    return found


def test_uneven_inputs_train_on_the_mean_of_what_there_is() -> None:
    assert max(max(found) for found in run_ranks(follows, 3)) < ROUNDING


def test_ranks_without_inputs_shadow_the_others() -> None:
    results = run_ranks(joins, 3)
    assert len({tuple(found) for found in results}) == 1
    assert max(results[0]) - min(results[0]) < 1e-4


def in_parts(me: Member) -> None:
    """Two groups of two ranks train for themselves, by group and by mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("apart", "together"))
    mine, number = mesh["together"], me.rank // 2
    for options in ({"process_group": mine.get_group()}, {"device_mesh": mine}):
        model, optimizer = dear("mlp", sharded=True, **options)
        fit(model, optimizer, "mlp", Member(10 * number + me.rank, 2, me.backend, me.store), 4)
        found = torch.cat([value.flatten() for value in weights(model).values()])
        everyone = [torch.empty_like(found) for _ in range(4)]
        dist.all_gather(everyone, found)
        assert torch.equal(everyone[0], everyone[1])
        assert torch.equal(everyone[2], everyone[3])
        assert not torch.equal(everyone[0], everyone[2])


def test_groups_and_meshes() -> None:
    run_ranks(in_parts, 4)


class Signed(torch.optim.Optimizer):
    """Not PyTorch's own, counts its steps, and scales by a norm over all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.steps = 0

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        self.steps += 1
        some = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in some]).norm()
        for p in some:
            p.sub_(p.grad.sign() * norm * self.param_groups[0]["lr"] / self.steps)


def others(me: Member) -> None:
    """Optimizers that need all gradients at once, or all of a parameter."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, "mlp", step, me.rank)
                loss.backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

    for make in (
        Signed,
        lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
        lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
    ):
        net = build("mlp")
        optimizer = make(net.parameters())
        reference = DistributedDataParallel(net)
        train(reference, optimizer)
        net = build("mlp")
        optimizer = make(net.parameters())
        model = paceline.DataParallel(net, optimizer, bucket_mb=0.002)
        train(model, optimizer)
        assert apart(weights(reference), weights(model)) == 0, type(optimizer)
        assert getattr(optimizer, "steps", 3) == 3


def test_other_optimizers() -> None:
    run_ranks(others, 2)


class Held(nn.Module):
    """PyTorch compiles a class of the user's in place, and no bare Sequential."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


def compiled(me: Member) -> None:
    """Compiled outside, inside and in place: no graph sees a guarded parameter, so none is compiled again."""
    import warnings

    import torch._dynamo as dynamo

    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # by dynamo, of any model with hidden layers

    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(1)
        return graph.forward

    net = build("mlp")
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    reference = DistributedDataParallel(net)
    fit(reference, optimizer, "mlp", me, 6)
    for kind in ("outside", "inside", "in place", "afterwards"):
        dynamo.reset()
        graphs.clear()
        net = build("mlp")
        optimizer = OPTIMIZERS["sgd"](net.parameters())
        whole: nn.Module = net
        if kind == "outside":
            whole = torch.compile(net, backend=backend)
        elif kind == "inside":
            whole = nn.Sequential(net[:2], torch.compile(net[2:], backend=backend))
        else:
            whole = Held(net)
        if kind == "in place":
            whole.compile(backend=backend)
        model = paceline.DataParallel(whole, optimizer, sharded=kind == "inside", bucket_mb=0.002)
        if kind == "afterwards":
            model.compile(backend=backend)
        fit(model, optimizer, "mlp", me, 6)
        model.synchronize()
        assert apart(weights(reference), weights(net)) < ROUNDING, kind
        assert len(graphs) == 1, (kind, len(graphs))


def test_compiled_modules() -> None:
    run_ranks(compiled, 2, timeout_s=100)


def tunes(me: Member, folder: str) -> tuple[int, list[int], bool]:
    """A search of at most 60 iterations; all ranks follow rank 0; weights are those of any threshold."""
    plain, optimizer = dear("mlp", "adamw", sharded=True, bucket_mb=25.0)
    fit(plain, optimizer, "mlp", me, 60)
    wanted = weights(plain)
    path = f"{folder}/{me.rank}/fusion.json"  # a file on rank 0's host is enough
    model, optimizer = dear("mlp", "adamw", sharded=True, bucket_mb="auto", tuning_file=path)
    fit(model, optimizer, "mlp", me, 60)
    assert apart(wanted, weights(model)) < ROUNDING
    again, _ = dear("mlp", "adamw", bucket_mb="auto", tuning_file=path)
    tuner, known = model._pipe._tuner, again._pipe._tuner
    return (
        tuner.threshold_bytes,
        [trial.threshold_bytes for trial in tuner.trials],
        (known.threshold_bytes == tuner.threshold_bytes and not known.searching),
    )


def test_fusion_is_tuned_while_training(tmp_path: Any) -> None:
    (first, trials, _), *rest = results = run_ranks(tunes, 2, str(tmp_path))
    assert len(trials) == 10
    assert first in trials
    assert all(threshold == first for threshold, _, _ in rest)
    assert all(reloaded for _, _, reloaded in results)
    assert (tmp_path / "0" / "fusion.json").exists()
    assert not (tmp_path / "1").exists()
