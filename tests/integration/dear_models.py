"""Models, data and loops for the tests of DataParallel: the same on every rank, and the same with DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.train.dear import pipeline
from paceline.train.dear.lookout import Lookout
from ranks import Member

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.05),
}


class Transformer(nn.Module):
    """Two layers of attention over tokens, with the embedding tied to the output."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 11, bias=False)  # registered first and used last
        self.embedding = nn.Embedding(11, 16)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.head.weight = self.embedding.weight
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens))).flatten(0, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(24, 3)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "transformer": Transformer}


def batch(model: str, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a rank in a step."""
    dice = torch.Generator().manual_seed(1000 * step + rank)
    if model == "transformer":
        tokens = torch.randint(11, (4, 6), generator=dice)
        return tokens, (tokens.flatten() * 3 + 1) % 11
    shape = (8, 16) if model == "mlp" else (8, 1, 8, 8)
    inputs = torch.randn(shape, generator=dice)
    return inputs, (inputs.flatten(1).sum(1) > 0).long()


def build(model: str, seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[model]()


def loss_of(model: nn.Module, name: str, step: int, rank: int) -> torch.Tensor:
    inputs, targets = batch(name, step, rank)
    return nn.functional.cross_entropy(model(inputs), targets)


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, me: Member, steps: int, first: int = 0
) -> list[float]:
    """The plain loop; returns the losses."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, name, step, me.rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(name: str, optimizer: str = "sgd", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = build(name)
    return DistributedDataParallel(net, **options), OPTIMIZERS[optimizer](net.parameters())


def dear(
    name: str, optimizer: str = "sgd", bucket_mb: float | str = 0.002, **options: Any
) -> tuple[paceline.DataParallel, torch.optim.Optimizer]:
    """With buckets so small that there are several."""
    net = build(name)
    made = OPTIMIZERS[optimizer](net.parameters())
    return paceline.DataParallel(net, made, bucket_mb=bucket_mb, **options), made


class Restless(Lookout):
    """Decides anew in every step: all buckets but one are all-reduced, none, or half of them."""

    _step = 0

    def next_num_early(self) -> int:
        self._step += 1
        return (0, self._most, (self._most + 1) // 2)[self._step % 3]


def was_all_reduced(model: paceline.DataParallel) -> bool:
    """Whether buckets were all-reduced in the steps that the model remembers."""
    return any(flight.operation == "all-reduce" for step in model.overlap.steps for flight in step.flights)


MODES = ("gathered", "restless", "sharded")
"""Gradients gathered, with buckets that travel in halves at first; the same with a restless rank 0; parameters."""


@contextmanager
def deciding(mode: str) -> Iterator[None]:
    """How rank 0 decides while a model is made and trained in this mode."""
    with patch.object(pipeline, "Lookout", Restless if mode == "restless" else Lookout):
        yield


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.state_dict().items()}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference between two models."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)
