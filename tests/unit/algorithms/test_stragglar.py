"""StragglAR: round-optimal for any n, any late rank, any number of pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from paceline.algorithms import prove
from paceline.algorithms.stragglar import exchange, num_rounds, owners
from paceline.ir.cluster import Cluster, Host
from paceline.ir.collective import Collective, Kind
from paceline.ir.cost import cost

# Rounds after the arrival, by n, for pieces = 1, 2, 4, 8.
ROUNDS = {
    3: (3, 5, 9, 17), 4: (4, 7, 13, 25), 5: (6, 10, 18, 34), 6: (7, 12, 22, 42), 7: (8, 14, 26, 50), 8: (9, 16, 30, 58),
    9: (11, 19, 35, 67), 10: (12, 21, 39, 75), 12: (14, 25, 47, 91), 13: (15, 27, 51, 99), 16: (18, 33, 63, 123),
    17: (20, 36, 68, 132), 32: (35, 66, 128, 252), 64: (68, 131, 257, 509),
}  # fmt: skip


@pytest.mark.parametrize("n", ROUNDS)
def test_rounds_equal_the_lower_bound(n: int) -> None:
    for pieces, rounds in zip((1, 2, 4, 8), ROUNDS[n], strict=True):
        assert exchange(n, pieces).num_steps == num_rounds(n, pieces) == rounds


@given(n=st.integers(3, 130), pieces=st.integers(1, 6), data=st.data())
@examples(60)
def test_proven_and_optimal_for_any_n(n: int, pieces: int, data: st.DataObject) -> None:
    late = data.draw(st.integers(0, n - 1))
    proof = prove("stragglar", Collective(Kind.ALL_REDUCE, n), late=late, pieces=pieces)
    assert proof.schedule.num_steps == (n - 2) * pieces + num_rounds(n, pieces)
    assert (proof.most_sends_at_once, proof.most_receives_at_once, proof.staged_chunks) == (1, 1, 0)
    table = proof.schedule.transfers
    before = table.step < (n - 2) * pieces
    assert late not in table.source[before]
    assert late not in table.destination[before]
    assert len(table) == ((n - 1) * (n - 2) + n * (n - 1)) * pieces  # not a message too many


def test_the_papers_own_case() -> None:
    """n = 2^q, one piece: n - 2 + log2 n rounds."""
    for q in range(2, 8):
        n = 1 << q
        assert num_rounds(n, 1) == n - 2 + q


def test_everybody_owns_the_same_share() -> None:
    for n in range(3, 40):
        assert np.bincount(owners(n, 3)).tolist() == [3] * (n - 1)


@pytest.mark.parametrize("n", [3, 5, 8, 12])
def test_exposed_time_matches_the_formula(n: int) -> None:
    """(K - 1 + ceil(log2 n)) (alpha + B beta / K) after the arrival, if that is late enough."""
    size, rate, latency, pieces = 64e6, 62.5e6, 1e-4, 4
    collective = Collective(Kind.ALL_REDUCE, n)
    cluster = Cluster.uniform(n, Host(rate, rate, latency)).with_late({1: 100.0})
    chunks = pieces * (n - 1)
    schedule = prove("stragglar", collective, late=1, pieces=pieces).schedule
    expected = num_rounds(n, pieces) * (latency + size / chunks / rate)
    assert cost(schedule, cluster, size).exposed_s == pytest.approx(expected)


def test_break_even_with_ring_at_eight_ranks() -> None:
    """0.18 buffer times with four pieces, as docs/algorithms.md says."""
    collective = Collective(Kind.ALL_REDUCE, 8)
    ring, late = prove("ring", collective).schedule, prove("stragglar", collective, late=0, pieces=4).schedule
    for delay, late_wins in ((0.0, False), (0.16, False), (0.20, True), (1.0, True)):
        cluster = Cluster.uniform(8, Host(1.0, 1.0, 0.0)).with_late({0: delay})
        assert (cost(late, cluster, 1.0).exposed_s < cost(ring, cluster, 1.0).exposed_s) == late_wins


def test_partial_delay_shortens_the_rest_one_to_one() -> None:
    """The late rank comes during the reduce-scatter: x = 1 + max(0, (n-2)/(n-1) - d) + (ceil(log2 n) - 1)/K."""
    n, pieces = 8, 4
    schedule = prove("stragglar", Collective(Kind.ALL_REDUCE, n), late=0, pieces=pieces).schedule
    for delay in (0.0, 0.143, 0.286, 0.5, 0.714, 0.857, 1.5):
        cluster = Cluster.uniform(n, Host(1.0, 1.0, 0.0)).with_late({0: delay})
        expected = 1 + max(0.0, (n - 2) / (n - 1) - delay) + 2 / (pieces * (n - 1))
        assert cost(schedule, cluster, 1.0).exposed_s == pytest.approx(expected, abs=1 / (pieces * (n - 1)))


@given(n=st.integers(3, 60), pieces=st.integers(1, 5), data=st.data())
@examples(60)
def test_with_multicast_all_others_together_send_one_buffer_after_the_arrival(
    n: int, pieces: int, data: st.DataObject
) -> None:
    late = data.draw(st.integers(0, n - 1))
    proof = prove("stragglar_multicast", Collective(Kind.ALL_REDUCE, n), late=late, pieces=pieces)
    table, chunks = proof.schedule.transfers, pieces * (n - 1)
    assert (proof.most_sends_at_once, proof.most_receives_at_once, proof.staged_chunks) == (1, 1, 0)
    needs_late = (table.source == late) | (table.destination[table.first[:-1]] == late)
    first_step = int(table.step[needs_late].min())
    assert proof.schedule.num_steps - first_step == chunks + 1
    sent_after = np.bincount(table.source[table.step >= first_step], minlength=n)
    assert sent_after.tolist() == [chunks if rank == late else pieces for rank in range(n)]


@pytest.mark.parametrize(("n", "uplinks"), [(8, 1.0), (8, 0.2), (5, 1.0), (32, 1.0)])
def test_the_exposed_time_with_multicast_matches_its_formula(n: int, uplinks: float) -> None:
    """A buffer over the slower way of a port, and one chunk to begin with: 1 + 1/K buffer times."""
    pieces = 4
    schedule = prove("stragglar_multicast", Collective(Kind.ALL_REDUCE, n), late=2, pieces=pieces).schedule
    cluster = Cluster.uniform(n, Host(100 * uplinks, 100.0, 0.0), multicast=True).with_late({2: 1000.0})
    expected = (1 + 1 / (pieces * (n - 1))) / uplinks
    assert cost(schedule, cluster, 100.0).exposed_s == pytest.approx(expected)
