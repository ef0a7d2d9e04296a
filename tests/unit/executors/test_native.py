from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given

from effort import examples
from paceline.algorithms import Algorithm, prove
from paceline.executors.native import program, rows, spread_numbers, spreads
from paceline.ir.collective import Collective, Kind
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfer, Transfers
from strategies import requests


def _rows(schedule: Schedule, rank: int) -> npt.NDArray[np.int64]:
    return rows(schedule, rank, spread_numbers(schedule.transfers))


def _spreads(schedule: Schedule, rank: int) -> list[tuple[int, int, list[int]]]:
    return spreads(schedule, rank, spread_numbers(schedule.transfers))


@examples(40)
@given(requests(most_ranks=12))
def test_every_transfer_is_in_the_programs_of_both_ends_and_nowhere_else(
    request_: tuple[Algorithm, Collective, dict[str, Any]],
) -> None:
    entry, collective, parameters = request_
    schedule = entry(collective, **parameters)
    sends: Counter[tuple[int, ...]] = Counter()
    receives: Counter[tuple[int, ...]] = Counter()
    for rank in range(schedule.num_ranks):
        for step, peer, chunk, count, is_receive, is_reduce, _spread in _rows(schedule, rank).tolist():
            ends = (peer, rank) if is_receive else (rank, peer)
            (receives if is_receive else sends)[(step, *ends, chunk, count, is_reduce)] += 1
    whole: Counter[tuple[int, ...]] = Counter()
    for transfer in schedule.transfers:
        for destination in transfer.destinations:
            whole[(transfer.step, transfer.source, destination, transfer.chunk, transfer.count, transfer.reduce)] += 1
    assert sends == receives == whole


def test_many_destinations_are_as_many_sends_of_one_spread() -> None:
    schedule = Schedule.from_rows(Collective(Kind.BROADCAST, 3), 1, [Transfer(0, 0, (1, 2), 0, 1, False)])
    assert _rows(schedule, 0).tolist() == [[0, 1, 0, 1, 0, 0, 0], [0, 2, 0, 1, 0, 0, 0]]
    assert _rows(schedule, 2).tolist() == [[0, 0, 0, 1, 1, 0, 0]]
    assert _spreads(schedule, 0) == _spreads(schedule, 2) == [(0, 0, [1, 2])]


def test_one_destination_is_no_spread() -> None:
    schedule = prove("ring", Collective(Kind.ALL_GATHER, 4)).schedule
    assert _spreads(schedule, 1) == []
    assert set(_rows(schedule, 1)[:, 6].tolist()) == {-1}


@examples(40)
@given(requests(most_ranks=12))
def test_spreads_have_the_same_numbers_on_all_ranks(request_: tuple[Algorithm, Collective, dict[str, Any]]) -> None:
    entry, collective, parameters = request_
    schedule = entry(collective, **parameters)
    ranks_of: dict[int, set[int]] = {}
    described: dict[int, tuple[int, list[int]]] = {}
    for rank in range(schedule.num_ranks):
        for number, source, destinations in _spreads(schedule, rank):
            assert described.setdefault(number, (source, destinations)) == (source, destinations)
            ranks_of.setdefault(number, set()).add(rank)
        of_rows = [row[6] + chunk for row in _rows(schedule, rank).tolist() if row[6] >= 0 for chunk in range(row[3])]
        assert set(of_rows) == {number for number, _, _ in _spreads(schedule, rank)}
    for number, (source, destinations) in described.items():
        assert ranks_of[number] == {source, *destinations}


# In one step each of ranks 0 and 1 sends its place to both others, which read it before they are written.
def test_what_is_read_in_the_same_step_goes_to_each_alone() -> None:
    swapping = [Transfer(0, 0, (1, 2), 0, 1, False), Transfer(0, 1, (0, 2), 0, 1, False)]
    table = Transfers.from_rows(swapping)
    assert spread_numbers(table).tolist() == [-1, -1]
    assert spread_numbers(Transfers.from_rows([*swapping, Transfer(1, 2, (0, 1), 1, 2, False)])).tolist() == [-1, -1, 0]


# Rank 2 gets another chunk into the place later, while rank 1 may still get repairs from there.
def test_what_is_written_over_later_goes_to_each_alone() -> None:
    first, later = Transfer(0, 0, (1, 2), 0, 1, False), Transfer(1, 1, (2,), 0, 1, False)
    assert spread_numbers(Transfers.from_rows([first, later])).tolist() == [-1, -1]
    assert spread_numbers(Transfers.from_rows([first, Transfer(1, 1, (2,), 1, 1, False)])).tolist() == [0, -1]


def test_what_is_added_goes_to_each_alone() -> None:
    assert spread_numbers(Transfers.from_rows([Transfer(0, 0, (1, 2), 0, 1, True)])).tolist() == [-1]


def test_a_program_knows_its_name() -> None:
    assert program(prove("ring", Collective(Kind.ALL_REDUCE, 4)), 2).name == "ring"
