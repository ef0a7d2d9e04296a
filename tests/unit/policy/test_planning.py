"""Plans: parameters by cost, lateness and hosts from the cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.algorithms import find
from paceline.errors import UnsupportedError, UsageError
from paceline.ir.cluster import Cluster, Host
from paceline.ir.collective import Collective, Kind
from paceline.ir.cost import cost
from paceline.policy.planning import compare, late_enough_s, plan, worth_taking

EIGHT = Collective(Kind.ALL_REDUCE, 8)
LAN8 = Cluster.preset("lan8")


def test_pieces_are_chosen_by_cost() -> None:
    late = LAN8.with_late({3: 5.0})
    chosen = plan(EIGHT, late, 64e6, "stragglar")
    for pieces in (1, 2, 4, 8, 16, 32, 64):
        other = cost(find("stragglar")(EIGHT, late=3, pieces=pieces), late, 64e6).exposed_s
        assert chosen.cost.exposed_s <= other / 0.999
    small = plan(EIGHT, late, 1e3, "stragglar")
    assert small.parameters["pieces"] == 1
    assert chosen.parameters["late"] == small.parameters["late"] == 3


def test_given_parameters_are_kept() -> None:
    chosen = plan(EIGHT, LAN8.with_late({3: 5.0}), 64e6, "stragglar", pieces=3, late=5)
    assert chosen.parameters == {"pieces": 3, "late": 5}
    assert chosen.schedule.num_chunks == 21


def test_hosts_and_arrivals_come_from_the_cluster() -> None:
    eth = Cluster.preset("eth64")
    assert plan(Collective(Kind.ALL_REDUCE, 64), eth, 1e6, "hierarchical").parameters["hosts"] == eth.host_of
    late = plan(EIGHT, LAN8.with_late({3: 5.0, 4: 2.0}), 64e6, "late_ranks", pieces=1)
    arrivals = late.parameters["arrivals"]
    assert arrivals[3] > arrivals[4] > 0 == arrivals[0]


def test_chains_follow_slow_uplinks() -> None:
    gather = Collective(Kind.ALL_GATHER, 8)
    slow_up = plan(gather, Cluster.preset("uplink8"), 64e6, "multicast")
    assert slow_up.parameters["chains"] >= 4
    assert slow_up.cost.ratio < 1.3
    assert plan(gather, LAN8, 64e6, "multicast").parameters["chains"] == 8, "a port that only sends loses time"
    assert plan(Collective(Kind.BROADCAST, 8), LAN8, 64e6, "multicast").parameters["chains"] == 1
    for n in (3, 6, 7):
        odd = plan(Collective(Kind.ALL_GATHER, n), Cluster.preset("uplink8").resized(n), 64e6, "multicast")
        others = [
            cost(find("multicast")(odd.schedule.collective, chains=c), odd.cluster, 64e6) for c in range(1, n + 1)
        ]
        assert odd.cost.exposed_s <= 1.05 * min(other.exposed_s for other in others)


def test_compare_is_sorted_and_knows_what_makes_sense() -> None:
    names = [p.algorithm for p in compare(EIGHT, LAN8, 64e6)]
    assert not {"stragglar", "late_ranks", "hierarchical"} & set(names)
    plans = compare(EIGHT, LAN8.with_late({3: 2.0}), 64e6)
    assert worth_taking(plans)[0].algorithm == "stragglar"
    assert [p.cost.exposed_s for p in plans] == sorted(p.cost.exposed_s for p in plans)
    two_late = compare(EIGHT, LAN8.with_late({3: 2.0, 5: 2.0}), 64e6)
    assert two_late[0].algorithm == "late_ranks"
    tiny = compare(EIGHT, LAN8, 100)
    assert tiny[0].algorithm == "doubling"
    gathers = [p.algorithm for p in compare(Collective(Kind.ALL_GATHER, 8), Cluster.preset("uplink8"), 64e6)]
    assert gathers[0] == "multicast"
    no_multicast = replace(LAN8, multicast=False)
    assert not [p.algorithm for p in compare(EIGHT, no_multicast, 64e6) if find(p.algorithm).multicast]


def test_multicasts_that_save_little_are_not_worth_taking() -> None:
    """StragglAR's chunks spread by multicast save 1% of 64 MB, and a broadcast 5% of what a chain takes."""
    late = compare(EIGHT, LAN8.with_late({3: 2.0}), 64e6)
    assert late[0].algorithm == "stragglar_multicast"
    assert not [found for found in worth_taking(late) if found.algorithm == "stragglar_multicast"]
    spread = compare(Collective(Kind.BROADCAST, 8), LAN8, 1e6)
    assert worth_taking(spread) == spread
    alone = [found for found in spread if found.algorithm == "multicast"]
    assert worth_taking(alone) == alone


def test_late_enough_hides_everything_that_can_be_hidden() -> None:
    late = LAN8.with_late({3: late_enough_s(EIGHT, LAN8, 64e6)})
    much_later = LAN8.with_late({3: 1000.0})
    for pieces in (1, 4, 16):
        schedule = find("stragglar")(EIGHT, late=3, pieces=pieces)
        assert cost(schedule, late, 64e6).exposed_s == pytest.approx(cost(schedule, much_later, 64e6).exposed_s)


def test_wrong_requests() -> None:
    with pytest.raises(UsageError, match="does not fit the cluster lan8"):
        plan(Collective(Kind.ALL_REDUCE, 4), LAN8, 1e6, "ring")
    with pytest.raises(UnsupportedError, match="has no multicast"):
        plan(Collective(Kind.BROADCAST, 2), Cluster.uniform(2, Host()), 1e6, "multicast")
    with pytest.raises(UsageError, match="pieces must be a whole number"):
        plan(EIGHT, LAN8, 1e6, "late_ranks", pieces=0)
    with pytest.raises(UsageError, match="has no parameter 'late'"):
        plan(EIGHT, LAN8, 1e6, "ring", late=3)
