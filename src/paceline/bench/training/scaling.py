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
"""What an iteration takes at the bound of every schedule, unless told otherwise."""

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
    """The scale for a cluster; by default the longer of computation and all-reduce takes :data:`ITERATION_S`."""
    if time_factor is None:
        time_factor = ITERATION_S / max(profile.compute_s, profile.gradient_bytes * network_s_per_byte)
    if not time_factor > 0:
        raise UsageError(f"--scale is what times are multiplied by, a positive number, not {time_factor}")
    return Scale(time_factor * network_s_per_byte / lab_s_per_byte(cluster), time_factor)


def bounds_of(profile: Profile, cluster: Cluster) -> Bounds:
    """What no schedule can beat on this cluster, at the limit of its links."""
    halves = [
        limit_s(operation, cluster, profile.gradient_bytes) or 0.0
        for operation in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER)
    ]
    return Bounds.of(profile.layers, *halves)
