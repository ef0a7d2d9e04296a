"""From a collective, a cluster and a size to a proven, priced schedule; parameters not given are chosen by cost.

Numbers in, decision out: nothing here touches a network or a clock, so every rank that asks the same gets the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.algorithms import ALGORITHMS, Algorithm, build, find, prove, serving
from paceline.errors import UnsupportedError, UsageError
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective
from paceline.ir.cost import Cost, cost
from paceline.ir.schedule import Schedule
from paceline.ir.verify import Proof

_MOST_MOVES = 3 << 20
"""A finer cut is not tried when its schedule would move more chunks than this: nobody wants to wait for it."""

_MOST_GREEDY_CHUNKS = 128
"""Nor with more chunks than this where the construction is greedy (``late_ranks``), and therefore slow."""

_MOST_PIECES = 1 << 12
"""Nor with more pieces than this."""

_WORTH_IT = 0.999
"""A finer cut must save at least a thousandth."""


_MULTICAST_WORTH_IT = 0.9
"""A multicast must promise to save a tenth: packets leave 3% of a link to other frames, and losses are sent again."""

_HANDSHAKES = 2
"""Messages of a multicast that its schedule does not show: all say that they may be sent to, and that they have it."""


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
    entry.check(collective, given)
    if collective.num_ranks != cluster.num_ranks:
        raise UsageError(f"the {collective} does not fit the cluster {cluster.name} of {cluster.num_ranks} ranks")
    if entry.multicast and not cluster.multicast:
        raise UnsupportedError(f"the network of {cluster.name} has no multicast (set multicast = true if it has)")
    parameters = _tuned(entry, collective, cluster, size_bytes, given)
    proof = prove(algorithm, collective, **parameters)
    return Plan(algorithm, parameters, cluster, size_bytes, proof, cost(proof.schedule, cluster, size_bytes))


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
    late = cluster.last_arrival_s > 0
    sensible = {
        "late": late,
        "arrivals": late and collective.num_ranks <= _MOST_GREEDY_CHUNKS,
        "hosts": 1 < len(cluster.hosts) < cluster.num_ranks,
    }
    return [
        entry
        for entry in serving(collective)
        if all(sensible.get(name, True) for name in entry.parameters) and (cluster.multicast or not entry.multicast)
    ]


def worth_taking(plans: Sequence[Plan]) -> list[Plan]:
    """These plans, without those that multicast and whose price, handshakes included, is not well below the others'."""
    without = [found.cost.exposed_s for found in plans if not find(found.algorithm).multicast]
    at_most_s = _MULTICAST_WORTH_IT * min(without, default=math.inf)
    return [
        found
        for found in plans
        if not find(found.algorithm).multicast
        or found.cost.exposed_s + _HANDSHAKES * max(host.latency_s for host in found.cluster.hosts) <= at_most_s
    ]


def too_large(collective: Collective) -> list[str]:
    """Algorithms for this kind of collective whose schedule for so many ranks would be too large."""
    wanted = [entry for entry in ALGORITHMS.values() if collective.kind in entry.kinds]
    return [e.name for e in wanted if e.min_ranks <= collective.num_ranks and not e.serves(collective)]


def late_enough_s(collective: Collective, cluster: Cluster, size_bytes: float) -> float:
    """A lateness after which everything that can be done without the late rank is done."""
    return 1.5 * (_message_s(cluster, size_bytes) + 4 * collective.num_ranks * _message_s(cluster, 0))


def _tuned(
    entry: Algorithm, collective: Collective, cluster: Cluster, size_bytes: float, given: Mapping[str, Any]
) -> dict[str, Any]:
    """All parameters: as given, as the cluster says, and the rest by price."""

    def complete(tuned: Mapping[str, int]) -> dict[str, Any]:
        known = {**tuned, **given}
        return {**_from_cluster(entry, collective, cluster, size_bytes, known), **known}

    def price(tuned: Mapping[str, int]) -> tuple[float, int]:
        schedule = build(entry.name, collective, **complete(tuned))
        return cost(schedule, cluster, size_bytes).exposed_s, schedule.num_moves

    tuned: dict[str, int] = {}
    if "pieces" in entry.parameters and "pieces" not in given:
        tuned["pieces"] = 1
    if "chains" in entry.parameters and "chains" not in given:
        sensible = {-(-collective.num_ranks // (1 << step)) for step in range(collective.num_ranks.bit_length())}
        tuned["chains"] = min(sorted(sensible), key=lambda chains: price({**tuned, "chains": chains})[0])
    if "pieces" not in tuned:
        return complete(tuned)
    most = _MOST_GREEDY_CHUNKS // collective.num_ranks if "arrivals" in entry.parameters else _MOST_PIECES
    seconds, moves = price(tuned)
    while 2 * tuned["pieces"] <= most and 2 * moves <= _MOST_MOVES:  # finer for as long as that helps
        finer = {**tuned, "pieces": 2 * tuned["pieces"]}
        finer_seconds, moves = price(finer)
        if finer_seconds >= seconds * _WORTH_IT:
            break
        tuned, seconds = finer, finer_seconds
    return complete(tuned)


def _from_cluster(
    entry: Algorithm,
    collective: Collective,
    cluster: Cluster,
    size_bytes: float,
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """What the cluster says of an algorithm's parameters: who is late, when each arrives, who is on which host."""
    told: dict[str, Any] = {}
    if "late" in entry.parameters:
        told["late"] = max(range(cluster.num_ranks), key=lambda rank: cluster.late_s[rank])
    if "hosts" in entry.parameters:
        told["hosts"] = cluster.host_of
    if "arrivals" in entry.parameters:
        round_s = _message_s(cluster, size_bytes / (known["pieces"] * collective.num_ranks))
        told["arrivals"] = tuple(_rounds(late, round_s) for late in cluster.late_s)
    return told


def _message_s(cluster: Cluster, num_bytes: float) -> float:
    """Time of one message over the slowest port."""
    if len(cluster.hosts) == 1:
        return cluster.hosts[0].local_latency_s + num_bytes / cluster.hosts[0].local_bytes_per_s
    wire_bytes = num_bytes * cluster.wire_factor
    return max(host.latency_s + wire_bytes / min(host.up_bytes_per_s, host.down_bytes_per_s) for host in cluster.hosts)


def _rounds(seconds: float, round_s: float) -> int:
    return math.ceil(min(1 << 20, seconds / round_s) - 1e-9) if round_s > 0 else 0
