"""Every algorithm, for every n: proven, and as short and light as its docstring says."""

from __future__ import annotations

from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from paceline.algorithms import ALGORITHMS, algorithm, build, find, prove, registry, serving
from paceline.errors import UnsupportedError, UsageError
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers
from paceline.ir.verify import verify
from strategies import requests


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "late_ranks"])
@given(data=st.data())
@examples(60)
def test_any_number_of_ranks_proves(name: str, data: st.DataObject) -> None:
    entry, collective, parameters = data.draw(requests(most_ranks=130, names=(name,)))
    verify(entry(collective, **parameters))


@given(request=requests(most_ranks=130, names=("late_ranks",)))
@examples(15)
def test_any_number_of_late_ranks_proves(request: tuple) -> None:
    """Fewer examples: the greedy construction takes seconds for a hundred ranks."""
    entry, collective, parameters = request
    verify(entry(collective, **parameters))


def test_every_collective_is_served_for_every_n() -> None:
    for kind in Kind:
        for n in (1, 2, 3, 7, 16, 33):
            assert serving(Collective(kind, n)), (kind, n)


def _log(n: int) -> int:
    return ceil(log2(n)) if n > 1 else 0


STEPS = {
    ("ring", Kind.ALL_REDUCE): lambda n: 2 * (n - 1),
    ("ring", Kind.ALL_GATHER): lambda n: n - 1,
    ("direct", Kind.REDUCE_SCATTER): lambda n: n - 1,
    ("bruck", Kind.ALL_REDUCE): lambda n: 2 * _log(n),
    ("bruck", Kind.ALL_GATHER): _log,
    ("pat", Kind.REDUCE_SCATTER): _log,
    ("binomial", Kind.BROADCAST): _log,
    ("binomial", Kind.GATHER): _log,
    ("dissemination", Kind.BARRIER): _log,
    ("pairwise", Kind.ALL_TO_ALL): lambda n: n - 1,
    ("one_shot", Kind.ALL_REDUCE): lambda n: min(1, n - 1),
    ("doubling", Kind.ALL_REDUCE): lambda n: int(log2(n)) + (2 if n & (n - 1) else 0),
    ("doubling", Kind.BARRIER): lambda n: int(log2(n)) + (2 if n & (n - 1) else 0),
    ("halving_doubling", Kind.ALL_REDUCE): lambda n: 2 * int(log2(n)) + (2 if n & (n - 1) else 0),
    ("multicast", Kind.ALL_GATHER): lambda n: n if n > 1 else 0,
    ("multicast", Kind.ALL_REDUCE): lambda n: 2 * n - 1 if n > 1 else 0,
}


@pytest.mark.parametrize(("name", "kind"), STEPS)
def test_steps_are_as_documented(name: str, kind: Kind) -> None:
    for n in range(1, 40):
        proof = prove(name, Collective(kind, n))
        assert proof.schedule.num_steps == STEPS[name, kind](n), n
        if name not in ("one_shot", "multicast"):
            assert proof.most_sends_at_once <= 1
            assert proof.most_receives_at_once <= 1


@pytest.mark.parametrize("name", ["ring", "direct", "bruck", "pat"])
@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER])
def test_bandwidth_optimal_ones_move_no_byte_too_many(name: str, kind: Kind) -> None:
    for n in (2, 3, 5, 8, 13, 32, 47):
        proof = prove(name, Collective(kind, n))
        halves = 2 if kind is Kind.ALL_REDUCE else 1
        most = max(proof.chunks_sent.max(), proof.chunks_received.max()) / proof.schedule.num_chunks
        assert most == pytest.approx(halves * (n - 1) / n)


def test_folding_costs_what_halving_doubling_says() -> None:
    for kind, halves, extra in ((Kind.ALL_REDUCE, 2, 1.0), (Kind.REDUCE_SCATTER, 1, 1.5), (Kind.ALL_GATHER, 1, 1.5)):
        for n in range(2, 131):
            proof = prove("halving_doubling", Collective(kind, n))
            most = max(proof.chunks_sent.max(), proof.chunks_received.max()) / proof.schedule.num_chunks
            folded = n & (n - 1) != 0
            assert most <= halves * (n - 1) / n + (extra if folded else 0) + 1e-9


def test_chain_steps_and_bytes() -> None:
    proof = prove("chain", Collective(Kind.BROADCAST, 9, root=4), pieces=20)
    assert proof.schedule.num_steps == 9 - 2 + 20
    assert proof.chunks_sent.max() == proof.chunks_received.max() == 20


def test_multicast_sends_each_byte_once() -> None:
    for n, chains in ((7, 3), (12, 5), (16, 16)):
        proof = prove("multicast", Collective(Kind.ALL_GATHER, n), chains=chains)
        assert proof.chunks_sent.tolist() == [1] * n
        assert proof.most_receives_at_once <= chains
        assert proof.schedule.num_steps == ceil(n / chains)


def test_an_all_reduce_by_multicast_sends_one_buffer() -> None:
    for n, chains, pieces in ((2, 1, 1), (5, 2, 1), (8, 8, 1), (12, 5, 3)):
        proof = prove("multicast", Collective(Kind.ALL_REDUCE, n), chains=chains, pieces=pieces)
        assert proof.chunks_sent.tolist() == [proof.schedule.num_chunks] * n
        assert proof.chunks_received.tolist() == [2 * (n - 1) * pieces] * n
        assert proof.schedule.num_steps == (n - 1 + ceil(n / chains)) * pieces


