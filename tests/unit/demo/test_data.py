"""The digits come with the package."""

from __future__ import annotations

import pytest
import torch

from paceline.demo.data import Digits


def test_every_fifth_digit_is_held_out() -> None:
    digits = Digits.load()
    assert digits.images.shape == (1437, 64)
    assert digits.test_images.shape == (360, 64)
    assert (float(digits.images.min()), float(digits.images.max())) == (0.0, 1.0)
    assert set(digits.test_labels.tolist()) == set(range(10))


def test_they_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = (torch.from_numpy(part) for part in datasets.load_digits(return_X_y=True))
    digits = Digits.load()
    assert torch.equal(digits.test_images, images[::5].float() / 16)
    assert torch.equal(digits.test_labels, labels[::5])
    assert torch.equal(digits.images[:4], images[1:5].float() / 16)
