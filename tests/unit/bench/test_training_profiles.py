"""The five models, against what is published of them."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from paceline.bench.training.architectures import ARCHITECTURES
from paceline.bench.training.profile import PUBLISHED, SHAPES, load_profile, uniform_profile
from paceline.errors import UsageError

# Parameters, tensors, and milliseconds of an iteration on one GPU.
TABLE = {
    "resnet50": (25_557_032, 161, 229),
    "densenet201": (20_013_928, 604, 212),
    "inception_v4": (42_679_816, 449, 353),
    "bert_base": (110_111_042, 206, 292),
    "bert_large": (336_232_258, 398, 422),
}


@pytest.mark.parametrize("model", TABLE)
def test_counts_and_times_are_those_published(model: str) -> None:
    profile = load_profile(model)
    elements, tensors, iteration_ms = TABLE[model]
    assert (profile.num_elements, profile.num_tensors) == (elements, tensors)
    assert round((profile.forward_s + profile.backward_s) * 1e3) == iteration_ms
    assert profile.backward_s == pytest.approx(2 * profile.forward_s)
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers if len(layer.sizes) > 1)


@pytest.mark.parametrize("model", ["resnet50", "densenet201"])
def test_measured_tensors_are_those_of_the_architecture(model: str) -> None:
    text = resources.files("paceline.bench.training").joinpath("profiles", f"{model}.json").read_text()
    measured = json.loads(text)
    assert measured["elements"] == [size for layer in ARCHITECTURES[model]() for size in layer.sizes]
    assert len(measured["backward_s"]) == len(measured["elements"])
    profile = load_profile(model)
    share = sum(measured["backward_s"][:3]) / sum(measured["backward_s"])
    first = profile.layers[0].sizes
    if len(first) == 3:  # of the stem: a convolution and its norm
        assert profile.layers[0].backward_s == pytest.approx(share * profile.backward_s)
    assert "measured" in profile.source


def test_models_without_measurements_say_so() -> None:
    assert "multiply-adds" in load_profile("bert_base").source


def test_every_published_model_has_an_architecture() -> None:
    assert set(PUBLISHED) == set(ARCHITECTURES) == set(TABLE)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(UsageError, match="resnet50, densenet201"):
        load_profile("alexnet")


@pytest.mark.parametrize("model", SHAPES)
def test_shapes_are_found_by_their_names(model: str) -> None:
    profile = load_profile(model)
    assert profile.model == model
    assert profile.compute_s == pytest.approx(0.3)
    assert profile.source.startswith("synthetic")


def test_a_cnn_has_its_parameters_at_the_end_and_its_computation_at_the_front() -> None:
    layers = load_profile("cnn_like").layers
    sizes, times = [sum(layer.sizes) for layer in layers], [layer.backward_s for layer in layers]
    assert sizes == sorted(sizes)
    assert times == sorted(times, reverse=True)
    assert sum(sizes[16:]) > 0.9 * sum(sizes)
    assert sum(times[:16]) == pytest.approx(0.7 * sum(times))


def test_a_transformer_has_an_embedding_and_equal_blocks() -> None:
    embedding, *blocks = load_profile("transformer_like").layers
    assert embedding.backward_s == 0.0
    assert embedding.sizes == (30_000 * 768,)
    assert len({(layer.sizes, layer.backward_s) for layer in blocks}) == 2
    assert len(blocks) == 24


def test_uniform_layers_are_equal() -> None:
    profile = uniform_profile(num_layers=4, elements=10, iteration_s=1.2)
    assert {(layer.sizes, round(layer.backward_s, 9)) for layer in profile.layers} == {((10,), 0.2)}
