"""What is learnt: handwritten digits, by a perceptron large enough to keep thin links busy.

``digits.npz`` has the 1797 images of 8x8 pixels, from 0 to 16, of scikit-learn's ``load_digits``: the test set of
E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998
(https://archive.ics.uci.edu/dataset/80), under CC BY 4.0 (https://creativecommons.org/licenses/by/4.0). Only the file
format differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

HIDDEN = 768
_HELD_OUT = 5  # every fifth image is kept for the final test
_BRIGHTEST = 16.0


@dataclass(frozen=True)
class Digits:
    """Images to train on, and others to test with."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    @classmethod
    def load(cls) -> Digits:
        """Read them from the package, with pixels from 0 to 1."""
        import torch

        with np.load(Path(__file__).with_name("digits.npz")) as saved:
            images, labels = torch.from_numpy(saved["images"]) / _BRIGHTEST, torch.from_numpy(saved["labels"]).long()
        held_out = torch.arange(len(labels)) % _HELD_OUT == 0
        return cls(images[~held_out], labels[~held_out], images[held_out], labels[held_out])

    def batch(self, number: int, size: int, rank: int, num_ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's part of a batch: each epoch is shuffled anew, the same way in every training."""
        import torch

        batches = len(self.labels) // (size * num_ranks)
        shuffle = torch.Generator().manual_seed(seed + number // batches)
        first = (number % batches * num_ranks + rank) * size
        chosen = torch.randperm(len(self.labels), generator=shuffle)[first : first + size]
        return self.images[chosen], self.labels[chosen]


def make_model(seed: int) -> torch.nn.Sequential:
    """The same weights for the same seed: 5 MB of gradients."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN), nn.ReLU(),
        nn.Linear(HIDDEN, 10),
    )  # fmt: skip


def accuracy(model: torch.nn.Module, digits: Digits) -> float:
    """The share of the held-out images that the model reads right."""
    import torch

    with torch.no_grad():
        return float((model(digits.test_images).argmax(1) == digits.test_labels).float().mean())
