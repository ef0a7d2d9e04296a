"""What users of DDP expect, on two real ranks: each way of training ends with DDP's weights, in all modes.

A way is the same function for DDP and all modes; two ranks add in one order, so that most agree in every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from dear_models import MODES, apart, batch, build, deciding, loss_of, was_all_reduced, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.train.dear.pipeline import Pipeline
from ranks import Member, run_ranks

Model = Any
ROUNDING = 2e-6


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def accumulation(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    for step in range(6):
        optimizer.zero_grad()
        with model.no_sync():
            for part in range(2):
                loss_of(model, "mlp", 10 * step + part, me.rank).backward()
        loss_of(model, "mlp", 10 * step + 5, me.rank).backward()
        optimizer.step()


def two_backwards(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    for step in range(6):
        optimizer.zero_grad()
        losses = (loss_of(model, "mlp", 10 * step + part, me.rank) for part in range(2))
        # DDP reduces only if each backward() follows its forward pass.
        for loss in losses if isinstance(model, DistributedDataParallel) else list(losses):
            loss.backward()
        optimizer.step()


def schedules(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # before the update has happened
    for step in range(8):
        loss_of(model, "mlp", step, me.rank).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _scaled(model: Model, optimizer: torch.optim.Optimizer, me: Member, scaler: torch.amp.GradScaler) -> None:
    """One batch has no finite loss on one rank: no rank makes that step. Later steps are clipped, too."""
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of(model, "mlp", step, me.rank)
        if step == 4 and me.rank == 1:
            loss = loss * float("inf")
        before = weights(model)
        scaler.scale(loss).backward()
        if step > 6:
            scaler.unscale_(optimizer)
            clip = getattr(model, "clip_grad_norm_", None)
            clip(0.1) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        assert (apart(before, weights(model)) == 0) == (step == 4)
    assert scaler.get_scale() == 16.0 * 2 / 2 * 2


def scaled(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    _scaled(model, optimizer, me, torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3))


def scaled_before_gathering(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    """Our own scaler does not gather gradients before step()."""
    scaler = paceline.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    if not isinstance(model, paceline.DataParallel):
        _scaled(model, optimizer, me, scaler)
        return
    with patch.object(Pipeline, "gather_gradients", side_effect=AssertionError("gathered before step()")):
        _scaled(model, optimizer, me, scaler)


def torch_clipping(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    """Gradients read and changed by a function that knows nothing of us."""
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, "mlp", step, me.rank).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def half_precision(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, "mlp", step, me.rank)
        loss.backward()
        optimizer.step()


def evaluations(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, "mlp", step, me.rank).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            seen.append(float(model(torch.ones(1, 16)).sum()))
        model.train()
    assert len(set(seen)) == len(seen)


def with_closure(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    for step in range(5):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, "mlp", step, me.rank)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0


def interrupted(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    """Errors in forward and in the midst of backward; the next iteration is as if nothing had been."""

    def stumble(_: torch.Tensor) -> None:
        raise KeyError("stumble")

    for step in range(6):
        optimizer.zero_grad()
        if step == 2 and isinstance(model, paceline.DataParallel):  # DDP does not survive this
            inputs, _ = batch("mlp", step, me.rank)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(inputs[:, :3])
            hidden = model.module[:3](inputs)
            hidden.register_hook(stumble)
            with pytest.raises(KeyError, match="stumble"):
                model.module[3:](hidden).sum().backward()
            optimizer.zero_grad()
        loss_of(model, "mlp", step, me.rank).backward()
        optimizer.step()


def dropped(model: Model, optimizer: torch.optim.Optimizer, me: Member) -> None:
    """A batch whose gradients are thrown away after backward()."""
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, "mlp", step, me.rank).backward()
        if step == 3:
            continue
        optimizer.step()


WAYS: list[Callable[..., None]] = [
    *(accumulation, two_backwards, schedules, scaled, scaled_before_gathering, torch_clipping, half_precision),
    *(evaluations, with_closure, interrupted, dropped),
]


def _all_modes(
    make: Callable[[], nn.Module], way: Callable[..., None], me: Member, optimizer_of: Any = _sgd, **options: Any
) -> list[float]:
    """How far all modes end from DDP."""
    net = make()
    optimizer = optimizer_of(net)
    reference = DistributedDataParallel(net, find_unused_parameters=isinstance(net, Moody))
    way(reference, optimizer, me)
    found = []
    for mode in MODES:
        net = make()
        optimizer = optimizer_of(net)
        with deciding(mode):
            model = paceline.DataParallel(net, optimizer, sharded=mode == "sharded", bucket_mb=0.002, **options)
            way(model, optimizer, me)
        assert mode != "restless" or was_all_reduced(model)
        found.append(apart(weights(reference), weights(model)))
    return found


def ways(me: Member) -> dict[str, list[float]]:
    found = {}
    for way in WAYS:
        found[way.__name__] = _all_modes(lambda: build("mlp"), way, me, lambda net: _sgd(net.parameters()))
    return found


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_ways_of_training_end_with_the_weights_of_ddp(backend: str) -> None:
    for found in run_ranks(ways, 2, backend=backend, timeout_s=100):
        for way, distances in found.items():
            assert max(distances) <= ROUNDING, (way, distances)
        exact = {way for way, distances in found.items() if max(distances) == 0}
        assert exact >= {
            "schedules",
            "half_precision",
            "evaluations",
            "with_closure",
            "interrupted",
            "dropped",
        }


class Checkpointed(nn.Module):
    """Three parts whose activations are computed again; the first and the last share a weight."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.parts[2].weight = self.parts[0].weight
        self.out = nn.Linear(16, 3)
        self.reentrant = reentrant

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs.requires_grad_()
        for part in self.parts:
            hidden = checkpoint(lambda x, part=part: torch.tanh(part(x)), hidden, use_reentrant=self.reentrant)
        return self.out(hidden)


