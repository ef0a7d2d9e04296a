"""The proof: exact, in both directions, and able to say what is wrong."""

from __future__ import annotations

import random
import tracemalloc
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from executor import WrongError, execute
from paceline.algorithms import ALGORITHMS
from paceline.errors import ProofError
from paceline.ir import verify as verify_module
from paceline.ir.collective import ROOTED, Collective, Kind
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
@examples(25)
def test_every_schedule_proves_and_executes(name: str, data: st.DataObject) -> None:
    entry, collective, parameters = data.draw(requests(most_ranks=9, names=(name,)))
    schedule = entry(collective, **parameters)
    assert _proves(schedule)
    assert _executes(schedule, range(2))


@pytest.mark.parametrize("name", ALGORITHMS)
@given(data=st.data())
@examples(120)
def test_proof_and_executor_agree_on_mutants(name: str, data: st.DataObject) -> None:
    entry, collective, parameters = data.draw(requests(most_ranks=7, names=(name,)))
    parameters.update({"pieces": min(2, parameters["pieces"])} if "pieces" in parameters else {})
    mutant = data.draw(mutants(entry(collective, **parameters)))
    assert _proves(mutant) == _executes(mutant, range(2))


@st.composite
def _tables(draw: st.DrawFn) -> Schedule:
    """Any collective and any rows at all: multicast, runs, swaps in one step."""
    kind, n = draw(st.sampled_from(list(Kind))), draw(st.integers(2, 4))
    root = draw(st.integers(0, n - 1)) if kind in ROOTED else 0
    collective = Collective(kind, n, root)
    chunks = 1 if kind is Kind.BARRIER else collective.chunk_unit * draw(st.integers(1, 2))
    rows = []
    for _ in range(draw(st.integers(0, 12))):
        source = draw(st.integers(0, n - 1))
        others = st.sampled_from([rank for rank in range(n) if rank != source])
        to = draw(st.lists(others, min_size=1, max_size=n - 1, unique=True))
        chunk = draw(st.integers(0, chunks - 1))
        count = draw(st.integers(1, min(3, chunks - chunk)))
        rows.append(Transfer(draw(st.integers(0, 3)), source, tuple(to), chunk, count, draw(st.booleans())))
    return Schedule.from_rows(collective, chunks, sorted(rows, key=lambda row: row.step))


@given(schedule=_tables(), block=st.sampled_from([1, 10**9]), piece=st.sampled_from([8, 10**9]))
@examples(600)
def test_proof_and_executor_agree_on_random_tables(schedule: Schedule, block: int, piece: int) -> None:
    with patch.object(verify_module, "_BLOCK_BYTES", block), patch.object(verify_module, "_SLICE_BYTES", piece):
        proves = _proves(schedule)
    assert proves == _executes(schedule, range(3))


def test_slices_of_a_tick_do_not_matter() -> None:
    """More payloads in a tick than fit: everybody swaps with everybody, and the sums must still be of what was."""
    n = 60
    good = ALGORITHMS["one_shot"](Collective(Kind.ALL_REDUCE, n))
    twice = Transfers.from_rows([*good.transfers, good.transfers[-1]])
    mixed = Transfers.from_rows([*good.transfers, good.transfers[0]._replace(reduce=False)])
    with patch.object(verify_module._State, "_write", autospec=True, side_effect=verify_module._State._write) as write:
        verify(good)
        whole = write.call_count
        with patch.object(verify_module, "_SLICE_BYTES", 1):
            verify(good)
            assert write.call_count - whole == -(-n * (n - 1) // 1024) > 1
            for broken in (twice, mixed):
                with pytest.raises(ProofError):
                    verify(Schedule(good.collective, 1, broken))


def test_a_good_mutant_is_accepted() -> None:
    """A copy repeated at the end does no harm, and the proof must not say otherwise."""
    ring = ALGORITHMS["ring"](Collective(Kind.ALL_GATHER, 4))
    rows = list(ring.transfers)
    again = rows[-1]._replace(step=rows[-1].step + 1)
    assert _proves(Schedule(ring.collective, 4, Transfers.from_rows([*rows, again])))


@pytest.mark.parametrize("block_bytes", [1, 2000, 10**9])
def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(verify_module, "_BLOCK_BYTES", block_bytes)
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


def test_a_harmless_doubling_is_not_blamed() -> None:
    """Transfer 2 counts rank 0 twice, transfer 3 overwrites that; transfer 4 is the one that does harm."""
    rows = [row(0, 0, 1, 0, reduce=True), row(1, 1, 2, 0, reduce=True), row(2, 0, 1, 0, reduce=True), row(3, 2, 1, 0)]
    with pytest.raises(ProofError) as caught:
        verify(_all_reduce([*rows, row(4, 0, 2, 0, reduce=True), row(5, 2, 0, 0)]))
    assert (caught.value.rule, caught.value.transfer) == ("counted-twice", 4)


def test_a_complete_result_destroyed_is_overwritten() -> None:
    rows = [
        row(0, 0, 1, 0, reduce=True),
        row(1, 2, 1, 0, reduce=True),
        row(2, 1, 0, 0),
        row(3, 2, 0, 0),
        row(4, 1, 2, 0),
    ]
    with pytest.raises(ProofError) as caught:
        verify(_all_reduce(rows))
    assert (caught.value.rule, caught.value.transfer) == ("overwritten", 3)


def _peak_bytes_of_refusal(schedule: Schedule) -> int:
    tracemalloc.start()
    with pytest.raises(ProofError):
        verify(schedule)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_hostile_tables_are_refused_in_bounded_memory() -> None:
    n = 8192
    everyone = np.arange(1, n)
    add = {"step": 0, "destination": 0, "chunk": 0, "reduce": True}
    rows = Transfers(source=np.append(everyone, 1), **add)
    spread = Transfers.from_rows([Transfer(0, 0, tuple(range(1, n)), 0, 1, False)])
    doubled = Schedule(Collective(Kind.ALL_REDUCE, n), 1, Transfers.sequence([rows, spread]))
    assert _peak_bytes_of_refusal(doubled) < 256 << 20
    many = Transfers(source=np.tile(everyone, 20), **add)  # 160,000 payloads of a kilobyte in one step
    crowded = Schedule(Collective(Kind.ALL_REDUCE, n), 1, Transfers.sequence([many, spread]))
    assert _peak_bytes_of_refusal(crowded) < 256 << 20


def test_few_moves_of_many_ranks_and_chunks() -> None:
    """A gather of 8192 ranks touches few of its 8192 x 8192 places, and only those cost anything."""
    gather = ALGORITHMS["direct"](Collective(Kind.GATHER, 8192))
    tracemalloc.start()
    verify(gather)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


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
    before = [tuple(row) for row in schedule.transfers]
    verify(schedule)
    assert [tuple(row) for row in schedule.transfers] == before
    with pytest.raises(ValueError, match="read-only"):
        schedule.transfers.step[0] = 1
