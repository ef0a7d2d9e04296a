"""Prices: closed forms where they are known, never below the bound, and the bound where it is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from paceline.algorithms import ALGORITHMS, prove
from paceline.errors import UsageError
from paceline.ir.bound import exposed_bound
from paceline.ir.cluster import Cluster, Host
from paceline.ir.collective import Collective, Kind
from paceline.ir.cost import cost
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfer
from pricer import price
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
    ("multicast", Kind.ALL_GATHER): lambda n: (n if n > 2 else 1) * (LATENCY + SIZE / n / RATE),
}


@pytest.mark.parametrize(("name", "kind"), CLOSED_FORMS)
def test_closed_forms(name: str, kind: Kind) -> None:
    for n in (2, 3, 5, 8, 13, 16):
        found = cost(prove(name, Collective(kind, n)).schedule, _flat(n), SIZE)
        assert found.total_s == found.exposed_s == pytest.approx(CLOSED_FORMS[name, kind](n)), n


def test_all_roots_at_once_take_as_long_as_a_ring() -> None:
    """One chain leaves a port idle while its rank sends; with n chains all ports receive all the time."""
    for n in (2, 3, 8):
        collective = Collective(Kind.ALL_GATHER, n)
        together = prove("multicast", collective, chains=n).schedule
        ring = prove("ring", collective).schedule
        assert cost(together, _flat(n), SIZE).total_s == pytest.approx(cost(ring, _flat(n), SIZE).total_s)


@pytest.mark.parametrize(("n", "times"), [(4, 2.0), (8, 2.0), (8, 5.0), (12, 4.0)])
def test_a_ring_with_holes_keeps_slow_uplinks_busy_all_the_time(n: int, times: float) -> None:
    """One buffer over the uplink, the first sums' way and the last chunks; a ring needs 2(n - 1)/n."""
    pieces = 4 * (n - 1)
    cluster = Cluster.uniform(n, Host(RATE, times * RATE, 0), multicast=True)
    schedule = prove("multicast_ring", Collective(Kind.ALL_REDUCE, n), pieces=pieces).schedule
    last_s = max(1.0, (n - 1) / times) / (n * pieces)
    assert cost(schedule, cluster, SIZE).total_s == pytest.approx((1 + last_s) * SIZE / RATE)


def test_a_multicast_waits_for_the_last_of_its_destinations_and_goes_at_the_pace_of_the_slowest() -> None:
    slow = Host(RATE, RATE / 4, 0)
    cluster = Cluster((Host(RATE, RATE, 0),) * 2 + (slow,), (0, 1, 2), (0.0, 0.0, 3.0))
    schedule = prove("multicast", Collective(Kind.BROADCAST, 3)).schedule
    found = cost(schedule, cluster, SIZE)
    assert found.rank_done_s.tolist() == pytest.approx([3 + 4 * SIZE / RATE] * 3)


def test_a_multicast_crosses_each_port_once_however_many_ranks_are_behind_it() -> None:
    """Four hosts of two ranks: a host receives three quarters of an all-gather, not seven eighths."""
    fast = {"local_bytes_per_s": 1e12, "local_latency_s": 0.0}
    pairs = Cluster.uniform(4, Host(RATE, RATE, 0, **fast), ranks_per_host=2, multicast=True)
    gather = prove("multicast", Collective(Kind.ALL_GATHER, 8), chains=8).schedule
    found = cost(gather, pairs, SIZE)
    assert found.total_s == pytest.approx(3 / 4 * SIZE / RATE, rel=1e-5)
    assert found.bound_s == pytest.approx(3 / 4 * SIZE / RATE)
    spread = prove("multicast", Collective(Kind.BROADCAST, 8)).schedule
    assert cost(spread, pairs, SIZE).total_s == pytest.approx(SIZE / RATE)


