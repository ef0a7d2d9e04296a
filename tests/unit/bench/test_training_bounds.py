"""Bounds, scales, groups and grids of a replay: arithmetic."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench.training.bounds import Bounds, layers_bound_s, wait_free_layers_bound_s
from paceline.bench.training.networks import NETWORKS
from paceline.bench.training.profile import LayerProfile, load_profile, uniform_profile
from paceline.bench.training.scaling import bounds_of, fit, lab_s_per_byte
from paceline.bench.training.strategies import DDP_BUCKETS, STRATEGIES, USUAL_STRATEGIES, Buckets, parse_strategies
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
    bounds = Bounds.of(profile.layers, half_s, half_s)
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
    assert bounds.any_schedule_s == pytest.approx(1.0, rel=0.01)
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


def _layers(*rows: tuple[int, float, float]) -> list[LayerProfile]:
    return [LayerProfile("layer", (size,), forward_s, backward_s) for size, forward_s, backward_s in rows]


def test_bounds_of_the_whole_model() -> None:
    bounds = Bounds.of(_layers((1, 1.0, 2.0)), 2.0, 2.0)
    assert (bounds.any_schedule_s, bounds.dear_s, bounds.wait_free_s) == (4.0, 4.0, 5.0)
    early = Bounds.of(_layers((1, 1.0, 4.0)), 1.0, 2.0)
    assert early.any_schedule_s == 5.0 < early.dear_s == 6.0  # who gathers during backpropagation can beat DeAR's


def test_a_single_layer_overlaps_nothing() -> None:
    assert layers_bound_s(_layers((7, 1.0, 2.0)), 4.0) == wait_free_layers_bound_s(_layers((7, 1.0, 2.0)), 4.0) == 7.0


@pytest.mark.parametrize("all_reduce_s", [0.0, 0.5, 4.0])
def test_layers_without_gradients_at_the_end_overlap_nothing_of_theirs(all_reduce_s: float) -> None:
    layers = [*_layers((5, 0.5, 1.0)), LayerProfile("loss", (), 1.0, 2.0)]
    assert layers_bound_s(layers, all_reduce_s) == 4.5 + all_reduce_s


def test_equal_layers_show_the_first_or_the_last_of_them() -> None:
    layers = _layers(*[(1, 1.0, 2.0)] * 10)
    assert layers_bound_s(layers, 10.0) == 30.0 + 1.0  # computation, and what the first layer all-reduces
    assert layers_bound_s(layers, 40.0) == 40.0 + 3.0  # the all-reduce, and the computation of the last layer
    assert wait_free_layers_bound_s(layers, 10.0) == 30.0 + 1.0
    assert wait_free_layers_bound_s(layers, 40.0) == 10.0 + 2.0 + 40.0
    assert Bounds.of(layers, 20.0, 20.0).ideal_ratio == 52.0 / 43.0


def test_an_output_matrix_that_is_the_embedding_keeps_links_idle() -> None:
    profile = load_profile("bert_base")
    half_s = profile.gradient_bytes * NETWORKS["10gbe"].all_reduce_s_per_byte / 2
    bounds = Bounds.of(profile.layers, half_s, half_s)
    decoder = next(layer for layer in profile.layers if layer.name == "words.decoder")
    assert bounds.layers_s >= bounds.all_reduce_s + decoder.forward_s + decoder.backward_s


class _Link:
    """A link that is never idle while a transfer can go, and takes any of those that can."""

    def __init__(self, seed: int, num_layers: int) -> None:
        self.chance = random.Random(seed)
        self.free_s = 0.0
        self.waiting: list[tuple[float, int, float, bool]] = []  # ready at, layer, seconds, whether the first half
        self.arrived_s = [0.0] * num_layers

    def post(self, now_s: float, layer: int, seconds: float) -> None:
        """Cut an all-reduce into parts of random sizes, each of two halves, the second ready after the first."""
        cuts = sorted([0.0, 1.0, *(self.chance.random() for _ in range(self.chance.randrange(3)))])
        for left, right in itertools.pairwise(cuts):
            self.waiting.append((now_s, layer, (right - left) * seconds / 2, True))

    def begin_until(self, now_s: float) -> None:
        """Begin all that is begun before this moment."""
        while self.waiting and max(self.free_s, min(self.waiting)[0]) < now_s:
            self._take()

    def finish(self, layers: set[int]) -> float:
        """Run until these layers have arrived; returns when."""
        while any(layer in layers for _, layer, _, _ in self.waiting):
            self._take()
        return max(self.arrived_s[layer] for layer in layers)

    def _take(self) -> None:
        begin_s = max(self.free_s, min(self.waiting)[0])
        taken = self.chance.choice([one for one in self.waiting if one[0] <= begin_s])
        self.waiting.remove(taken)
        _, layer, seconds, is_first = taken
        self.free_s = begin_s + seconds
        if is_first:
            self.waiting.append((self.free_s, layer, seconds, False))
        else:
            self.arrived_s[layer] = max(self.arrived_s[layer], self.free_s)


def _periods(layers: Sequence[LayerProfile], all_reduce_s: float, seed: int, *, wait_free: bool) -> list[list[float]]:
    """Seconds from each end of backward of a layer to the next, by layer; DDP's forward pass waits for all layers."""
    link, now_s, everything = _Link(seed, len(layers)), 0.0, set(range(len(layers)))
    elements = sum(sum(layer.sizes) for layer in layers)
    ends_s: list[list[float]] = [[] for _ in layers]
    for _ in range(4):
        for number, layer in enumerate(layers):
            now_s = max(now_s, link.finish(everything if wait_free else {number})) + layer.forward_s
        for number, layer in reversed(list(enumerate(layers))):
            now_s += layer.backward_s
            ends_s[number].append(now_s)
            link.begin_until(now_s)
            if layer.sizes:
                link.post(now_s, number, all_reduce_s * sum(layer.sizes) / elements)
    return [[after - before for before, after in itertools.pairwise(ends)] for ends in ends_s]


