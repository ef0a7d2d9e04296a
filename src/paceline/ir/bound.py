"""The least time a collective can take on a cluster, whatever the schedule.

Three arguments, each true of every schedule without coding (a message carries one partial sum a chunk):

- **own port**: a node (a host; or a rank, inside one host) sends at least ``out`` and receives at least ``into``
  bytes, and cannot start before it arrives;
- **all ports together**: a chunk with c contributing and d needing nodes takes at least c - 1 merges and d - 1
  spreads, and n ports carry them. For an all-reduce with late ranks, what the ranks already there can have
  merged before the last arrival is taken off: at most (present - 1) merges a chunk, no faster than their ports,
  and a rank that came only a moment ago is hardly merged (half sent, half received, at best);
- **start-up**: what a rank knows of others' inputs at most doubles with a message it receives, and the number of those
  who know of an input at most doubles with a message (but a multicast reaches all): ceil(log2 n) in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.ir.cluster import Cluster, FloatArray
from paceline.ir.collective import REDUCING, Collective, Kind

_EVERYONE_TO_EVERYONE = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.BARRIER)


@dataclass(frozen=True)
class _Nodes:
    """Ports that must carry the traffic: hosts with their network ports, or ranks with their fastest one."""

    weight: FloatArray  # share of the ranks that live on the node
    up: FloatArray
    down: FloatArray
    first_arrival: FloatArray
    last_arrival: FloatArray
    holds_root: npt.NDArray[Any]


def exposed_bound(collective: Collective, cluster: Cluster, size_bytes: float, *, multicast: bool = False) -> float:
    """Seconds after the last arrival that any schedule needs; with ``multicast``, one send reaches all."""
    if cluster.num_ranks == 1:
        return 0.0
    last = cluster.last_arrival_s
    bounds = [0.0, _startup(collective, cluster, multicast=multicast)]
    for nodes in (_host_nodes(cluster, collective.root), _rank_nodes(cluster, collective.root)):
        if len(nodes.weight) > 1 and collective.kind is not Kind.BARRIER:
            bounds.append(_own_port(collective, nodes, size_bytes) - last)
            bounds.append(_all_ports(collective, nodes, size_bytes, multicast=multicast))
    return float(max(bounds))


def together_bound(
    collectives: Sequence[Collective], cluster: Cluster, size_bytes: float, *, multicast: bool = False
) -> float:
    """Seconds that collectives need which all ranks begin at the same time, whatever the schedules: of bytes alone.

    Each has a buffer of so many bytes. What several of them must send or receive over one port adds up.
    """
    if len(cluster.hosts) == 1:
        return 0.0
    nodes = _host_nodes(cluster, 0)
    traffic = [_own_traffic(one, _host_nodes(cluster, one.root)) for one in collectives]
    counts = [_messages(one.kind, len(nodes.weight), multicast=multicast) for one in collectives]
    sent_s = np.sum([out for out, _ in traffic], axis=0) / nodes.up
    received_s = np.sum([into for _, into in traffic], axis=0) / nodes.down
    all_sent_s = sum(sends for sends, _ in counts) / nodes.up.sum()
    all_received_s = sum(receives for _, receives in counts) / nodes.down.sum()
    return size_bytes * float(max(sent_s.max(), received_s.max(), all_sent_s, all_received_s))


def _host_nodes(cluster: Cluster, root: int) -> _Nodes:
    facts, num_hosts = cluster.arrays, len(cluster.hosts)
    _, first_rank = np.unique(facts.host, return_index=True)
    latest, earliest = np.zeros(num_hosts), np.full(num_hosts, np.inf)
    np.maximum.at(latest, facts.host, facts.arrival)
    np.minimum.at(earliest, facts.host, facts.arrival)
    return _Nodes(
        weight=np.bincount(facts.host) / cluster.num_ranks,
        up=facts.up[first_rank],
        down=facts.down[first_rank],
        first_arrival=earliest,
        last_arrival=latest,
        holds_root=np.arange(num_hosts) == facts.host[root],
    )


def _rank_nodes(cluster: Cluster, root: int) -> _Nodes:
    """A rank's own port: inside a host it moves at the local rate, across at most at the host's."""
    facts, ranks = cluster.arrays, cluster.num_ranks
    shares_host = np.bincount(facts.host)[facts.host] > 1
    outside = len(cluster.hosts) > 1
    rates = [
        np.maximum(np.where(shares_host, facts.local_rate, 0.0), rate if outside else 0.0)
        for rate in (facts.up, facts.down)
    ]
    return _Nodes(
        weight=np.full(ranks, 1 / ranks),
        up=rates[0],
        down=rates[1],
        first_arrival=facts.arrival,
        last_arrival=facts.arrival,
        holds_root=np.arange(ranks) == root,
    )


def _own_traffic(collective: Collective, nodes: _Nodes) -> tuple[FloatArray, FloatArray]:
    """What each node must send and receive, in buffers."""
    everything, own, rest = np.ones_like(nodes.weight), nodes.weight, 1 - nodes.weight
    root, others = nodes.holds_root.astype(float), (~nodes.holds_root).astype(float)
    traffic: tuple[FloatArray, FloatArray] = {
        Kind.ALL_REDUCE: (everything, everything),
        Kind.REDUCE_SCATTER: (rest, own),
        Kind.ALL_GATHER: (own, rest),
        Kind.BROADCAST: (root, others),
        Kind.REDUCE: (others, root),
        Kind.GATHER: (own * others, rest * root),
        Kind.SCATTER: (rest * root, own * others),
        Kind.ALL_TO_ALL: (own * rest * collective.num_ranks, own * rest * collective.num_ranks),
    }[collective.kind]
    return traffic


def _own_port(collective: Collective, nodes: _Nodes, size_bytes: float) -> float:
    """Latest moment at which some node can be done with its own unavoidable traffic."""
    out, into = _own_traffic(collective, nodes)
    # The last rank of a node adds its part to whatever the node sends to be reduced. All else may have begun
    # when the first one came.
    may_send = nodes.last_arrival if collective.kind in REDUCING else nodes.first_arrival
    sent = may_send + out * size_bytes / nodes.up
    received = nodes.first_arrival + into * size_bytes / nodes.down
    return float(np.maximum(sent, received).max())


def _all_ports(collective: Collective, nodes: _Nodes, size_bytes: float, *, multicast: bool) -> float:
    """All unavoidable messages, spread evenly over all ports, from the last arrival on."""
    sends, receives = _messages(collective.kind, len(nodes.weight), multicast=multicast)
    before = 0.0
    if collective.kind is Kind.ALL_REDUCE:
        before = _merged_before_last_arrival(nodes, size_bytes)
    elif nodes.first_arrival.min() < nodes.last_arrival.max():
        return 0.0  # how much of the rest could be done before is not bounded here
    return size_bytes * max((sends - before) / float(nodes.up.sum()), (receives - before) / float(nodes.down.sum()))


def _messages(kind: Kind, n: int, *, multicast: bool) -> tuple[int, int]:
    """Messages that n nodes must send and receive of each chunk: partial sums merged, results spread."""
    merges = n - 1 if kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.REDUCE) else 0
    spreads = n - 1 if kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.BROADCAST) else 0
    return merges + (min(spreads, 1) if multicast else spreads), merges + spreads


def _merged_before_last_arrival(nodes: _Nodes, size_bytes: float) -> float:
    """Most merges a chunk that the nodes present can have done when the last one arrives."""
    order = np.argsort(nodes.first_arrival, kind="stable")
    arrival = nodes.first_arrival[order]
    if size_bytes < 1 or arrival[-1] < nodes.last_arrival.max():
        return len(order) - 1.0  # nothing to merge; or the last rank shares a node with one that was there before
    buffers_per_s = np.maximum(nodes.up, nodes.down)[order] / size_bytes
    founders = int((arrival == arrival[0]).sum())
    merged = 0.0
    for present in range(founders, len(order)):
        elapsed = arrival[present] - arrival[founders:present]
        untouched = np.maximum(0.0, 1 - 2 * elapsed * buffers_per_s[founders:present]).sum()
        by_rate = merged + buffers_per_s[:present].sum() * (arrival[present] - arrival[present - 1])
        merged = max(merged, float(min(present - 1 - untouched, by_rate)))
    return merged


def _startup(collective: Collective, cluster: Cluster, *, multicast: bool) -> float:
    """Messages that must follow one another, at the smallest latency of the cluster."""
    facts = cluster.arrays
    latencies = []
    if len(cluster.hosts) > 1:
        latencies.append(float(facts.latency.min()))
    if len(cluster.hosts) < cluster.num_ranks:
        latencies.append(float(facts.local_latency.min()))
    nobody_late = cluster.last_arrival_s == 0
    if collective.kind in _EVERYONE_TO_EVERYONE:
        doubling = nobody_late or not multicast
    else:
        doubling = nobody_late and (
            collective.kind is Kind.REDUCE or (collective.kind is Kind.BROADCAST and not multicast)
        )
    return min(latencies) * ((cluster.num_ranks - 1).bit_length() if doubling else 1)
