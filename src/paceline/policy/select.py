"""Which algorithm runs a collective: numbers in, decision out, the same on every rank that has the same numbers.

The choice is by price on a cluster that the caller describes (what was measured, or given). It is made once for each
collective and power of two of its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from paceline.algorithms import find, serving
from paceline.errors import UsageError
from paceline.ir.cluster import ETHERNET_WIRE_FACTOR, LOCAL_LATENCY_S, LOCAL_RATE_BYTES_PER_S, Cluster, Host
from paceline.ir.collective import Collective, Kind
from paceline.policy.planning import Plan, plan, worth_comparing, worth_taking

NOMINAL_RATE_BYTES_PER_S = 1.25e9
NOMINAL_LATENCY_S = 30e-6
"""Between hosts, where nothing was measured or given: 10 Gbit/s Ethernet."""

_CLOSE = 1.02
"""Prices this close are equal: the model does not know better, and the simpler algorithm is taken."""

_ONLY_IF_NAMED = frozenset({"multicast_ring", "stragglar_multicast"})
"""These multicast beside streams over the same uplink, which their prices do not count: measured, the first is slow."""

_SIMPLE_FIRST = ("ring", "direct", "doubling", "chain", "binomial", "dissemination", "pairwise")
"""Between hosts, one that never sends to many at once."""

_FEW_PARTNERS_FIRST = (
    "halving_doubling",
    "direct",
    "doubling",
    "ring",
    "chain",
    "binomial",
    "dissemination",
    "pairwise",
)
"""On one host: what comes from many at once is copied until it is its turn to be added."""


def select(
    collective: Collective,
    cluster: Cluster,
    size_bytes: float,
    *,
    exact: bool = False,
    wanted: Mapping[Kind | None, str] | None = None,
) -> Plan:
    """The plan to run: the wanted algorithm, or the one with the lowest price.

    ``exact`` says that the order of additions is free: whole numbers, minima, copies. Where it is not, an algorithm
    whose ranks add in different orders is left out, since all ranks must end with the same bits. A multicast that is
    wanted where the cluster has none gives way to the lowest price, too.

    >>> select(Collective(Kind.ALL_REDUCE, 8), Cluster.preset("lan8"), 64e6).algorithm
    """
    name = _wanted(collective, wanted or {})
    if name is not None and (cluster.multicast or not find(named(name)[0]).multicast):
        bare, given = named(name)
        return plan(collective, cluster, size_bytes, bare, **given)
    return _cheapest(collective, cluster, size_bytes, exact)


@lru_cache(maxsize=64)  # later groups of the same hosts ask the same
def _cheapest(collective: Collective, cluster: Cluster, size_bytes: float, exact: bool) -> Plan:
    """Of all that serve, the one with the lowest price, or a simpler one that costs as much.

    Multicast is taken only where that saves more than the model can be wrong by.
    """
    entries = [entry.name for entry in worth_comparing(collective, cluster) if entry.name not in _ONLY_IF_NAMED]
    if not exact and collective.num_ranks > 2:
        entries = [entry for entry in entries if entry not in _ORDER_DIFFERS]
    plans = worth_taking([plan(collective, cluster, size_bytes, entry) for entry in entries])
    if not plans:
        raise UsageError(f"no algorithm serves {collective}")
    best_s = min(found.cost.exposed_s for found in plans)
    close = [found for found in plans if found.cost.exposed_s <= best_s * _CLOSE]
    order = _SIMPLE_FIRST if len(cluster.hosts) > 1 else _FEW_PARTNERS_FIRST
    return min(close, key=lambda found: _simplicity(found, order))


_ORDER_DIFFERS = frozenset({"one_shot"})
"""Each rank adds the others' inputs to its own, in its own order."""


def named(text: str) -> tuple[str, dict[str, int]]:
    """A name as users write it: ``stragglar``, or ``stragglar/4`` to have it cut in 4 pieces."""
    name, slash, pieces = text.partition("/")
    if not slash:
        return name, {}
    if not pieces.isdecimal() or int(pieces) < 1:
        raise UsageError(f"an algorithm is written NAME or NAME/PIECES, like stragglar/4, not {text!r}")
    return name, {"pieces": int(pieces)}


def _simplicity(found: Plan, order: tuple[str, ...]) -> tuple[int, float]:
    place = order.index(found.algorithm) if found.algorithm in order else len(order)
    return place, found.cost.exposed_s


def _wanted(collective: Collective, wanted: Mapping[Kind | None, str]) -> str | None:
    """What somebody asked for. A name for all collectives counts for those it can serve."""
    name = wanted.get(collective.kind)
    if name is not None:
        bare, given = named(name)
        find(bare).check(collective, given)
        return name
    name = wanted.get(None)
    if name is not None and find(named(name)[0]) in serving(collective):
        return name
    return None


def cluster_of(
    hosts: Sequence[str],
    *,
    rate_bytes_per_s: float | Sequence[float] | None = None,
    down_bytes_per_s: Sequence[float] = (),
    latency_s: float | None = None,
) -> Cluster:
    """The cluster of a group, from the host of each rank and what its links can do (by default, 10 Gbit/s Ethernet).

    A rate is one for all, or one a rank, the same for ranks of one host. What hosts can receive is the same, unless it
    is given, for each rank.
    """
    names = list(dict.fromkeys(hosts))
    plain = Host(local_bytes_per_s=LOCAL_RATE_BYTES_PER_S, local_latency_s=LOCAL_LATENCY_S)
    latency_s = NOMINAL_LATENCY_S if latency_s is None else latency_s
    if rate_bytes_per_s is None:
        rate_bytes_per_s = NOMINAL_RATE_BYTES_PER_S
    if isinstance(rate_bytes_per_s, (int, float)):
        rate_bytes_per_s = [rate_bytes_per_s] * len(hosts)
    rates = [rate_bytes_per_s[hosts.index(name)] for name in names]
    down_rates = [down_bytes_per_s[hosts.index(name)] for name in names] if down_bytes_per_s else rates
    machines = [
        replace(plain, up_bytes_per_s=up, down_bytes_per_s=down, latency_s=latency_s)
        for up, down in zip(rates, down_rates, strict=True)
    ]
    host_of = tuple(names.index(host) for host in hosts)
    return Cluster(tuple(machines), host_of, name="group", wire_factor=ETHERNET_WIRE_FACTOR)
