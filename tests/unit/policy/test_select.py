from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from paceline.errors import UnsupportedError, UsageError
from paceline.ir.cluster import Cluster
from paceline.ir.collective import ROOTED, Collective, Kind
from paceline.policy.planning import compare
from paceline.policy.select import cluster_of, select

LAN = Cluster.preset("lan8")
UPLINK = Cluster.preset("uplink8")


@examples(30)
@given(st.sampled_from(list(Kind)), st.integers(2, 9), st.integers(0, 28), st.data())
def test_what_is_selected_serves_and_is_close_to_the_best(
    kind: Kind, ranks: int, power: int, data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, ranks - 1)) if kind in ROOTED else 0
    collective = Collective(kind, ranks, root)
    cluster = cluster_of([f"host{rank}" for rank in range(ranks)], rate_bytes_per_s=62.5e6, latency_s=100e-6)
    chosen = select(collective, cluster, 2**power, exact=True)
    assert chosen.schedule.collective == collective
    assert chosen.cost.exposed_s <= 1.02 * compare(collective, cluster, 2**power)[0].cost.exposed_s


def test_small_ones_take_few_steps_and_large_ones_few_bytes() -> None:
    collective = Collective(Kind.ALL_REDUCE, 8)
    small, large = select(collective, LAN, 1000), select(collective, LAN, 64e6)
    assert small.schedule.num_steps < large.schedule.num_steps
    assert large.cost.ratio < 1.02


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_sums_of_floats_are_never_added_in_different_orders(ranks: int) -> None:
    cluster = cluster_of(["a"] * ranks)
    for power in range(2, 26):
        assert select(Collective(Kind.ALL_REDUCE, ranks), cluster, 2**power).algorithm != "one_shot"


def test_on_one_host_partners_are_few() -> None:
    cluster = cluster_of(["a"] * 4)
    chosen = {power: select(Collective(Kind.ALL_REDUCE, 4), cluster, 2**power).algorithm for power in (12, 20, 26)}
    assert chosen == {12: "doubling", 20: "halving_doubling", 26: "halving_doubling"}


def test_what_is_wanted_is_taken() -> None:
    collective = Collective(Kind.ALL_REDUCE, 8)
    assert select(collective, LAN, 1000, wanted={Kind.ALL_REDUCE: "ring"}).algorithm == "ring"
    assert select(collective, LAN, 1000, wanted={None: "ring"}).algorithm == "ring"
    by_kind = {None: "ring", Kind.ALL_REDUCE: "direct"}
    assert select(collective, LAN, 1000, wanted=by_kind).algorithm == "direct"


def test_a_name_for_all_counts_where_it_can() -> None:
    assert select(Collective(Kind.BARRIER, 8), LAN, 1, wanted={None: "ring"}).algorithm == "doubling"


def test_a_barrier_takes_no_step_more_than_it_must() -> None:
    for n in range(2, 20):
        found = select(Collective(Kind.BARRIER, n), Cluster.uniform(n), 1)
        assert found.schedule.num_steps == (n - 1).bit_length(), n
        assert found.algorithm == ("dissemination" if n & (n - 1) else "doubling"), n


def test_a_wanted_algorithm_that_cannot_serve_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="dissemination is an algorithm for barrier"):
        select(Collective(Kind.ALL_REDUCE, 8), LAN, 1000, wanted={Kind.ALL_REDUCE: "dissemination"})
    with pytest.raises(UsageError, match="there is no algorithm 'rnig'"):
        select(Collective(Kind.ALL_REDUCE, 8), LAN, 1000, wanted={None: "rnig"})


def test_ranks_are_put_on_their_hosts() -> None:
    cluster = cluster_of(["b", "a", "b"], rate_bytes_per_s=[2e6, 1e6, 2e6], latency_s=1e-3)
    assert cluster.host_of == (0, 1, 0)
    assert [host.up_bytes_per_s for host in cluster.hosts] == [2e6, 1e6]
    assert cluster.hosts[0].latency_s == 1e-3


def test_what_a_host_receives_may_differ_from_what_it_sends() -> None:
    cluster = cluster_of(["b", "a", "b"], rate_bytes_per_s=[2e6, 1e6, 2e6], down_bytes_per_s=[8e6, 9e6, 8e6])
    assert [(host.up_bytes_per_s, host.down_bytes_per_s) for host in cluster.hosts] == [(2e6, 8e6), (1e6, 9e6)]


def test_pieces_are_named_with_the_algorithm() -> None:
    collective = Collective(Kind.ALL_REDUCE, 8)
    chosen = select(collective, LAN, 64e6, wanted={Kind.ALL_REDUCE: "stragglar/3"})
    assert (chosen.algorithm, chosen.parameters["pieces"]) == ("stragglar", 3)
    assert select(collective, LAN, 64e6, wanted={None: "stragglar/3"}).schedule.num_chunks == 21
    for text in ("stragglar/", "stragglar/0", "stragglar/x"):
        with pytest.raises(UsageError, match="NAME or NAME/PIECES, like stragglar/4"):
            select(collective, LAN, 64e6, wanted={Kind.ALL_REDUCE: text})
    with pytest.raises(UsageError, match="doubling has no parameter 'pieces'"):
        select(collective, LAN, 64e6, wanted={Kind.ALL_REDUCE: "doubling/2"})


@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_REDUCE])
def test_multicast_is_taken_where_uplinks_are_slow(kind: Kind) -> None:
    for size in (1e6, 64e6):
        assert select(Collective(kind, 8), UPLINK, size).algorithm == "multicast"


@pytest.mark.parametrize("name", ["lan8", "lan4", "lan4x2", "lan2x4"])
@pytest.mark.parametrize("kind", [Kind.ALL_GATHER, Kind.ALL_REDUCE])
def test_multicast_is_not_taken_where_it_gains_no_time(kind: Kind, name: str) -> None:
    cluster = Cluster.preset(name)
    for power in range(8, 28, 2):
        chosen = select(Collective(kind, cluster.num_ranks), cluster, 2**power)
        assert chosen.schedule.transfers.unicast, 2**power


@pytest.mark.parametrize("name", ["multicast_ring", "stragglar_multicast"])
def test_what_was_not_measured_runs_where_it_is_asked_for(name: str) -> None:
    collective = Collective(Kind.ALL_REDUCE, 8)
    half = replace(UPLINK, hosts=tuple(replace(host, up_bytes_per_s=31.25e6) for host in UPLINK.hosts))
    assert compare(collective, half, 64e6)[0].algorithm == "multicast_ring"
    assert select(collective, half, 64e6).algorithm == "multicast"
    assert select(collective, half, 64e6, wanted={Kind.ALL_REDUCE: name}).algorithm == name


def test_a_broadcast_is_multicast_where_a_chain_takes_long_to_fill() -> None:
    assert select(Collective(Kind.BROADCAST, 8), LAN, 64e3).algorithm == "multicast"
    assert select(Collective(Kind.BROADCAST, 8), LAN, 256e6).algorithm == "chain"
    assert select(Collective(Kind.BROADCAST, 2), Cluster.preset("lan8").among([0, 1]), 64e3).algorithm != "multicast"


def test_without_multicast_none_is_taken_even_if_it_is_wanted() -> None:
    alone = replace(UPLINK, multicast=False)
    for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.BROADCAST):
        collective = Collective(kind, 8)
        assert select(collective, alone, 64e6).schedule.transfers.unicast
        assert select(collective, alone, 64e6, wanted={None: "multicast"}).schedule.transfers.unicast
        assert select(collective, UPLINK, 64e6, wanted={None: "multicast"}).algorithm == "multicast"
