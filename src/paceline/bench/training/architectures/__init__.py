"""The five models as lists of layers: every parameter's shape, and what a layer computes for one input.

Each file writes an architecture down as its paper and the usual PyTorch implementation have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.bench.training.architectures.bert import bert_base, bert_large
from paceline.bench.training.architectures.densenet201 import densenet201
from paceline.bench.training.architectures.inception_v4 import inception_v4
from paceline.bench.training.architectures.layers import Layer
from paceline.bench.training.architectures.resnet50 import resnet50

ARCHITECTURES: dict[str, Callable[[], Sequence[Layer]]] = {
    "resnet50": resnet50,
    "densenet201": densenet201,
    "inception_v4": inception_v4,
    "bert_base": bert_base,
    "bert_large": bert_large,
}
"""By the names of the command line."""
