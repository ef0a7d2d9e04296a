"""The part of a proven schedule that one rank plays, in the form the C++ engine takes.

A row of the program says at which step this rank sends to or receives from which peer which chunks. The engine orders
reads and writes of each chunk by these steps and runs everything else as data arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfers
from paceline.ir.verify import Proof

if TYPE_CHECKING:
    from paceline._c10d import Program


def program(
    proof: Proof, rank: int, name: str | None = None, *, in_order: bool = False, in_turn: bool = False
) -> Program:
    """The program of one rank, named for people. Only proofs are taken, so nothing unproven reaches a wire.

    ``in_order`` has the engine send what is ready in the order of its steps, whoever it is for, and not far ahead of
    what it has received. ``in_turn`` has it wait with sending until few collectives called before are under way.
    """
    from paceline._c10d import Program

    schedule = proof.schedule
    numbers = spread_numbers(schedule.transfers)
    return Program(
        rank=rank,
        num_ranks=schedule.num_ranks,
        num_chunks=schedule.num_chunks,
        digest=int(schedule.digest[:16], 16),
        name=schedule.algorithm if name is None else name,
        rows=rows(schedule, rank, numbers),
        in_order=in_order,
        in_turn=in_turn,
        spreads=spreads(schedule, rank, numbers),
    )


def rows(schedule: Schedule, rank: int, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """One row a transfer and peer: step, peer, first chunk, chunks, whether we receive, whether we reduce, spread.

    A transfer with many destinations is as many rows of its source. The spread is the number that such a transfer's
    first chunk has (``numbers``, from :func:`spread_numbers`), or -1: then its chunks go to each destination alone.
    """
    table = schedule.transfers
    transfer = np.repeat(np.arange(len(table)), table.fanout)  # of each destination
    source = table.source[transfer]
    mine = np.flatnonzero((source == rank) | (table.destination == rank))
    index = transfer[mine]
    receives = table.destination[mine] == rank
    peer = np.where(receives, source[mine], table.destination[mine])
    columns = (table.step[index], peer, table.chunk[index], table.count[index], receives, table.reduce[index])
    return np.stack([column.astype(np.int64) for column in (*columns, numbers[index])], axis=1)


def spreads(schedule: Schedule, rank: int, numbers: npt.NDArray[np.int64]) -> list[tuple[int, int, list[int]]]:
    """The chunks that may go to many ranks at once, of those that this rank sends or receives.

    Each has a number, which is the same on all ranks, a source and its destinations.
    """
    table = schedule.transfers
    listed = []
    for index in np.flatnonzero(numbers >= 0).tolist():
        destinations = table.destination[table.first[index] : table.first[index + 1]]
        source = int(table.source[index])
        if source == rank or bool((destinations == rank).any()):
            first, count = int(numbers[index]), int(table.count[index])
            listed += [(chunk, source, destinations.tolist()) for chunk in range(first, first + count)]
    return listed


def spread_numbers(table: Transfers) -> npt.NDArray[np.int64]:
    """Of each transfer that may go to many at once, the number of its first chunk; -1 for the others.

    Not what is added, since bytes may come in any order. Nor what a destination sends away in the same step: a step
    reads before it writes, so ranks that swap would wait for each other before any of them is ready to receive. Nor
    what a destination writes over later: others may still get repairs from there.
    """
    many = (table.fanout > 1) & ~table.reduce
    candidates = np.flatnonzero(many)
    if len(candidates) == 0:
        return np.full(len(table), -1, np.int64)
    read = {
        (int(step), int(source), chunk)
        for step, source, first, count in zip(
            table.step.tolist(), table.source.tolist(), table.chunk.tolist(), table.count.tolist(), strict=True
        )
        for chunk in range(first, first + count)
    }
    last_written: dict[tuple[int, int], int] = {}
    transfer = np.repeat(np.arange(len(table)), table.fanout)
    for index, rank in zip(transfer.tolist(), table.destination.tolist(), strict=True):
        for place in range(int(table.chunk[index]), int(table.chunk[index]) + int(table.count[index])):
            last_written[rank, place] = max(int(table.step[index]), last_written.get((rank, place), -1))
    for index in candidates.tolist():
        step, chunk, count = int(table.step[index]), int(table.chunk[index]), int(table.count[index])
        destinations = table.destination[table.first[index] : table.first[index + 1]].tolist()
        many[index] = not any(
            (step, rank, place) in read or last_written[rank, place] > step
            for rank in destinations
            for place in range(chunk, chunk + count)
        )
    chunks = np.where(many, table.count, 0).astype(np.int64)
    return np.where(many, np.cumsum(chunks) - chunks, -1).astype(np.int64)
