"""DataParallel against DDP, from the same seeds, in float32: both modes, three optimizers, two models.

200 steps in ``make thorough``, and 60 otherwise.

Two ranks add in only one order, and halves are exact: every bit is that of DDP. More ranks may add in another order
than DDP's all-reduce, and thirds are rounded: weights, of size about one, stay within ``BETWEEN_ORDERS`` of DDP's.
Adam divides by the root of a mean square, so where a gradient is nothing but rounding (a bias before a normalisation)
it makes steps of rounding: models here have none of those, and its epsilon is 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dear_models import Transformer, apart, loss_of, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from effort import thorough
from ranks import BACKEND, Member, run_ranks

STEPS = thorough(200, 60)
BETWEEN_ORDERS = 1e-5

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, eps=1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, weight_decay=0.05),
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "transformer":
        return Transformer()
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Tanh(), nn.AvgPool2d(3), nn.Flatten()),
        *(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)),
    )


def train(me: Member, name: str, optimizer: str) -> dict[str, Any]:
    def run(
        wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module],
    ) -> tuple[dict[str, torch.Tensor], list[float]]:
        net = _model(name)
        made = OPTIMIZERS[optimizer](net.parameters())
        model = wrap(net, made)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, name, step, me.rank)
            made.zero_grad()
            loss.backward()
            made.step()
            losses.append(loss.item())
        return weights(model), losses

    reference, losses = run(lambda net, _: DistributedDataParallel(net))
    found: dict[str, Any] = {"left of the loss": sum(losses[-10:]) / sum(losses[:10])}
    for mode in ("gathered", "sharded"):
        trained, _ = run(
            lambda net, made, mode=mode: paceline.DataParallel(net, made, sharded=mode == "sharded", bucket_mb=0.005)
        )
        found[mode] = apart(reference, trained)
        for key, mine in trained.items():
            first = mine.clone()
            dist.broadcast(first, 0)
            assert "running" in key or torch.equal(mine, first), f"{key} differs between ranks"
    return found


@pytest.mark.parametrize(
    ("model", "optimizer", "num_ranks", "backend"),
    [
        ("cnn", "sgd", 2, BACKEND),
        ("cnn", "adam", 3, "gloo"),
        ("cnn", "adamw", 4, BACKEND),
        ("transformer", "adam", 2, "gloo"),
        ("transformer", "adamw", 2, BACKEND),
        ("transformer", "sgd", 3, BACKEND),
    ],
)
def test_many_steps_end_with_the_weights_of_ddp(model: str, optimizer: str, num_ranks: int, backend: str) -> None:
    for found in run_ranks(train, num_ranks, model, optimizer, backend=backend, timeout_s=110):
        bound = 0.0 if num_ranks == 2 else BETWEEN_ORDERS
        assert max(found["gathered"], found["sharded"]) <= bound, (found["gathered"], found["sharded"])
        assert found["left of the loss"] < thorough(0.6, 0.9), "it learns nothing: then equal weights show little"
