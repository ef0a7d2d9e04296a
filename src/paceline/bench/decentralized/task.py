"""What is learnt, and how its computation is padded to a stated time.

The task is generated: inputs are standard normal numbers, and a fixed small network, the teacher, gives the probability
of each of ten classes. Labels are drawn from these probabilities, so they are noisy: the best accuracy possible against
drawn labels is 67%. Every batch is fresh, a function of (seed, worker, step), so the loss of a batch before its step is
a held-out loss. Small batches make noisy gradients: a worker alone needs several times the steps of eight that average.

The loss that is reported is the Kullback-Leibler divergence of the model's probabilities from the teacher's: the
expected cross-entropy less the least possible. It varies far less from batch to batch than the trained cross-entropy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.bench.decentralized.cases import BLOCKS, CLASSES, INPUTS

_TEACHER_UNITS = 32
_TEACHER_SEED = 7
_TEACHER_SCALES = (1.5, 4.0)
_HELD_OUT_SEED = 11
_LAST_LAYER_SCALE = 0.1
_WATCHED = 2500
_STEPS_A_SEED = 1_000_000
_WORKERS_A_SEED = 1000
SHORTEST_SLEEP_S = 0.3e-3
"""Shorter times are saved up: waking costs more than they last."""


@dataclass(frozen=True)
class Batch:
    """Inputs, the labels drawn for them, and the probabilities they were drawn from."""

    inputs: torch.Tensor
    labels: torch.Tensor
    probabilities: torch.Tensor


class Teacher:
    """Draws batches. All teachers are the same."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(_TEACHER_SEED)
        first, last = _TEACHER_SCALES
        self._first = torch.randn(INPUTS, _TEACHER_UNITS, generator=generator) * (first / math.sqrt(INPUTS))
        self._last = torch.randn(_TEACHER_UNITS, CLASSES, generator=generator) * (last / math.sqrt(_TEACHER_UNITS))

    def batch(self, size: int, seed: int, worker: int, step: int) -> Batch:
        """Draw a worker's batch; the same arguments give the same batch."""
        return self._draw(size, (seed * _WORKERS_A_SEED + worker + 1) * _STEPS_A_SEED + step)

    def held_out(self, size: int) -> Batch:
        """Draw samples that no worker trains on, the same every time."""
        return self._draw(size, _HELD_OUT_SEED)

    def _draw(self, size: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(size, INPUTS, generator=generator)
        probabilities = torch.softmax(torch.tanh(inputs @ self._first) @ self._last, 1)
        labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        return Batch(inputs, labels, probabilities)


class StepClock:
    """Pads computation: each part of a pass lasts at least its time; what took longer, the next parts catch up on."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.last_s = 0.0
        self._due_s = 0.0

    def begin(self, began_s: float) -> None:
        """Start the forward pass of a step that began at this moment."""
        self._due_s = began_s

    def spend(self, seconds: float) -> None:
        """Let a part's time pass."""
        self._due_s += seconds * self.factor
        left_s = self._due_s - time.monotonic()
        if left_s >= SHORTEST_SLEEP_S:
            time.sleep(left_s)
        self.last_s = time.monotonic()


class _Pad(torch.autograd.Function):
    """Follows a layer: it ends the layer's forward, and begins its backward, so gradients come when that has passed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: PaddedLayer) -> torch.Tensor:
        ctx.layer = layer
        layer.clock.spend(layer.forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.layer.clock.spend(ctx.layer.backward_s)
        return gradients[0], None


class PaddedLayer(nn.Module):
    """A linear layer that takes its share of a step's time; a third of that forward, two thirds backward."""

    def __init__(self, inputs: int, outputs: int, clock: StepClock, *, residual: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.residual = residual
        self.clock = clock
        self.forward_s = self.backward_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute, then let the rest of the time pass."""
        y = self.linear(x)
        if self.residual:
            y = x + torch.relu(y)
        padded: torch.Tensor = _Pad.apply(y, self)  # type: ignore[no-untyped-call]
        return padded


class Model(nn.Sequential):
    """Residual blocks of one linear layer each, between an input and an output layer."""

    def __init__(self, width: int, compute_s: float, seed: int) -> None:
        clock = StepClock()
        torch.manual_seed(seed)
        layers = [
            PaddedLayer(INPUTS, width, clock),
            *(PaddedLayer(width, width, clock, residual=True) for _ in range(BLOCKS)),
            PaddedLayer(width, CLASSES, clock),
        ]
        super().__init__(*layers)
        with torch.no_grad():
            layers[-1].linear.weight.mul_(_LAST_LAYER_SCALE)
        total = sum(layer.linear.weight.numel() for layer in layers)
        for layer in layers:
            share_s = compute_s * layer.linear.weight.numel() / total
            layer.forward_s, layer.backward_s = share_s / 3, share_s * 2 / 3
        self.clock = clock


def cross_entropy(scores: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return what training minimises: the mean over the batch's labels."""
    return nn.functional.cross_entropy(scores, batch.labels)


def excess_loss(scores: torch.Tensor, batch: Batch) -> float:
    """Return what is reported: the expected cross-entropy above the least possible."""
    with torch.no_grad():
        wrong = batch.probabilities * (batch.probabilities.log() - torch.log_softmax(scores, 1))
        return float(wrong.sum(1).mean())


def evaluate(model: Sequence[Any] | nn.Module, batch: Batch) -> tuple[float, float]:
    """Return the reported loss and the share of samples whose likeliest class the model finds."""
    assert isinstance(model, Model)
    model.clock.factor = 0.0
    with torch.no_grad():
        scores = model(batch.inputs)
        right = scores.argmax(1) == batch.probabilities.argmax(1)
    return excess_loss(scores, batch), float(right.float().mean())


def held_out_loss(width: int) -> Callable[[Any], float]:
    """Return a function from a model's weights, as one array, to the reported loss on held-out samples."""
    model, batch = Model(width, 0.0, 0), Teacher().held_out(_WATCHED)

    def loss(weights: Any) -> float:
        torch.set_num_threads(1)  # of the calling thread: workers need the cores
        nn.utils.vector_to_parameters(torch.from_numpy(weights), model.parameters())
        return evaluate(model, batch)[0]

    return loss