def test_ranks_of_a_sending_host_share_its_uplink() -> None:
    """Two hosts of two ranks, slow uplinks: each host's half leaves it once."""
    pairs = Cluster.uniform(2, Host(RATE / 5, RATE, 0, 1e12, 0), ranks_per_host=2, multicast=True)
    gather = prove("multicast", Collective(Kind.ALL_GATHER, 4), chains=4).schedule
    assert cost(gather, pairs, SIZE).total_s == pytest.approx(5 / 2 * SIZE / RATE, rel=1e-5)
    assert cost(gather, pairs, SIZE).ratio == pytest.approx(1.0, rel=1e-5)


def test_chain_is_a_pipeline() -> None:
    schedule = prove("chain", Collective(Kind.BROADCAST, 6), pieces=10).schedule
    assert cost(schedule, _flat(6), SIZE).total_s == pytest.approx((6 - 2 + 10) * (LATENCY + SIZE / 10 / RATE))


def test_ring_after_a_late_rank_costs_the_whole_ring() -> None:
    late = _flat(8).with_late({3: 100.0})
    found = cost(prove("ring", Collective(Kind.ALL_REDUCE, 8)).schedule, late, SIZE)
    assert found.exposed_s == pytest.approx(2 * 7 * (LATENCY + SIZE / 8 / RATE))
    assert found.total_s == pytest.approx(100 + found.exposed_s)


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
    found = cost(prove("ring", Collective(Kind.ALL_REDUCE, 4)).schedule, gpu, SIZE)
    assert found.total_s == pytest.approx(6 * (LATENCY + SIZE / 4 / RATE / 10))


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
    reduce = Collective(Kind.ALL_REDUCE, 8)
    assert exposed_bound(reduce, uplink, SIZE) == pytest.approx(7 / 4 * 5 * SIZE / RATE)
    assert exposed_bound(reduce, uplink, SIZE, multicast=True) == pytest.approx(5 * SIZE / RATE)


def test_bound_of_hosts_with_several_ranks() -> None:
    eth = Cluster.uniform(16, Host(RATE, RATE, 0, 1e12, 0), ranks_per_host=4)
    assert exposed_bound(Collective(Kind.ALL_REDUCE, 64), eth, SIZE) == pytest.approx(2 * 15 / 16 * SIZE / RATE)
    assert exposed_bound(Collective(Kind.ALL_TO_ALL, 64), eth, SIZE) == pytest.approx(4 * 60 / 64 * SIZE / RATE)
    late = eth.with_late({0: 1000.0})  # what the others on its host could fetch for it, they have
    assert exposed_bound(Collective(Kind.ALL_REDUCE, 64), late, SIZE) == pytest.approx(SIZE / RATE)


@st.composite
def _clusters(draw: st.DrawFn, num_ranks: int) -> Cluster:
    """Few different numbers, so that ties, and prices near the bound, are common."""
    rates, latencies = st.sampled_from([1.0, 2.0, 10.0]), st.sampled_from([0.0, 0.0, 0.25, 1.0])
    hosts = draw(st.lists(st.builds(Host, rates, rates, latencies, rates, latencies), min_size=1, max_size=num_ranks))
    host_of = draw(st.permutations([rank % len(hosts) for rank in range(num_ranks)]))
    late = draw(st.lists(st.sampled_from([0, 0, 0, 0.25, 1, 3, 50]), min_size=num_ranks, max_size=num_ranks))
    factor, multicast = draw(st.sampled_from([1.0, 1.25])), draw(st.booleans())
    return Cluster(tuple(hosts), tuple(host_of), tuple(late), wire_factor=factor, multicast=multicast)


@given(request=requests(most_ranks=9), data=st.data(), size=st.sampled_from([0.0, 1.0, 4.0]))
@examples(500)
def test_the_price_is_the_slow_pricers_and_not_below_the_bound(
    request: tuple, data: st.DataObject, size: float
) -> None:
    entry, collective, parameters = request
    cluster = data.draw(_clusters(collective.num_ranks))
    schedule = entry(collective, **parameters)
    fast = cost(schedule, cluster, size)
    assert fast.total_s == pytest.approx(price(schedule, cluster, size))
    assert fast.exposed_s >= fast.bound_s * (1 - 1e-9) - 1e-12
    assert (fast.end_s >= fast.start_s).all()


