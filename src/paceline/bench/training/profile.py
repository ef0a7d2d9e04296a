"""A model's profile: the gradients of each layer, and how long a GPU computes forward and backward through it.

Iteration times of one GPU are published (:data:`PUBLISHED`). They are apportioned: a third to the forward pass and two
thirds to backpropagation, then to layers, in proportion to measured times of backpropagation where there are some
(``profiles/``), else to multiply-adds. :data:`SHAPES` has models made up for clear figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from paceline.bench.training.architectures import ARCHITECTURES
from paceline.bench.training.architectures.layers import Layer
from paceline.errors import UsageError

FORWARD_SHARE = 1 / 3
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Published:
    """One line of a table: inputs a GPU, and inputs a second on one GPU and on each of 64 with Horovod, 10 GbE."""

    batch: int
    alone_per_s: float
    horovod64_per_s: float

    @property
    def alone_s(self) -> float:
        """An iteration of one GPU."""
        return self.batch / self.alone_per_s


PUBLISHED = {
    "resnet50": Published(64, 279.0, 13055.1),
    "densenet201": Published(32, 150.6, 4243.3),
    "inception_v4": Published(64, 181.2, 6762.9),
    "bert_base": Published(64, 219.1, 4302.8),
    "bert_large": Published(32, 75.8, 821.3),
}
"""RTX 2080 Ti, PyTorch 1.10, Horovod 0.21.3 (lzhangbv/last-batch-ddl, table 1). BERT with 64 words a sequence."""


@dataclass(frozen=True)
class LayerProfile:
    """Elements of each gradient, and seconds of computation."""

    name: str
    sizes: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Profile:
    """All layers in the order of the forward pass, and where their times come from."""

    model: str
    layers: tuple[LayerProfile, ...]
    source: str

    @property
    def forward_s(self) -> float:
        """Of all layers."""
        return sum(layer.forward_s for layer in self.layers)

    @property
    def backward_s(self) -> float:
        """Of all layers."""
        return sum(layer.backward_s for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """Of both passes."""
        return self.forward_s + self.backward_s

    @property
    def num_tensors(self) -> int:
        """How many gradients there are."""
        return sum(len(layer.sizes) for layer in self.layers)

    @property
    def num_elements(self) -> int:
        """Of all gradients."""
        return sum(sum(layer.sizes) for layer in self.layers)

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients, in float32."""
        return self.num_elements * ELEMENT_BYTES


def load_profile(model: str) -> Profile:
    """The profile of a model, at its true size and speed."""
    if model in SHAPES:
        return SHAPES[model]()
    if model not in ARCHITECTURES:
        raise UsageError(f"there is no model {model!r} to replay; there are {', '.join((*ARCHITECTURES, *SHAPES))}")
    layers, published = ARCHITECTURES[model](), PUBLISHED[model]
    measured = _measured(model)
    weights = _backward_of(layers, measured) if measured else [layer.multiply_adds for layer in layers]
    how = "measured times of backpropagation" if measured else "multiply-adds"
    source = (
        f"one GPU's iteration of {published.alone_s * 1e3:.0f} ms is published (batch {published.batch}); apportioned: "
        f"1/3 to forward, 2/3 to backward, to layers by {how}"
    )
    return Profile(model, apportioned(layers, weights, published.alone_s), source)


def uniform_profile(num_layers: int = 32, elements: int = 800_000, iteration_s: float = 0.3) -> Profile:
    """Equal layers of one tensor each: no model, but what the bounds assume."""
    layers = [Layer(f"layer{number}", ((elements,),), 1.0) for number in range(num_layers)]
    source = f"synthetic: {num_layers} equal layers"
    return Profile("uniform", apportioned(layers, [1.0] * num_layers, iteration_s), source)


def cnn_like_profile(per_stage: int = 8, iteration_s: float = 0.3) -> Profile:
    """Four stages of convolutions: parameters grow towards the end, and most of the computation is at the front."""
    layers = []
    for stage, channels in enumerate((64, 128, 256, 512)):
        shapes = ((channels, channels, 3, 3), (channels,))
        layers += [Layer(f"stage{stage}.{number}", shapes, 4.0 - stage) for number in range(per_stage)]
    source = (
        f"synthetic: 4 stages of {per_stage} convolutions, 64 to 512 channels; times of the stages are 4 : 3 : 2 : 1"
    )
    return Profile("cnn_like", apportioned(layers, [one.multiply_adds for one in layers], iteration_s), source)


def transformer_like_profile(blocks: int = 12, width: int = 768, iteration_s: float = 0.3) -> Profile:
    """An embedding, which takes no time, and equal blocks of attention and a perceptron."""
    layers = [Layer("embedding", ((30_000, width),), 0.0)]
    for number in range(blocks):
        layers.append(Layer(f"block{number}.attention", ((4, width, width), (4, width)), 4.0))
        layers.append(Layer(f"block{number}.perceptron", ((8, width, width), (5, width)), 8.0))
    source = f"synthetic: an embedding of 30,000 words and {blocks} equal blocks of width {width}"
    return Profile("transformer_like", apportioned(layers, [one.multiply_adds for one in layers], iteration_s), source)


SHAPES: dict[str, Callable[[], Profile]] = {
    "uniform": uniform_profile,
    "cnn_like": cnn_like_profile,
    "transformer_like": transformer_like_profile,
}
"""Models of no paper, by the names of the command line."""


def apportioned(layers: Sequence[Layer], weights: Sequence[float], iteration_s: float) -> tuple[LayerProfile, ...]:
    """Cut an iteration's time into those of layers, in proportion to weights."""
    total = sum(weights)
    found = []
    for layer, weight in zip(layers, weights, strict=True):
        both_s = iteration_s * weight / total
        found.append(LayerProfile(layer.name, layer.sizes, FORWARD_SHARE * both_s, (1 - FORWARD_SHARE) * both_s))
    return tuple(found)


def _measured(model: str) -> dict[str, Any] | None:
    file = resources.files("paceline.bench.training") / "profiles" / f"{model}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def _backward_of(layers: Sequence[Layer], measured: dict[str, Any]) -> list[float]:
    """Seconds of each layer: those of its tensors together."""
    times = iter(measured["backward_s"])
    return [sum(next(times) for _ in layer.sizes) for layer in layers]
