"""A schedule: a collective, the number of chunks its buffer is cut into, and the transfers that carry it out.

This is the whole language. An algorithm returns one, ``verify`` proves it, ``cost`` prices it, an engine runs it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import ScheduleError
from paceline.ir.collective import Collective
from paceline.ir.transfers import Transfer, Transfers

MAX_MOVES = 1 << 24
"""Most single chunks a schedule may move, as many as a ring of 2896 ranks: it bounds memory, for hostile files too."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Well-formed by construction (ranks, chunks and steps in range); whether it is *right*, verify says.

    >>> swap = Schedule(Collective(Kind.ALL_REDUCE, 2), 1, Transfers(step=0, source=[0, 1],
    ...                 destination=[1, 0], chunk=0, reduce=True), algorithm="swap")
    """

    collective: Collective
    num_chunks: int
    transfers: Transfers = field(repr=False)
    algorithm: str = "unnamed"

    def __post_init__(self) -> None:
        """Check every range, so that nobody after us has to."""
        self.collective.check_num_chunks(self.num_chunks)
        table, ranks = self.transfers, self.collective.num_ranks
        wrong_count = (table.count < 1) | (table.count > self.num_chunks)
        wrong_chunk = (table.chunk < 0) | (table.chunk > self.num_chunks - table.count)
        self._refuse(wrong_count | wrong_chunk, f"its chunks are not among the {self.num_chunks} of the schedule")
        self._refuse((table.source < 0) | (table.source >= ranks), f"its source is not one of the {ranks} ranks")
        fan_row = np.repeat(np.arange(len(table)), table.fanout)
        outside = (table.destination < 0) | (table.destination >= ranks)
        self._refuse(_any_of(fan_row, outside, len(table)), f"a destination is not one of the {ranks} ranks")
        to_itself = table.destination == table.source[fan_row]
        self._refuse(_any_of(fan_row, to_itself, len(table)), "a rank cannot send to itself")
        if not table.unicast:
            order = np.lexsort((table.destination, fan_row))
            to, row = table.destination[order], fan_row[order]
            twice = np.concatenate(([False], (np.diff(to) == 0) & (np.diff(row) == 0)))
            self._refuse(_any_of(row, twice, len(table)), "it names a destination twice")
        if self.num_moves > MAX_MOVES:
            raise ScheduleError(f"{self.num_moves} chunk moves are more than the {MAX_MOVES} a schedule may have")

    def _refuse(self, wrong: npt.NDArray[Any], why: str) -> None:
        if wrong.any():
            index = int(np.argmax(wrong))
            raise ScheduleError(f"transfer {index} ({self.transfers[index]}) of {self.collective}: {why}")

    @classmethod
    def from_rows(
        cls, collective: Collective, num_chunks: int, rows: Iterable[Transfer], *, algorithm: str = "unnamed"
    ) -> Schedule:
        """A schedule from single transfers: the short way for small ones."""
        return cls(collective, num_chunks, Transfers.from_rows(rows), algorithm)

    @property
    def num_ranks(self) -> int:
        """Ranks 0 .. num_ranks - 1 take part."""
        return self.collective.num_ranks

    @property
    def num_steps(self) -> int:
        """Length of the logical clock."""
        return self.transfers.num_steps

    @cached_property
    def num_moves(self) -> int:
        """Single chunks that arrive somewhere, all destinations counted."""
        return int((self.transfers.count.astype(np.int64) * self.transfers.fanout).sum())

    @cached_property
    def digest(self) -> str:
        """Equal for schedules with the same meaning and the same rows; the name does not count."""
        state = hashlib.blake2b(digest_size=16)
        state.update(repr((self.collective, self.num_chunks)).encode())
        table = self.transfers
        for column in (
            table.step,
            table.source,
            table.chunk,
            table.count,
            table.reduce,
            table.destination,
            table.first,
        ):
            state.update(column.data)
        return state.hexdigest()


def _any_of(row: npt.NDArray[Any], wrong: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    """Which of the rows have at least one wrong entry."""
    result = np.zeros(num_rows, np.bool_)
    result[row[wrong]] = True
    return result
