"""The part of a proven schedule that one rank plays, in the form the C++ engine takes.

A row of the program says at which step this rank sends to or receives from which peer which chunks. The engine orders
reads and writes of each chunk by these steps and runs everything else as data arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.ir.schedule import Schedule
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
    return Program(
        rank=rank,
        num_ranks=schedule.num_ranks,
        num_chunks=schedule.num_chunks,
        digest=int(schedule.digest[:16], 16),
        name=schedule.algorithm if name is None else name,
        rows=rows(schedule, rank),
        in_order=in_order,
        in_turn=in_turn,
    )


def rows(schedule: Schedule, rank: int) -> npt.NDArray[np.int64]:
    """One row a transfer and peer: step, peer, first chunk, chunks, whether we receive, whether we reduce.

    A transfer with many destinations is as many rows of its source.
    """
    table = schedule.transfers
    transfer = np.repeat(np.arange(len(table)), table.fanout)  # of each destination
    source = table.source[transfer]
    mine = np.flatnonzero((source == rank) | (table.destination == rank))
    index = transfer[mine]
    receives = table.destination[mine] == rank
    peer = np.where(receives, source[mine], table.destination[mine])
    columns = (table.step[index], peer, table.chunk[index], table.count[index], receives, table.reduce[index])
    return np.stack([column.astype(np.int64) for column in columns], axis=1)
