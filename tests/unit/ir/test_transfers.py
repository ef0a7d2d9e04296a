"""Tables of transfers, and the ways to put them together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ScheduleError
from paceline.ir.collective import Collective, Kind
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfer, Transfers
from strategies import requests, row


def _rows(table: Transfers) -> list[tuple[int, int, tuple[int, ...], int, int, bool]]:
    return [tuple(entry) for entry in table]


@given(request=requests(most_ranks=12))
def test_rows_and_columns_say_the_same(request: tuple) -> None:
    entry, collective, parameters = request
    table = entry(collective, **parameters).transfers
    assert _rows(Transfers.from_rows(table)) == _rows(table)


@given(request=requests(most_ranks=10), data=st.data())
def test_moves_are_the_rows_taken_apart(request: tuple, data: st.DataObject) -> None:
    entry, collective, parameters = request
    schedule = entry(collective, **parameters)
    begin = data.draw(st.integers(0, schedule.num_chunks - 1))
    end = data.draw(st.integers(begin + 1, schedule.num_chunks))
    moves = schedule.transfers.moves(begin, end)
    expected = [
        (index, entry.step, entry.source, to, chunk, entry.reduce)
        for index, entry in enumerate(schedule.transfers)
        for to in entry.destinations
        for chunk in range(max(entry.chunk, begin), min(entry.chunk + entry.count, end))
    ]
    columns = (moves.transfer, moves.step, moves.source, moves.destination, moves.chunk, moves.reduce)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_indexing_is_a_lists() -> None:
    table = Transfers(step=[0, 1, 2], source=0, destination=1, chunk=[4, 5, 6])
    assert (table[-1].chunk, table[-3].destinations, table[2].step) == (6, (1,), 2)
    for outside in (3, -4):
        with pytest.raises(IndexError):
            table[outside]


def test_steps_are_sorted_and_renumbered() -> None:
    table = Transfers(step=[7, 2, 7], source=[0, 1, 2], destination=[1, 2, 0], chunk=[0, 1, 2])
    assert table.step.tolist() == [0, 1, 1]
    assert table.source.tolist() == [1, 0, 2]
    assert table.num_steps == 2


def test_sorting_keeps_destinations_with_their_transfer() -> None:
    table = Transfers.from_rows([Transfer(5, 0, (1, 2, 3), 0, 1, False), Transfer(1, 3, (0,), 1, 2, True)])
    assert _rows(table) == [(0, 3, (0,), 1, 2, True), (1, 0, (1, 2, 3), 0, 1, False)]


def test_relabelling_ranks_and_chunks() -> None:
    table = Transfers(step=[0, 1], source=[0, 1], destination=[1, 0], chunk=[0, 0], count=[2, 1], reduce=[True, False])
    moved = table.relabelled(ranks=[5, 7], chunks=[9, 4])
    assert _rows(moved) == [(0, 5, (7,), 9, 1, True), (0, 5, (7,), 4, 1, True), (1, 7, (5,), 9, 1, False)]
    assert moved.opens_message().tolist() == [True, False, True]  # what was one message still is
    spread = table.relabelled(chunks=[[3, 8], []])
    assert [(step, chunk) for step, _, _, chunk, _, _ in _rows(spread)] == [(0, 3), (0, 8), (1, 3), (1, 8)]


def test_mirror_of_a_mirror_is_the_same_table() -> None:
    table = Transfers(step=[0, 0, 1], source=[0, 1, 1], destination=[1, 2, 0], chunk=[0, 1, 0])
    assert _rows(table.mirrored(reduce=True).mirrored(reduce=False)) == _rows(table)
    with pytest.raises(ScheduleError, match="cannot be mirrored"):
        Transfers.from_rows([Transfer(0, 0, (1, 2), 0, 1, False)]).mirrored(reduce=True)


def test_sequence_and_overlay() -> None:
    one = Transfers(step=[0, 1], source=0, destination=1, chunk=0)
    assert Transfers.sequence([one, Transfers.none(), one]).step.tolist() == [0, 1, 2, 3]
    assert Transfers.overlay([one, one]).step.tolist() == [0, 0, 1, 1]
    assert len(Transfers.sequence([])) == 0


def test_selected() -> None:
    table = Transfers.from_rows([Transfer(0, 0, (1, 2), 0, 1, False), row(1, 1, 0, 0), row(2, 2, 0, 0)])
    assert _rows(table.selected(table.source != 1)) == [(0, 0, (1, 2), 0, 1, False), (1, 2, (0,), 0, 1, False)]


def test_messages() -> None:
    rows = [row(0, 0, 1, 0), row(0, 0, 1, 2), row(0, 0, 2, 1), row(1, 0, 2, 2), Transfer(1, 0, (1, 2), 3, 1, False)]
    assert Transfers.from_rows(rows).opens_message().tolist() == [True, False, True, True, True]


MALFORMED = [
    ("source is not one of the 3 ranks", {"source": 3}),
    ("destination is not one of the 3 ranks", {"destination": -1}),
    ("cannot send to itself", {"source": 1}),
    ("chunks are not among the 2", {"chunk": 2}),
    ("chunks are not among the 2", {"chunk": 1, "count": 2}),
    ("chunks are not among the 2", {"count": 0}),
    ("chunks are not among the 2", {"count": 2**31 - 1}),
]


@pytest.mark.parametrize(("why", "change"), MALFORMED)
def test_a_schedule_out_of_range_names_its_transfer(why: str, change: dict[str, int]) -> None:
    columns = {"step": 0, "source": 0, "destination": 1, "chunk": 0, "count": 1} | change
    with pytest.raises(ScheduleError, match=r"transfer 0 .*" + why):
        Schedule(Collective(Kind.ALL_REDUCE, 3), 2, Transfers(**columns))


def test_columns_hold_whole_numbers() -> None:
    for wrong in ([0.5], [2**40], ["a"], [[1], [2, 3]]):
        with pytest.raises(ScheduleError, match="whole numbers"):
            Transfers(step=0, source=wrong, destination=1, chunk=0)


def test_other_malformed_schedules() -> None:
    three = Collective(Kind.ALL_REDUCE, 3)
    with pytest.raises(ScheduleError, match="names a destination twice"):
        Schedule.from_rows(three, 1, [Transfer(0, 0, (1, 2, 1), 0, 1, False)])
    with pytest.raises(ScheduleError, match="at least one destination"):
        Transfers.from_rows([Transfer(0, 0, (), 0, 1, False)])
    with pytest.raises(ScheduleError, match="multiples of 3"):
        Schedule(Collective(Kind.ALL_GATHER, 3), 4, Transfers.none())
    with pytest.raises(ScheduleError, match="barrier has one chunk"):
        Schedule(Collective(Kind.BARRIER, 3), 2, Transfers.none())
    with pytest.raises(ScheduleError, match="chunk moves are more"):
        Schedule(three, 1 << 20, Transfers(step=np.arange(100), source=0, destination=1, chunk=0, count=1 << 20))
    for ranks, root in ((0, 0), (40000, 0), (3, 3), (3, -1)):
        with pytest.raises(ScheduleError):
            Collective(Kind.BROADCAST, ranks, root)
    with pytest.raises(ScheduleError, match="has no root"):
        Collective(Kind.ALL_REDUCE, 3, 1)