def test_a_ring_with_holes_sends_one_message_a_step_and_one_buffer_in_all() -> None:
    for n in (2, 3, 5, 8):
        for pieces in (1, 2, n - 1, n, 3 * n - 2):
            proof = prove("multicast_ring", Collective(Kind.ALL_REDUCE, n), pieces=pieces)
            table = proof.schedule.transfers
            assert proof.most_sends_at_once == 1, (n, pieces)
            assert proof.chunks_sent.tolist() == [n * pieces] * n
            assert proof.chunks_received.tolist() == [2 * (n - 1) * pieces] * n
            multicasts = np.bincount(table.step[~table.reduce])
            assert multicasts[:-1].max(initial=0) <= 1, "one rank at a time, but for the last chunks of all"
            assert proof.schedule.num_steps <= n * pieces + 2 * n


def test_a_multicast_enters_each_host_once() -> None:
    """Three hosts with 1, 3 and 2 ranks: each port carries what its host has not, and no byte of it twice."""
    host_of, chunks_of = (0, 1, 1, 2, 1, 2), np.array([1, 3, 2])
    for chains in (1, 2, 6):
        proof = prove("multicast", Collective(Kind.ALL_GATHER, 6), chains=chains)
        sent, received = proof.host_traffic(host_of)
        assert sent.tolist() == chunks_of.tolist()
        assert received.tolist() == (6 - chunks_of).tolist()


def test_algorithms_say_whether_they_multicast() -> None:
    for entry in ALGORITHMS.values():
        kind = sorted(entry.kinds)[0]
        assert entry.multicast == (not prove(entry.name, Collective(kind, 6)).schedule.transfers.unicast), entry.name


def test_hierarchical_crosses_ports_as_little_as_possible() -> None:
    for sizes in ((4, 4, 4), (1, 5, 2), (3, 3), (2, 7, 3, 3)):
        hosts = [host for host, size in enumerate(sizes) for _ in range(size)]
        proof = prove("hierarchical", Collective(Kind.ALL_REDUCE, len(hosts)), hosts=tuple(hosts))
        up, down = proof.host_traffic(hosts)
        share = 2 * (len(sizes) - 1) / len(sizes)
        assert np.allclose(up / proof.schedule.num_chunks, share)
        assert np.allclose(down / proof.schedule.num_chunks, share)


def test_wrong_requests_say_what_to_do() -> None:
    eight = Collective(Kind.ALL_REDUCE, 8)
    with pytest.raises(UsageError, match=r"there is no algorithm 'rign'; there are .*ring"):
        find("rign")
    with pytest.raises(UnsupportedError, match="chain is an algorithm for broadcast, reduce, not for allreduce"):
        prove("chain", eight)
    with pytest.raises(UnsupportedError, match="needs at least 3 ranks, not 2"):
        prove("stragglar", Collective(Kind.ALL_REDUCE, 2))
    with pytest.raises(UsageError, match="ring has no parameter 'late'; its parameters: pieces"):
        prove("ring", eight, late=3)
    with pytest.raises(UsageError, match="pieces must be a whole number"):
        prove("ring", eight, pieces=0)
    with pytest.raises(UsageError, match="rank 8 cannot be late"):
        prove("stragglar", eight, late=8)
    with pytest.raises(UsageError, match="at most 8 chains, not 9"):
        prove("multicast", Collective(Kind.ALL_GATHER, 8), chains=9)
    with pytest.raises(UsageError, match="hosts needs one entry for each of the 8 ranks"):
        prove("hierarchical", eight, hosts=(0, 1))
    for name, n in (("ring", 30000), ("one_shot", 30000), ("pairwise", 5000), ("late_ranks", 600)):
        kind = Kind.ALL_TO_ALL if name == "pairwise" else Kind.ALL_REDUCE
        with pytest.raises(UnsupportedError):
            prove(name, Collective(kind, n))
    with pytest.raises(UsageError, match="ring is taken by"):

        @algorithm(Kind.ALL_REDUCE)
        def ring(collective: Collective) -> tuple[int, Transfers]:
            return collective.num_ranks, Transfers.none()

    with pytest.raises(UsageError, match="arrivals needs one round"):
        prove("late_ranks", eight, arrivals=(0, 1))


def test_large_requests_are_refused_only_if_they_are_large() -> None:
    assert len(prove("direct", Collective(Kind.BROADCAST, 4096)).schedule.transfers) == 4095
    assert "multicast" in [entry.name for entry in serving(Collective(Kind.BROADCAST, 4096))]
    assert not [entry.name for entry in serving(Collective(Kind.ALL_TO_ALL, 2000))]
    assert prove("late_ranks", Collective(Kind.ALL_REDUCE, 3), arrivals=np.array([0, 0, 5])).num_messages == 12
    with pytest.raises(UsageError, match="late must be a whole number"):
        prove("stragglar", Collective(Kind.ALL_REDUCE, 4), late=2.5)


def test_proofs_are_cached() -> None:
    collective = Collective(Kind.ALL_REDUCE, 6)
    assert prove("ring", collective, pieces=2) is prove("ring", collective, pieces=2)
    assert prove("ring", collective, pieces=2).schedule is build("ring", collective, pieces=2)


def test_the_cache_forgets_what_is_too_much() -> None:
    cache: registry._Cache[int] = registry._Cache(most_bytes=100)
    made: list[int] = []

    def get(number: int) -> int:
        def make() -> int:
            made.append(number)
            return number

        return cache.get((find("ring"), Collective(Kind.ALL_REDUCE, number), ()), make, size=lambda _: 40)

    assert [get(number) for number in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]


def test_every_algorithm_documents_itself() -> None:
    for entry in ALGORITHMS.values():
        text = entry.draft.__doc__ or ""
        for word in ("Any n", "Steps:", "Bytes" if entry.name != "dissemination" else "empty", "Lateness:", "Source:"):
            assert word in text, (entry.name, word)