_SECONDS = st.floats(0.0, 4.0)
_LAYERS = st.lists(
    st.builds(LayerProfile, st.just("layer"), st.sampled_from([(), (1,), (3,), (2, 5)]), _SECONDS, _SECONDS),
    min_size=1,
    max_size=6,
).filter(lambda layers: any(layer.sizes for layer in layers))


@given(_LAYERS, _SECONDS, st.integers(0, 1 << 20))
def test_no_schedule_beats_the_bound(layers: list[LayerProfile], all_reduce_s: float, seed: int) -> None:
    """Around one of the layers, no iteration is shorter than the bound: so they are not on average either."""
    periods = _periods(layers, all_reduce_s, seed, wait_free=False)
    assert max(map(min, periods)) >= layers_bound_s(layers, all_reduce_s) - 1e-9


@given(_LAYERS, _SECONDS, st.integers(0, 1 << 20))
def test_wait_free_backpropagation_takes_exactly_its_bound(
    layers: list[LayerProfile], all_reduce_s: float, seed: int
) -> None:
    bound_s = wait_free_layers_bound_s(layers, all_reduce_s)
    periods = _periods(layers, all_reduce_s, seed, wait_free=True)
    assert [period for layer in periods for period in layer] == pytest.approx([bound_s] * 3 * len(layers))


@given(_LAYERS, _SECONDS)
def test_layers_only_add_to_the_bounds_of_the_whole_model(layers: list[LayerProfile], all_reduce_s: float) -> None:
    bounds = Bounds.of(layers, all_reduce_s / 2, all_reduce_s / 2)
    assert bounds.any_schedule_s <= bounds.layers_s + 1e-9
    assert bounds.wait_free_s <= bounds.wait_free_layers_s + 1e-9
    assert bounds.layers_s <= bounds.wait_free_layers_s + 1e-9


def test_two_layers_reach_the_bound() -> None:
    """The second is all-reduced behind backward of the first; only the first one's all-reduce is exposed."""
    layers = _layers((1, 1.0, 2.0), (1, 1.0, 2.0))
    assert _periods(layers, 4.0, 0, wait_free=False)[0][-1] == layers_bound_s(layers, 4.0) == 8.0


def test_a_grid_ends_at_the_whole_model() -> None:
    sizes = grid(24_000_000)
    assert (len(sizes), sizes[0], sizes[-1]) == (12, 240_000, 24_000_000)
    assert sorted(set(sizes)) == sizes
    assert grid(10)[0] == 1


def test_sizes_of_buckets_are_scaled_with_the_model() -> None:
    assert Buckets(25_000, 1000).scaled(0.1) == Buckets(2500, 100)
    assert Buckets(25_000).scaled(1e-9) == Buckets(1)
    assert (DDP_BUCKETS.size, DDP_BUCKETS.first) == (25 * 1024 * 1024, 1024 * 1024)


def test_a_fair_comparison_has_ddp_at_its_best() -> None:
    assert set(USUAL_STRATEGIES) <= set(STRATEGIES)
    assert {"ddp-tuned", "ddp-gloo-tuned"} <= set(USUAL_STRATEGIES)


def test_strategies_are_named_once() -> None:
    assert parse_strategies("dear, ddp") == ["dear", "ddp"]
    for text in ("dear,dear", "horovod", ""):
        with pytest.raises(UsageError, match="dear-sharded"):
            parse_strategies(text)
