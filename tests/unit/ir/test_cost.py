"""Prices: closed forms where they are known, never below the bound, and the bound where it is known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms import ALGORITHMS, prove
from paceline.errors import UsageError
from paceline.ir.bound import exposed_bound
from paceline.ir.cluster import Cluster, Host
from paceline.ir.collective import Collective, Kind
from paceline.ir.cost import cost
from strategies import requests

LATENCY, RATE, SIZE = 1e-3, 1e6, 4e6


def _flat(n: int) -> Cluster:
    return Cluster.uniform(n, Host(RATE, RATE, LATENCY))


def _log(n: int) -> int:
    return (n - 1).bit_length()


CLOSED_FORMS = {
    ("ring", Kind.ALL_REDUCE): lambda n: 2 * (n - 1) * (LATENCY + SIZE / n / RATE),
    ("direct", Kind.ALL_GATHER): lambda n: (n - 1) * (LATENCY + SIZE / n / RATE),
    ("bruck", Kind.ALL_GATHER): lambda n: _log(n) * LATENCY + (n - 1) / n * SIZE / RATE,
    ("pat", Kind.REDUCE_SCATTER): lambda n: _log(n) * LATENCY + (n - 1) / n * SIZE / RATE,
    ("binomial", Kind.BROADCAST): lambda n: _log(n) * (LATENCY + SIZE / RATE),
    ("direct", Kind.BROADCAST): lambda n: (n - 1) * (LATENCY + SIZE / RATE),
    ("pairwise", Kind.ALL_TO_ALL): lambda n: (n - 1) * (LATENCY + SIZE / n / RATE),
    ("dissemination", Kind.BARRIER): lambda n: _log(n) * LATENCY,
    ("one_shot", Kind.ALL_REDUCE): lambda n: (n - 1) * (LATENCY + SIZE / RATE),
    ("multicast", Kind.BROADCAST): lambda n: LATENCY + SIZE / RATE,  # noqa: ARG005
}


@pytest.mark.parametrize(("name", "kind"), CLOSED_FORMS)
def test_closed_forms(name: str, kind: Kind) -> None:
    for n in (2, 3, 5, 8, 13, 16):
        price = cost(prove(name, Collective(kind, n)).schedule, _flat(n), SIZE)
        assert price.total_s == price.exposed_s == pytest.approx(CLOSED_FORMS[name, kind](n)), n


def test_chain_is_a_pipeline() -> None:
    schedule = prove("chain", Collective(Kind.BROADCAST, 6), pieces=10).schedule
    assert cost(schedule, _flat(6), SIZE).total_s == pytest.approx((6 - 2 + 10) * (LATENCY + SIZE / 10 / RATE))


def test_ring_after_a_late_rank_costs_the_whole_ring() -> None:
    late = _flat(8).with_late({3: 100.0})
    price = cost(prove("ring", Collective(Kind.ALL_REDUCE, 8)).schedule, late, SIZE)
    assert price.exposed_s == pytest.approx(2 * 7 * (LATENCY + SIZE / 8 / RATE))
    assert price.total_s == pytest.approx(100 + price.exposed_s)


def test_the_slow_port_of_a_pair_sets_the_speed() -> None:
    fast, slow_up, slow_down = Host(RATE, RATE, 0), Host(RATE / 4, RATE, 0), Host(RATE, RATE / 5, 0)
    send = prove("direct", Collective(Kind.BROADCAST, 2)).schedule
    assert cost(send, Cluster((fast, slow_down), (0, 1)), SIZE).total_s == pytest.approx(5 * SIZE / RATE)
    assert cost(send, Cluster((slow_up, fast), (0, 1)), SIZE).total_s == pytest.approx(4 * SIZE / RATE)
    assert cost(send, Cluster((slow_up, slow_down), (0, 1)), SIZE).total_s == pytest.approx(5 * SIZE / RATE)


def test_ranks_of_a_host_share_its_port() -> None:
    pair = Cluster.uniform(2, Host(RATE, RATE, 0, 1e12, 0), ranks_per_host=2)
    exchange = prove("pairwise", Collective(Kind.ALL_TO_ALL, 4)).schedule
    # two ranks a host, each with half of its buffer for the other host: one buffer crosses each port
    assert cost(exchange, pair, SIZE).total_s == pytest.approx(SIZE / RATE, rel=1e-5)


def test_a_host_alone_uses_its_local_rate() -> None:
    gpu = Cluster.uniform(1, Host(local_bytes_per_s=10 * RATE, local_latency_s=LATENCY), ranks_per_host=4)
    price = cost(prove("ring", Collective(Kind.ALL_REDUCE, 4)).schedule, gpu, SIZE)
    assert price.total_s == pytest.approx(6 * (LATENCY + SIZE / 4 / RATE / 10))


def test_wire_overhead_slows_all_but_local_traffic() -> None:
    fat = Cluster.uniform(2, Host(RATE, RATE, 0), wire_factor=1.25)
    send = prove("direct", Collective(Kind.BROADCAST, 2)).schedule
    assert cost(send, fat, SIZE).total_s == pytest.approx(1.25 * SIZE / RATE)


BOUNDS = {
    Kind.ALL_REDUCE: lambda n: 2 * (n - 1) / n,
    Kind.REDUCE_SCATTER: lambda n: (n - 1) / n,
    Kind.ALL_GATHER: lambda n: (n - 1) / n,
    Kind.BROADCAST: lambda n: 1.0,  # noqa: ARG005
    Kind.REDUCE: lambda n: 1.0,  # noqa: ARG005
    Kind.GATHER: lambda n: (n - 1) / n,
    Kind.SCATTER: lambda n: (n - 1) / n,
    Kind.ALL_TO_ALL: lambda n: (n - 1) / n,
    Kind.BARRIER: lambda n: 0.0,  # noqa: ARG005
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_known_bounds_without_latency(kind: Kind) -> None:
    for n in (2, 3, 8, 16):
        flat = Cluster.uniform(n, Host(RATE, RATE, 0))
        assert exposed_bound(Collective(kind, n), flat, SIZE) == pytest.approx(BOUNDS[kind](n) * SIZE / RATE)


def test_known_bounds_with_late_ranks() -> None:
    n, flat = 8, Cluster.uniform(8, Host(1.0, 1.0, 0))
    all_reduce = Collective(Kind.ALL_REDUCE, n)
    for m in range(1, n):
        together = flat.with_late(dict.fromkeys(range(m), 50.0))
        assert exposed_bound(all_reduce, together, 1.0) == pytest.approx((n + m - 1) / n)
    for delay in (0.0, 0.2, 0.5, 0.8, 2.0):
        bound = exposed_bound(all_reduce, flat.with_late({5: delay}), 1.0)
        assert bound == pytest.approx(max(1.0, (2 - delay) * (n - 1) / n))
    apart = flat.with_late({0: 10.0, 1: 20.0, 2: 30.0})
    assert exposed_bound(all_reduce, apart, 1.0) == pytest.approx(1.0)


def test_bound_of_a_multicast_and_of_slow_uplinks() -> None:
    uplink = Cluster.uniform(8, Host(RATE / 5, RATE, 0))
    gather = Collective(Kind.ALL_GATHER, 8)
    assert exposed_bound(gather, uplink, SIZE) == pytest.approx(7 / 8 * 5 * SIZE / RATE)
    assert exposed_bound(gather, uplink, SIZE, multicast=True) == pytest.approx(7 / 8 * SIZE / RATE)


def test_bound_of_hosts_with_several_ranks() -> None:
    eth = Cluster.uniform(16, Host(RATE, RATE, 0, 1e12, 0), ranks_per_host=4)
    assert exposed_bound(Collective(Kind.ALL_REDUCE, 64), eth, SIZE) == pytest.approx(2 * 15 / 16 * SIZE / RATE)
    assert exposed_bound(Collective(Kind.ALL_TO_ALL, 64), eth, SIZE) == pytest.approx(4 * 60 / 64 * SIZE / RATE)
    late = eth.with_late({0: 1000.0})  # what the others on its host could fetch for it, they have
    assert exposed_bound(Collective(Kind.ALL_REDUCE, 64), late, SIZE) == pytest.approx(SIZE / RATE)


@given(request=requests(most_ranks=12), data=st.data())
@settings(max_examples=300)
def test_no_schedule_beats_the_bound(request: tuple, data: st.DataObject) -> None:
    entry, collective, parameters = request
    n = collective.num_ranks
    rates, latencies = st.floats(1e5, 1e9), st.floats(0, 1e-2)
    hosts = data.draw(st.lists(st.builds(Host, rates, rates, latencies, rates, latencies), min_size=1, max_size=n))
    placement = [i % len(hosts) for i in range(n)]
    late = data.draw(st.lists(st.one_of(st.just(0.0), st.floats(0, 20)), min_size=n, max_size=n))
    cluster = Cluster(tuple(hosts), tuple(data.draw(st.permutations(placement))), tuple(late))
    size = data.draw(st.floats(0, 1e8))
    price = cost(entry(collective, **parameters), cluster, size)
    assert price.exposed_s >= price.bound_s * (1 - 1e-9) - 1e-12
    assert (price.end_s >= price.start_s).all()


@given(request=requests(most_ranks=10))
def test_start_times_respect_arrivals(request: tuple) -> None:
    entry, collective, parameters = request
    n = collective.num_ranks
    cluster = _flat(n).with_late({n - 1: 7.0})
    schedule = entry(collective, **parameters)
    price = cost(schedule, cluster, SIZE)
    for index, row in enumerate(schedule.transfers):
        if n - 1 in (row.source, *row.destinations) and len(row.destinations) == 1:
            assert price.start_s[index] >= 7.0


def test_wrong_sizes_and_clusters() -> None:
    schedule = ALGORITHMS["ring"](Collective(Kind.ALL_REDUCE, 4))
    with pytest.raises(UsageError, match="schedule has 4 ranks and the cluster 5"):
        cost(schedule, _flat(5), 1)
    for size in (-1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="zero or more bytes"):
            cost(schedule, _flat(4), size)
    alone = cost(ALGORITHMS["ring"](Collective(Kind.ALL_REDUCE, 1)), _flat(1), SIZE)
    assert (alone.total_s, alone.bound_s) == (0.0, 0.0)
