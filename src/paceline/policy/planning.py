"""From a collective, a cluster and a size to a proven, priced schedule; parameters not given are chosen by cost.

Numbers in, decision out: nothing here touches a network or a clock, so every rank that asks the same gets the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.algorithms import Algorithm, find, prove, serving
from paceline.errors import UnsupportedError, UsageError
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective
from paceline.ir.cost import Cost, cost
from paceline.ir.schedule import Schedule
from paceline.ir.verify import Proof

_MOST_MOVES = 3 << 20
"""A finer cut is not tried when its schedule would move more chunks than this: nobody wants to wait for it."""

_MOST_LATE_RANKS_CHUNKS = 128
"""Likewise for ``late_ranks``, whose greedy construction is slower than the others."""

_WORTH_IT = 0.999
"""A finer cut must save at least a thousandth."""


@dataclass(frozen=True, eq=False)
class Plan:
    """An algorithm with all its parameters, its proven schedule, and what that costs on the cluster."""

    algorithm: str
    parameters: Mapping[str, Any]
    cluster: Cluster
    size_bytes: float
    proof: Proof
    cost: Cost

    @property
    def schedule(self) -> Schedule:
        """The proven schedule."""
        return self.proof.schedule


def plan(collective: Collective, cluster: Cluster, size_bytes: float, algorithm: str, **given: Any) -> Plan:
    """The algorithm's best schedule for this cluster and size, with the given parameters as they are given.

    >>> plan(Collective(Kind.ALL_REDUCE, 8), Cluster.preset("lan8").with_late({3: 0.5}), 64e6, "stragglar").cost.ratio
    """
    entry = find(algorithm)
    if collective.num_ranks != cluster.num_ranks:
        raise UsageError(f"the {collective} does not fit the cluster {cluster.name} of {cluster.num_ranks} ranks")
    if entry.name == "multicast" and not cluster.multicast:
        raise UnsupportedError(f"the network of {cluster.name} has no multicast (set multicast = true if it has)")
    best: tuple[float, dict[str, Any]] | None = None
    for parameters, seconds in _candidates(entry, collective, cluster, size_bytes, given):
        if best is None or seconds < best[0] * _WORTH_IT:
            best = seconds, parameters
    assert best is not None
    proof = prove(algorithm, collective, **best[1])
    return Plan(algorithm, best[1], cluster, size_bytes, proof, cost(proof.schedule, cluster, size_bytes))


def compare(
    collective: Collective,
    cluster: Cluster,
    size_bytes: float,
    *,
    seen: Callable[[str], None] | None = None,
) -> list[Plan]:
    """A plan for every algorithm that can serve, the fastest first. ``seen`` is told each name when it is done."""
    plans = []
    for entry in worth_comparing(collective, cluster):
        plans.append(plan(collective, cluster, size_bytes, entry.name))
        if seen is not None:
            seen(entry.name)
    return sorted(plans, key=lambda p: (p.cost.exposed_s, p.proof.num_messages))


def worth_comparing(collective: Collective, cluster: Cluster) -> list[Algorithm]:
    """Algorithms that serve the collective and make sense here."""

    def sensible(entry: Algorithm) -> bool:
        if entry.name == "multicast":
            return cluster.multicast
        if entry.name == "late_ranks":
            return cluster.last_arrival_s > 0 and collective.num_ranks <= _MOST_LATE_RANKS_CHUNKS
        if entry.name == "stragglar":
            return cluster.last_arrival_s > 0
        if entry.name == "hierarchical":
            return 1 < len(cluster.hosts) < cluster.num_ranks
        return True

    return [entry for entry in serving(collective) if sensible(entry)]


def late_enough_s(collective: Collective, cluster: Cluster, size_bytes: float) -> float:
    """A lateness after which everything that can be done without the late rank is done."""
    slowest = min(min(host.up_bytes_per_s, host.down_bytes_per_s) for host in cluster.hosts)
    latency = max(host.latency_s for host in cluster.hosts)
    if len(cluster.hosts) == 1:
        slowest, latency = cluster.hosts[0].local_bytes_per_s, cluster.hosts[0].local_latency_s
    return 1.5 * (size_bytes * cluster.wire_factor / slowest + 4 * collective.num_ranks * latency)


def _candidates(
    entry: Algorithm, collective: Collective, cluster: Cluster, size_bytes: float, given: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], float]]:
    """Settings to choose from, with their prices: pieces and chains are doubled as long as that helps."""
    free: list[str] = [name for name in ("chains", "pieces") if name in entry.parameters and name not in given]
    fixed = {name: value for name, value in given.items() if value is not None}

    def price(tuned: Mapping[str, int]) -> tuple[dict[str, Any], float, int]:
        parameters = {**_from_cluster(entry, collective, cluster, size_bytes, tuned, fixed), **tuned, **fixed}
        frozen = tuple(sorted((key, tuple(v) if isinstance(v, list) else v) for key, v in parameters.items()))
        schedule = _build(entry, collective, frozen)
        return parameters, cost(schedule, cluster, size_bytes).exposed_s, schedule.num_moves

    def most(name: str) -> int:
        if name == "chains":
            return collective.num_ranks
        return max(1, _MOST_LATE_RANKS_CHUNKS // collective.num_ranks) if entry.name == "late_ranks" else 1 << 12

    tuned = dict.fromkeys(free, 1)
    parameters, seconds, moves = price(tuned)
    yield parameters, seconds
    for name in free:
        best, value = seconds, 2
        while value <= most(name) and 2 * moves <= _MOST_MOVES:
            parameters, seconds, moves = price({**tuned, name: value})
            yield parameters, seconds
            if seconds >= best * _WORTH_IT:
                break
            best, tuned[name] = seconds, value
            value *= 2
        seconds = best


@lru_cache(maxsize=256)
def _build(entry: Algorithm, collective: Collective, parameters: tuple[tuple[str, Any], ...]) -> Schedule:
    return entry(collective, **dict(parameters))


def _from_cluster(
    entry: Algorithm,
    collective: Collective,
    cluster: Cluster,
    size_bytes: float,
    tuned: Mapping[str, int],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """What the cluster says of an algorithm's parameters: who is late, when each arrives, who is on which host."""
    known: dict[str, Any] = {}
    if "late" in entry.parameters:
        known["late"] = max(range(cluster.num_ranks), key=lambda rank: cluster.late_s[rank])
    if "hosts" in entry.parameters:
        known["hosts"] = cluster.host_of
    if "arrivals" in entry.parameters:
        pieces = given.get("pieces", tuned.get("pieces", 1))
        round_s = _round_s(cluster, size_bytes / (pieces * collective.num_ranks))
        known["arrivals"] = tuple(_rounds(late, round_s) for late in cluster.late_s)
    return known


def _round_s(cluster: Cluster, chunk_bytes: float) -> float:
    """Time of one message of one chunk over the slowest port."""
    inside = len(cluster.hosts) == 1
    return max(
        (host.local_latency_s + chunk_bytes / host.local_bytes_per_s)
        if inside
        else (host.latency_s + chunk_bytes * cluster.wire_factor / min(host.up_bytes_per_s, host.down_bytes_per_s))
        for host in cluster.hosts
    )


def _rounds(seconds: float, round_s: float) -> int:
    return min(1 << 20, math.ceil(seconds / round_s - 1e-9)) if round_s > 0 else 0
