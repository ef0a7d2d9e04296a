"""The proof: exact, in both directions, and able to say what is wrong."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor import WrongError, execute
from paceline.algorithms import ALGORITHMS
from paceline.errors import ProofError
from paceline.ir import verify as verify_module
from paceline.ir.collective import Collective, Kind
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfer, Transfers
from paceline.ir.verify import verify
from strategies import mutants, requests, row


def _executes(schedule: Schedule, seeds: range) -> bool:
    outcomes = set()
    for seed in seeds:
        try:
            execute(schedule, seed)
            outcomes.add(True)
        except WrongError:
            outcomes.add(False)
    assert len(outcomes) == 1, "the outcome of a run must not depend on its timing"
    return outcomes.pop()


def _proves(schedule: Schedule) -> bool:
    try:
        verify(schedule)
        return True
    except ProofError as refusal:
        error = refusal
    assert f"[{error.rule}]" in str(error)
    assert error.transfer is None or 0 <= error.transfer < len(schedule.transfers)
    assert all(0 <= rank < schedule.num_ranks for rank in error.ranks)
    return False


@pytest.mark.parametrize("name", ALGORITHMS)
@given(data=st.data())
@settings(max_examples=25)
def test_every_schedule_proves_and_executes(name: str, data: st.DataObject) -> None:
    entry, collective, parameters = data.draw(requests(most_ranks=9, names=(name,)))
    schedule = entry(collective, **parameters)
    assert _proves(schedule)
    assert _executes(schedule, range(2))


@pytest.mark.parametrize("name", ALGORITHMS)
@given(data=st.data())
@settings(max_examples=120)
def test_proof_and_executor_agree_on_mutants(name: str, data: st.DataObject) -> None:
    entry, collective, parameters = data.draw(requests(most_ranks=7, names=(name,)))
    parameters.update({"pieces": min(2, parameters["pieces"])} if "pieces" in parameters else {})
    mutant = data.draw(mutants(entry(collective, **parameters)))
    assert _proves(mutant) == _executes(mutant, range(2))


@given(
    data=st.data(),
    n=st.integers(2, 4),
    chunks=st.integers(1, 2),
    kind=st.sampled_from([Kind.ALL_REDUCE, Kind.BROADCAST, Kind.BARRIER]),
)
@settings(max_examples=400)
def test_proof_and_executor_agree_on_random_tables(data: st.DataObject, n: int, chunks: int, kind: Kind) -> None:
    chunks = 1 if kind is Kind.BARRIER else chunks
    pairs = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)).filter(lambda p: p[0] != p[1])
    entries = st.tuples(st.integers(0, 3), pairs, st.integers(0, chunks - 1), st.booleans())
    rows = [row(s, a, b, c, reduce=r) for s, (a, b), c, r in data.draw(st.lists(entries, max_size=12))]
    schedule = Schedule.from_rows(Collective(kind, n), chunks, sorted(rows, key=lambda t: t.step))
    assert _proves(schedule) == _executes(schedule, range(3))


def test_a_good_mutant_is_accepted() -> None:
    """A copy repeated at the end does no harm, and the proof must not say otherwise."""
    ring = ALGORITHMS["ring"](Collective(Kind.ALL_GATHER, 4))
    rows = list(ring.transfers)
    again = rows[-1]._replace(step=rows[-1].step + 1)
    assert _proves(Schedule(ring.collective, 4, Transfers.from_rows([*rows, again])))


@pytest.mark.parametrize("block_bytes", [1, 2000, 10**9])
def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(verify_module, "_BLOCK_STATE_BYTES", block_bytes)
    good = ALGORITHMS["hierarchical"](Collective(Kind.ALL_REDUCE, 9), hosts=(0, 0, 0, 0, 1, 1, 2, 2, 2), pieces=3)
    proof = verify(good)
    assert (proof.most_sends_at_once, proof.staged_chunks) == (1, 0)
    rng = random.Random(1)
    for _ in range(20):
        rows = list(good.transfers)
        del rows[rng.randrange(len(rows))]
        with pytest.raises(ProofError):
            verify(Schedule(good.collective, good.num_chunks, Transfers.from_rows(rows)))


def test_more_ranks_than_bits_in_a_word() -> None:
    for n in (63, 64, 65, 128, 129):
        schedule = ALGORITHMS["ring"](Collective(Kind.ALL_REDUCE, n))
        verify(schedule)
        rows = list(schedule.transfers)
        with pytest.raises(ProofError):
            verify(Schedule(schedule.collective, n, Transfers.from_rows(rows[1:])))


def _all_reduce(rows: list[Transfer], n: int = 3) -> Schedule:
    return Schedule.from_rows(Collective(Kind.ALL_REDUCE, n), 1, rows, algorithm="handmade")


REFUSED = {
    "sent-too-early": (
        Schedule.from_rows(Collective(Kind.BROADCAST, 3), 1, [row(0, 1, 2, 0), row(1, 0, 1, 0), row(2, 1, 2, 0)]),
        0,
        (1, 2),
        "rank 1 holds nothing of chunk 0",
    ),
    "nothing-to-add-to": (
        Schedule.from_rows(Collective(Kind.BROADCAST, 3), 1, [row(0, 0, 1, 0), row(1, 1, 2, 0, reduce=True)]),
        1,
        (1, 2),
        "rank 2 holds nothing of chunk 0 to add it to",
    ),
    "never-received": (
        _all_reduce([row(0, 0, 1, 0, reduce=True), row(1, 1, 0, 0)]),
        None,
        (2,),
        "no transfer brings chunk 0 to rank 2",
    ),
    "missing": (
        _all_reduce([row(0, 0, 1, 0, reduce=True), row(1, 1, 2, 0, reduce=True), row(2, 1, 0, 0), row(3, 2, 1, 0)]),
        2,
        (0, 1, 0),
        "rank 0 ends with chunk 0 lacking the part of rank 2",
    ),
    "overwritten": (
        _all_reduce([row(0, 0, 1, 0), row(1, 1, 2, 0, reduce=True), row(2, 2, 0, 0), row(2, 2, 1, 0)]),
        0,
        (0, 0, 1),
        "lacking the part of rank 1",
    ),
    "counted-twice": (
        _all_reduce(
            [
                row(0, 0, 1, 0, reduce=True),
                row(1, 0, 1, 0, reduce=True),
                row(2, 1, 2, 0, reduce=True),
                row(3, 2, 0, 0),
                row(3, 2, 1, 0),
            ]
        ),
        1,
        (0, 0, 1),
        "holding the part of rank 0 more than once",
    ),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_a_refusal_names_transfer_ranks_chunk_and_rule(rule: str) -> None:
    schedule, transfer, ranks, words = REFUSED[rule]
    with pytest.raises(ProofError, match=words) as caught:
        verify(schedule)
    assert (caught.value.rule, caught.value.transfer, caught.value.ranks, caught.value.chunk) == (
        rule,
        transfer,
        ranks,
        0,
    )
    if transfer is not None:
        assert f"transfer {transfer} " in str(caught.value)


def test_traffic_and_port_discipline() -> None:
    hosts = (0, 0, 0, 0, 1, 1, 1, 1)
    proof = verify(ALGORITHMS["hierarchical"](Collective(Kind.ALL_REDUCE, 8), hosts=hosts))
    up, down = proof.host_traffic(hosts)
    chunks = proof.schedule.num_chunks
    assert up.tolist() == down.tolist() == [chunks, chunks]  # 2(H - 1)/H of the buffer
    assert (proof.most_sends_at_once, proof.most_receives_at_once, proof.staged_chunks) == (1, 1, 0)
    swap = verify(ALGORITHMS["one_shot"](Collective(Kind.ALL_REDUCE, 5)))
    assert (swap.most_sends_at_once, swap.staged_chunks, swap.num_messages) == (4, 4, 20)
    cast = verify(ALGORITHMS["multicast"](Collective(Kind.ALL_GATHER, 8), chains=2))
    assert cast.chunks_sent.tolist() == [1] * 8
    assert cast.chunks_received.tolist() == [7] * 8
    assert cast.most_receives_at_once == 2
    up, down = cast.host_traffic(hosts)
    assert (up.tolist(), down.tolist()) == ([4, 4], [4, 4])  # once across each port, whoever listens behind it


def test_one_rank_needs_nothing() -> None:
    for kind in Kind:
        verify(Schedule(Collective(kind, 1), 1, Transfers.none()))


def test_hostile_sizes_are_refused_without_large_memory() -> None:
    """The most ranks and chunks a file can claim, and one transfer: refused at the first block."""
    huge = Schedule(Collective(Kind.ALL_REDUCE, 32768), 1 << 20, Transfers(step=0, source=0, destination=1, chunk=0))
    tracemalloc.start()
    with pytest.raises(ProofError, match="no transfer brings chunk 0 to rank 0"):
        verify(huge)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_input_is_not_changed() -> None:
    schedule = ALGORITHMS["ring"](Collective(Kind.ALL_REDUCE, 4))
    before = schedule.digest
    verify(schedule)
    assert ALGORITHMS["ring"](Collective(Kind.ALL_REDUCE, 4)).digest == before
    with pytest.raises(ValueError, match="read-only"):
        schedule.transfers.step[0] = 1
