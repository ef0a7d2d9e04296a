"""A module that takes the time of a model's layers and makes gradients of their sizes, without its arithmetic.

Layers sleep, so that more ranks than cores compute side by side. What a layer slept too long, because a core was not
free at once, the next one sleeps less; making the gradients is part of the layer's time. So is what PyTorch and SGD do
between layers, once it is known how long that takes (``between_s``): then an iteration of the bare module lasts as long
as the profile says. Gradients are known, so that it can be told what the weights must be after some steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.bench.training.profile import LayerProfile, Profile

SHORTEST_SLEEP_S = 0.5e-3
"""Shorter times are saved up: waking costs more than they last."""

LEARNING_RATE = 2.0**-10
_VALUES = 5


class Pace:
    """How much time the layers so far should have taken, and have not."""

    def __init__(self, between_s: float = 0.0) -> None:
        self.between_s = between_s
        self.owed_s = 0.0
        self.enabled = True

    def spend(self, seconds: float, began_s: float) -> None:
        """Let this much time pass since a moment, less what passes between layers."""
        if not self.enabled:
            return
        self.owed_s += seconds - self.between_s
        left_s = self.owed_s - (time.perf_counter() - began_s)
        if left_s >= SHORTEST_SLEEP_S:
            time.sleep(left_s)
        self.owed_s -= time.perf_counter() - began_s


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: ReplayLayer, *parameters: torch.Tensor) -> torch.Tensor:
        for parameter in parameters:
            parameter.view(-1)  # a layer reads its weights: whoever awaits them awaits them here
        began_s = time.perf_counter()
        ctx.layer = layer
        result = x.clone()
        layer.pace.spend(layer.forward_s, began_s)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        began_s = time.perf_counter()
        layer: ReplayLayer = ctx.layer
        made = [torch.full((size,), value) for size, value in zip(layer.sizes, layer.values, strict=True)]
        layer.pace.spend(layer.backward_s, began_s)
        return gradients[0], None, *made


class ReplayLayer(nn.Module):
    """One layer: parameters of the profile's sizes."""

    def __init__(self, profile: LayerProfile, pace: Pace, first_index: int, rank: int) -> None:
        super().__init__()
        self.pace = pace
        self.sizes = profile.sizes
        self.forward_s, self.backward_s = profile.forward_s, profile.backward_s
        self.indexes = range(first_index, first_index + len(self.sizes))
        self.values = [gradient(index, rank) for index in self.indexes]
        for number, size in enumerate(self.sizes):
            self.register_parameter(f"weight{number}", nn.Parameter(torch.zeros(size)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass the input on, after the layer's time."""
        out: torch.Tensor = _Compute.apply(x, self, *self._parameters.values())  # type: ignore[no-untyped-call]
        return out


class ReplayModel(nn.Sequential):
    """Groups of layers: one for all of them, or as a strategy wants to cut the model."""

    def __init__(
        self, profile: Profile, rank: int, groups: Sequence[Sequence[int]] | None = None, between_s: float = 0.0
    ) -> None:
        pace, index, layers = Pace(between_s), 0, []
        for layer in profile.layers:
            layers.append(ReplayLayer(layer, pace, index, rank))
            index += len(layer.sizes)
        cut = groups or [range(len(layers))]
        super().__init__(*(nn.Sequential(*(layers[number] for number in group)) for group in cut))
        self.pace = pace

    def wrong_elements(self, steps: int, num_ranks: int) -> int:
        """How many elements are not what so many steps from zero lead to."""
        wrong = 0
        for layer in self.modules():
            if isinstance(layer, ReplayLayer):
                for index, parameter in zip(layer.indexes, layer.parameters(recurse=False), strict=True):
                    mean = sum(gradient(index, rank) for rank in range(num_ranks)) / num_ranks
                    expected = -LEARNING_RATE * steps * mean
                    values: Any = parameter.detach()
                    local = values.to_local() if hasattr(values, "to_local") else values
                    wrong += int((~torch.isclose(local, torch.tensor(expected), rtol=1e-4)).sum())
        return wrong


def gradient(index: int, rank: int) -> float:
    """Every element of a rank's gradient of a tensor: tensors differ, so that what lands in the wrong one shows."""
    return float((index % _VALUES + 1) * (rank + 1))


def groups_of(profile: Profile, threshold_bytes: int) -> list[list[int]]:
    """Layers one after another, filled up to the threshold."""
    groups: list[list[int]] = []
    filled = 0
    for number, layer in enumerate(profile.layers):
        size_bytes = 4 * sum(layer.sizes)
        if not groups or filled + size_bytes > threshold_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += size_bytes
    return groups