@given(data=st.data(), n=st.integers(2, 5), chunks=st.integers(1, 3))
@examples(300)
def test_the_price_of_random_tables_is_the_slow_pricers(data: st.DataObject, n: int, chunks: int) -> None:
    """Tables that prove nothing, but read, overwrite and share ports in every way."""
    rows = []
    for _ in range(data.draw(st.integers(1, 10))):
        source = data.draw(st.integers(0, n - 1))
        others = st.sampled_from([rank for rank in range(n) if rank != source])
        to = tuple(data.draw(st.lists(others, min_size=1, max_size=n - 1, unique=True)))
        chunk = data.draw(st.integers(0, chunks - 1))
        count = data.draw(st.integers(1, chunks - chunk))
        rows.append(Transfer(data.draw(st.integers(0, 3)), source, to, chunk, count, True))
    schedule = Schedule.from_rows(Collective(Kind.ALL_REDUCE, n), chunks, sorted(rows, key=lambda row: row.step))
    cluster = data.draw(_clusters(n))
    assert cost(schedule, cluster, 6.0).total_s == pytest.approx(price(schedule, cluster, 6.0))


def test_whole_numbers_of_seconds_are_as_good_as_fractions() -> None:
    schedule = prove("ring", Collective(Kind.ALL_REDUCE, 4)).schedule
    whole, fraction = (Cluster((Host(RATE, RATE, LATENCY),) * 4, (0, 1, 2, 3), (0, 0, 0, late)) for late in (2, 2.0))
    assert cost(schedule, whole, 1e5).exposed_s == cost(schedule, fraction, 1e5).exposed_s > 0.1


def test_the_bound_counts_a_rank_that_came_a_moment_ago_as_hardly_merged() -> None:
    """Two ranks late, the second 0.25 buffer times after the first: half of the first is still untouched."""
    n, flat = 8, Cluster.uniform(8, Host(1.0, 1.0, 0))
    bound = exposed_bound(Collective(Kind.ALL_REDUCE, n), flat.with_late({0: 10.0, 1: 10.25}), 1.0)
    assert bound == pytest.approx((2 * (n - 1) - (n - 2 - 0.5)) / n)


def test_the_start_up_bound() -> None:
    flat = Cluster.uniform(8, Host(1e9, 1e9, 1.0))
    late, cast = flat.with_late({7: 100.0}), Cluster.uniform(8, Host(1e9, 1e9, 1.0), multicast=True)
    expected = {
        Kind.ALL_REDUCE: (3, 3, 3),
        Kind.BARRIER: (3, 3, 3),
        Kind.ALL_GATHER: (3, 3, 3),
        Kind.REDUCE: (3, 1, 3),
        Kind.BROADCAST: (3, 1, 1),
        Kind.GATHER: (1, 1, 1),
    }
    for kind, messages in expected.items():
        bounds = [exposed_bound(Collective(kind, 8), c, 0, multicast=c.multicast) for c in (flat, late, cast)]
        assert bounds == pytest.approx(messages), kind


@given(request=requests(most_ranks=10))
def test_start_times_respect_arrivals(request: tuple) -> None:
    entry, collective, parameters = request
    n = collective.num_ranks
    cluster = _flat(n).with_late({n - 1: 7.0})
    schedule = entry(collective, **parameters)
    found = cost(schedule, cluster, SIZE)
    for index, row in enumerate(schedule.transfers):
        if n - 1 in (row.source, *row.destinations) and len(row.destinations) == 1:
            assert found.start_s[index] >= 7.0


def test_wrong_sizes_and_clusters() -> None:
    schedule = ALGORITHMS["ring"](Collective(Kind.ALL_REDUCE, 4))
    with pytest.raises(UsageError, match="schedule has 4 ranks and the cluster 5"):
        cost(schedule, _flat(5), 1)
    for size in (-1, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="zero or more bytes"):
            cost(schedule, _flat(4), size)
    alone = cost(ALGORITHMS["ring"](Collective(Kind.ALL_REDUCE, 1)), _flat(1), SIZE)
    assert (alone.total_s, alone.bound_s) == (0.0, 0.0)
