from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given

from effort import examples
from paceline.algorithms import Algorithm, prove
from paceline.executors.native import program, rows
from paceline.ir.collective import Collective, Kind
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfer
from strategies import requests


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
        for step, peer, chunk, count, is_receive, is_reduce in rows(schedule, rank).tolist():
            ends = (peer, rank) if is_receive else (rank, peer)
            (receives if is_receive else sends)[(step, *ends, chunk, count, is_reduce)] += 1
    whole: Counter[tuple[int, ...]] = Counter()
    for transfer in schedule.transfers:
        for destination in transfer.destinations:
            whole[(transfer.step, transfer.source, destination, transfer.chunk, transfer.count, transfer.reduce)] += 1
    assert sends == receives == whole


def test_many_destinations_are_as_many_sends() -> None:
    schedule = Schedule.from_rows(Collective(Kind.BROADCAST, 3), 1, [Transfer(0, 0, (1, 2), 0, 1, False)])
    assert rows(schedule, 0).tolist() == [[0, 1, 0, 1, 0, 0], [0, 2, 0, 1, 0, 0]]
    assert rows(schedule, 2).tolist() == [[0, 0, 0, 1, 1, 0]]


def test_a_program_knows_its_name() -> None:
    assert program(prove("ring", Collective(Kind.ALL_REDUCE, 4)), 2).name == "ring"
