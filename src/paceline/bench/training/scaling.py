"""Fits a profile to the rate of a lab: sizes down, times up, the ratio of communication to computation kept. Pure.

With sizes multiplied by ``size_factor`` and times by ``time_factor``, an all-reduce on the lab takes
``size_factor * bytes * lab_s_per_byte``, and that is to be ``time_factor`` times what it takes on the network replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.bench.figures import Operation, limit_s
from paceline.bench.training.bounds import Bounds
from paceline.bench.training.profile import Profile
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster

ITERATION_S = 1.0
"""What an iteration at the bound takes, unless told otherwise."""

_MANY_BYTES = 1 << 30


@dataclass(frozen=True)
class Scale:
    """What gradients and times are multiplied by."""

    size_factor: float
    time_factor: float

    def apply(self, profile: Profile) -> Profile:
        """The profile in the lab; a tensor keeps at least one element."""
        layers = tuple(
            replace(
                layer,
                sizes=tuple(max(1, round(size * self.size_factor)) for size in layer.sizes),
                forward_s=layer.forward_s * self.time_factor,
                backward_s=layer.backward_s * self.time_factor,
            )
            for layer in profile.layers
        )
        return replace(profile, layers=layers)


def lab_s_per_byte(cluster: Cluster) -> float:
    """What a byte of an all-reduce takes at the limit of the links."""
    limit = limit_s(Operation.ALL_REDUCE, cluster, _MANY_BYTES)
    assert limit is not None
    return limit / _MANY_BYTES


def fit(profile: Profile, network_s_per_byte: float, cluster: Cluster, time_factor: float | None = None) -> Scale:
    """The scale for a cluster; by default an iteration at DeAR's bound takes about :data:`ITERATION_S`."""
    if time_factor is None:
        half_s = profile.gradient_bytes * network_s_per_byte / 2
        time_factor = ITERATION_S / Bounds(profile.forward_s, profile.backward_s, half_s, half_s).dear_s
    if not time_factor > 0:
        raise UsageError(f"--scale is what times are multiplied by, a positive number, not {time_factor}")
    return Scale(time_factor * network_s_per_byte / lab_s_per_byte(cluster), time_factor)


def bounds_of(profile: Profile, cluster: Cluster) -> Bounds:
    """What no schedule can beat on this cluster, at the limit of its links."""
    halves = [
        limit_s(operation, cluster, profile.gradient_bytes) or 0.0
        for operation in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER)
    ]
    return Bounds(profile.forward_s, profile.backward_s, *halves)


def layered_s(profile: Profile, bounds: Bounds) -> float:
    """DeAR's bound with these layers, however they are cut into buckets: what is ready last and needed first shows."""
    sent_s, gathered_s = (half_s / profile.num_elements for half_s in (bounds.reduce_scatter_s, bounds.all_gather_s))
    computed_s = link_s = 0.0
    for layer in reversed(profile.layers):
        computed_s += layer.backward_s
        link_s = max(link_s, computed_s) + sum(layer.sizes) * sent_s
    computed_s = link_s = max(computed_s, link_s)
    for layer in profile.layers:
        link_s += sum(layer.sizes) * gathered_s
        computed_s = max(computed_s, link_s) + layer.forward_s
    return computed_s
