"""Bounds, scales, groups and grids of a replay: arithmetic."""

from __future__ import annotations

import pytest

from paceline.bench.training.bounds import Bounds
from paceline.bench.training.networks import NETWORKS
from paceline.bench.training.profile import load_profile, uniform_profile
from paceline.bench.training.scaling import bounds_of, fit, lab_s_per_byte, layered_s
from paceline.bench.training.strategies import parse_strategies
from paceline.bench.training.sweep import grid
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster

LAN8 = Cluster.preset("lan8")

# What the cost model of 10 GbE says, in milliseconds: DeAR's bound, and that of wait-free backpropagation.
PUBLISHED_MS = {
    "resnet50": (240, 250),
    "densenet201": (212, 212),
    "inception_v4": (381, 408),
    "bert_base": (749, 846),
    "bert_large": (2286, 2427),
}


@pytest.mark.parametrize("model", PUBLISHED_MS)
def test_bounds_at_full_size(model: str) -> None:
    profile = load_profile(model)
    half_s = profile.gradient_bytes * NETWORKS["10gbe"].all_reduce_s_per_byte / 2
    bounds = Bounds(profile.forward_s, profile.backward_s, half_s, half_s)
    dear_ms, wait_free_ms = PUBLISHED_MS[model]
    assert bounds.dear_s * 1e3 == pytest.approx(dear_ms, abs=1)
    assert bounds.wait_free_s * 1e3 == pytest.approx(wait_free_ms, abs=1)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("model", PUBLISHED_MS)
def test_scaling_keeps_the_ratio_of_communication_to_computation(model: str, network: str) -> None:
    profile, s_per_byte = load_profile(model), NETWORKS[network].all_reduce_s_per_byte
    scale = fit(profile, s_per_byte, LAN8)
    scaled = scale.apply(profile)
    bounds = bounds_of(scaled, LAN8)
    true = profile.gradient_bytes * s_per_byte / (profile.forward_s + profile.backward_s)
    assert bounds.all_reduce_s / bounds.compute_s == pytest.approx(true, rel=0.01)
    assert bounds.dear_s == pytest.approx(1.0, rel=0.01)
    assert scaled.num_tensors == profile.num_tensors


def test_a_tensor_keeps_an_element() -> None:
    profile = uniform_profile(num_layers=2, elements=10)
    scale = fit(profile, 1e-12, LAN8, time_factor=1e-3)
    assert [layer.sizes for layer in scale.apply(profile).layers] == [(1,), (1,)]


def test_the_scale_asked_for_is_taken() -> None:
    profile = load_profile("resnet50")
    scale = fit(profile, 1.7e-9, LAN8, time_factor=2.0)
    assert scale.time_factor == 2.0
    assert scale.size_factor == pytest.approx(2.0 * 1.7e-9 / lab_s_per_byte(LAN8))
    with pytest.raises(UsageError, match="positive"):
        fit(profile, 1.7e-9, LAN8, time_factor=0.0)


def test_a_byte_of_lan8_crosses_a_port_once_for_each_half() -> None:
    assert lab_s_per_byte(LAN8) == pytest.approx(2 * 7 / 8 * 1514 / 1448 / 62.5e6)


def test_the_sweet_spot_is_a_quarter() -> None:
    assert Bounds(1.0, 2.0, 2.0, 2.0).ideal_ratio == 1.25


def test_equal_layers_show_the_first_one_twice() -> None:
    """Its reduce-scatter begins when backpropagation ends, and its all-gather is over when the forward pass begins."""
    profile = uniform_profile(num_layers=10)
    bounds = Bounds(profile.forward_s, profile.backward_s, profile.backward_s, profile.forward_s)
    assert layered_s(profile, bounds) == pytest.approx(bounds.dear_s * 1.1)


def test_an_output_matrix_that_is_the_embedding_keeps_links_idle() -> None:
    profile = load_profile("bert_base")
    half_s = profile.gradient_bytes * NETWORKS["10gbe"].all_reduce_s_per_byte / 2
    bounds = Bounds(profile.forward_s, profile.backward_s, half_s, half_s)
    decoder = next(layer for layer in profile.layers if layer.name == "words.decoder")
    assert layered_s(profile, bounds) >= bounds.dear_s + decoder.forward_s + decoder.backward_s


def test_a_grid_ends_at_the_whole_model() -> None:
    sizes = grid(24_000_000)
    assert (len(sizes), sizes[0], sizes[-1]) == (12, 240_000, 24_000_000)
    assert sorted(set(sizes)) == sizes
    assert grid(10)[0] == 1


def test_strategies_are_named_once() -> None:
    assert parse_strategies("dear, ddp") == ["dear", "ddp"]
    for text in ("dear,dear", "horovod", ""):
        with pytest.raises(UsageError, match="dear-sharded"):
            parse_strategies(text)