class Moody(nn.Module):
    """Other branches on other ranks and steps, one never used, one used twice, one frozen, in changing order."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(16, 16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(16))  # used outside of any module of its own
        self.out = nn.Linear(16, 3)
        self.step = 0
        self.rank = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first = (self.step // 4) % 3
        hidden = torch.tanh(self.branches[first](inputs) * self.scale)
        hidden = torch.tanh(self.branches[first](self.frozen(hidden)))
        if self.rank == self.step % 2:
            hidden = hidden + self.branches[(first + 1) % 3](hidden)
        return self.out(hidden)


def architectures(me: Member) -> dict[str, list[float]]:
    def train(model: Model, optimizer: torch.optim.Optimizer, _: Member) -> None:
        for step in range(16):
            inner = model.module
            inner.step, inner.rank = step, me.rank
            optimizer.zero_grad()
            loss_of(model, "mlp", step, me.rank).backward()
            optimizer.step()

    def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def made() -> nn.Module:
            torch.manual_seed(3)
            return make()

        return made

    def grouped(net: nn.Module) -> torch.optim.Optimizer:
        decayed = [p for p in net.parameters() if p.dim() > 1 and p.requires_grad]
        others = [p for p in net.parameters() if p.dim() == 1 and p.requires_grad]
        return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01)

    def recurrent() -> nn.Module:
        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lstm, self.out = nn.LSTM(4, 6, num_layers=2, batch_first=True), nn.Linear(6, 3)

            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return self.out(self.lstm(inputs.view(-1, 4, 4))[0][:, -1])

        return Recurrent()

    found = {
        "moody": _all_modes(seeded(Moody), train, me, grouped),
        "checkpointed": _all_modes(seeded(lambda: Checkpointed(False)), train, me, grouped),
        "recurrent": _all_modes(seeded(recurrent), train, me, grouped),
    }
    # DDP does not serve reentrant checkpoints that share a weight: the other kind computes the same.
    reference = seeded(lambda: Checkpointed(False))()
    optimizer = grouped(reference)
    train(DistributedDataParallel(reference), optimizer, me)
    for mode in MODES:
        net = seeded(lambda: Checkpointed(True))()
        optimizer = grouped(net)
        with deciding(mode):
            train(paceline.DataParallel(net, optimizer, sharded=mode == "sharded", bucket_mb=0.002), optimizer, me)
        found[f"reentrant {mode}"] = [apart(weights(reference), weights(net))]
    return found


@pytest.mark.parametrize("backend", ["paceline", "gloo"])
def test_architectures_train_as_with_ddp(backend: str) -> None:
    for found in run_ranks(architectures, 2, backend=backend, timeout_s=100):
        for name, distances in found.items():
            assert max(distances) <= ROUNDING, (name, distances)
