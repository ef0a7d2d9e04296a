"""Transfers: the rows a schedule is made of, held in columns, and the ways to put them together.

A transfer says: at *step* s, rank *source* sends chunks [chunk, chunk + count) to *destinations*, which copy
them over what they have or reduce them into it. Steps order reads and writes, nothing else: **a step reads
before it writes**. A transfer reads what the earlier steps have written; transfers of one step that write the
same chunk of the same rank do so in the order of the table. At run time there are no rounds: a transfer may
start as soon as the earlier transfers it depends on are done.

Consecutive transfers of one step with the same source and the same single destination travel as one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.errors import ScheduleError
from paceline.ir.collective import IntArray

BoolArray = npt.NDArray[np.bool_]
OffsetArray = npt.NDArray[np.int64]
Labels = Sequence[int] | npt.NDArray[np.integer]
_Scalar = TypeVar("_Scalar", bound=np.generic)


class Transfer(NamedTuple):
    """One row, for reading and for writing small schedules by hand."""

    step: int
    source: int
    destinations: tuple[int, ...]
    chunk: int
    count: int  # type: ignore[assignment]  # shadows tuple.count, which nobody asks of a transfer
    reduce: bool

    def __str__(self) -> str:
        """``rank 2 -> rank 5, chunk 4, reduce``."""
        to = ", ".join(map(str, self.destinations[:8])) + (", ..." if len(self.destinations) > 8 else "")
        ranks = "rank" if len(self.destinations) == 1 else "ranks"
        chunks = f"chunk {self.chunk}" if self.count == 1 else f"chunks {self.chunk}-{self.chunk + self.count - 1}"
        return f"rank {self.source} -> {ranks} {to}, {chunks}, {'reduce' if self.reduce else 'copy'}"


@dataclass(frozen=True)
class Moves:
    """Transfers taken apart: one row for each chunk at each destination."""

    transfer: IntArray
    step: IntArray
    source: IntArray
    destination: IntArray
    chunk: IntArray
    reduce: BoolArray

    def __len__(self) -> int:
        return len(self.chunk)


class Transfers:
    """An immutable table of transfers, sorted by step, steps numbered 0, 1, 2, ... without gaps.

    ``destination[first[i]:first[i + 1]]`` are the destinations of transfer i; all other columns have one entry
    a transfer.
    """

    __slots__ = ("chunk", "count", "destination", "first", "reduce", "source", "step")

    def __init__(
        self,
        *,
        step: npt.ArrayLike,
        source: npt.ArrayLike,
        destination: npt.ArrayLike,
        chunk: npt.ArrayLike,
        count: npt.ArrayLike = 1,
        reduce: npt.ArrayLike = False,
        first: npt.ArrayLike | None = None,
    ) -> None:
        """Take columns; scalars are broadcast. Without ``first``, each transfer has one destination."""
        columns = [_integers(column) for column in (step, source, chunk, count)]
        flags = np.asarray(reduce, np.bool_)
        to = _integers(destination)
        *columns, flags = np.broadcast_arrays(*columns, flags, *([to] if first is None else []))[:5]
        steps, sources, chunks, counts = (column.ravel() for column in columns)
        flags = flags.ravel()
        if first is None:
            to = np.broadcast_to(to, columns[0].shape).ravel()
            offsets = np.arange(len(steps) + 1, dtype=np.int64)
        else:
            to = to.ravel()
            offsets = np.asarray(first, np.int64)
            if len(offsets) != len(steps) + 1 or offsets[0] != 0 or offsets[-1] != len(to):
                raise ScheduleError("the destinations do not match the number of transfers")
            if (np.diff(offsets) < 1).any():
                raise ScheduleError("every transfer needs at least one destination")
        if len(steps) and (np.diff(steps) < 0).any():
            order = np.argsort(steps, kind="stable")
            to, offsets = _gather_runs(to, offsets, order)
            steps, sources, chunks, counts = (column[order] for column in (steps, sources, chunks, counts))
            flags = flags[order]
        if len(steps):
            steps = np.concatenate(([0], np.cumsum(np.diff(steps) != 0))).astype(np.int32)
        self.step: IntArray = _frozen(steps)
        self.source: IntArray = _frozen(sources)
        self.chunk: IntArray = _frozen(chunks)
        self.count: IntArray = _frozen(counts)
        self.reduce: BoolArray = _frozen(flags)
        self.destination: IntArray = _frozen(to)
        self.first: OffsetArray = _frozen(offsets)

    @classmethod
    def from_rows(cls, rows: Iterable[Transfer]) -> Transfers:
        """A table from rows: convenient for a few thousand, slow for millions."""
        table = list(rows)
        return cls(
            step=[row.step for row in table],
            source=[row.source for row in table],
            destination=[rank for row in table for rank in row.destinations],
            chunk=[row.chunk for row in table],
            count=[row.count for row in table],
            reduce=[row.reduce for row in table],
            first=np.cumsum([0] + [len(row.destinations) for row in table]),
        )

    @classmethod
    def none(cls) -> Transfers:
        """No transfers: a collective of one rank."""
        return cls(step=[], source=[], destination=[], chunk=[], count=[], reduce=[])

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, index: int) -> Transfer:
        index = range(len(self))[index]
        destinations = self.destination[self.first[index] : self.first[index + 1]]
        return Transfer(
            int(self.step[index]),
            int(self.source[index]),
            tuple(destinations.tolist()),
            int(self.chunk[index]),
            int(self.count[index]),
            bool(self.reduce[index]),
        )

    def __iter__(self) -> Iterator[Transfer]:
        return (self[index] for index in range(len(self)))

    @property
    def num_steps(self) -> int:
        """How many steps there are."""
        return int(self.step[-1]) + 1 if len(self) else 0

    @property
    def fanout(self) -> OffsetArray:
        """How many destinations each transfer has."""
        return np.diff(self.first)

    @property
    def unicast(self) -> bool:
        """Whether each transfer has just one destination."""
        return len(self.destination) == len(self)

    def opens_message(self) -> BoolArray:
        """For each transfer: does it open a new message, or travel in the message of the one before it?"""
        opens = np.ones(len(self), np.bool_)
        if len(self) > 1:
            to, single = self.destination[self.first[:-1]], self.fanout == 1
            opens[1:] = (np.diff(self.step) != 0) | (np.diff(self.source) != 0) | (np.diff(to) != 0)
            opens[1:] |= ~(single[1:] & single[:-1])
        return opens

    def moves(self, from_chunk: int, to_chunk: int) -> Moves:
        """Every single chunk in [from_chunk, to_chunk) at every single destination, in the order of the table."""
        begin = np.maximum(self.chunk, from_chunk)
        length = np.minimum(self.chunk + self.count, to_chunk) - begin
        if self.unicast and (length == 1).all():
            rows = np.arange(len(self), dtype=np.int32)
            return Moves(rows, self.step, self.source, self.destination, begin, self.reduce)
        length = np.maximum(length, 0)
        fan_row = np.repeat(np.arange(len(self), dtype=np.int32), self.fanout)
        pick = np.repeat(np.arange(len(fan_row)), length[fan_row])
        row = fan_row[pick]
        ends = np.cumsum(length[fan_row])
        within = np.arange(len(pick)) - (ends - length[fan_row])[pick]
        chunk = (begin[row] + within).astype(np.int32)
        return Moves(row, self.step[row], self.source[row], self.destination[pick], chunk, self.reduce[row])

    def selected(self, keep: BoolArray) -> Transfers:
        """The transfers for which ``keep`` holds."""
        rows = np.flatnonzero(keep)
        to, first = _gather_runs(self.destination, self.first, rows)
        return Transfers(
            step=self.step[rows],
            source=self.source[rows],
            destination=to,
            chunk=self.chunk[rows],
            count=self.count[rows],
            reduce=self.reduce[rows],
            first=first,
        )

    def relabelled(
        self,
        *,
        ranks: Labels | None = None,
        chunks: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> Transfers:
        """The same transfers among other ranks and chunks: rank r becomes ranks[r], chunk c chunks[c].

        chunks[c] may be a list: then each transfer of chunk c becomes one message of all of those. Runs of chunks are
        taken apart when chunks are relabelled, as their images need not be neighbours.
        """
        source, destination = self.source, self.destination
        if ranks is not None:
            rank_table = np.asarray(ranks, np.int32)
            source, destination = rank_table[source], rank_table[destination]
        row, chunk, count = np.arange(len(self)), self.chunk, self.count
        if chunks is not None:
            lists = [[c] if isinstance(c, (int, np.integer)) else list(c) for c in chunks]
            length = np.array([len(images) for images in lists], np.int64)
            flat = np.array([image for images in lists for image in images], np.int32)
            taken = np.repeat(row, count)
            within = np.arange(len(taken)) - np.repeat(np.cumsum(count) - count, count)
            old_chunk = chunk[taken] + within
            chunk, _ = _gather_runs(flat, np.concatenate(([0], np.cumsum(length))), old_chunk)
            row, count = np.repeat(taken, length[old_chunk]), np.ones(len(chunk), np.int32)
        to, first = _gather_runs(destination, self.first, row)
        return Transfers(
            step=self.step[row],
            source=source[row],
            destination=to,
            chunk=chunk,
            count=count,
            reduce=self.reduce[row],
            first=first,
        )

    def mirrored(self, *, reduce: bool) -> Transfers:
        """Time and direction reversed: an all-gather becomes a reduce-scatter, a broadcast a reduce.

        Right whenever each rank receives each chunk at most once: the tree that spreads a chunk from its root
        then collects it into the root.
        """
        if not self.unicast:
            raise ScheduleError("a multicast transfer cannot be mirrored")
        return Transfers(
            step=self.num_steps - 1 - self.step[::-1],
            source=self.destination[::-1],
            destination=self.source[::-1],
            chunk=self.chunk[::-1],
            count=self.count[::-1],
            reduce=reduce,
        )

    @classmethod
    def sequence(cls, parts: Sequence[Transfers]) -> Transfers:
        """One part after the other: steps of a part come after all steps of the parts before it."""
        starts = np.cumsum([0] + [part.num_steps for part in parts])
        return cls._joined(parts, [part.step + start for part, start in zip(parts, starts, strict=False)])

    @classmethod
    def overlay(cls, parts: Sequence[Transfers]) -> Transfers:
        """All parts at once: step s of the whole is step s of each part."""
        return cls._joined(parts, [part.step for part in parts])

    @classmethod
    def _joined(cls, parts: Sequence[Transfers], steps: Sequence[npt.NDArray[np.integer]]) -> Transfers:
        if not parts:
            return cls.none()
        fanout = np.concatenate([part.fanout for part in parts])
        return cls(
            step=np.concatenate(steps),
            source=np.concatenate([part.source for part in parts]),
            destination=np.concatenate([part.destination for part in parts]),
            chunk=np.concatenate([part.chunk for part in parts]),
            count=np.concatenate([part.count for part in parts]),
            reduce=np.concatenate([part.reduce for part in parts]),
            first=np.concatenate(([0], np.cumsum(fanout))),
        )


def _integers(column: npt.ArrayLike) -> IntArray:
    """The column as 32-bit integers, if that is what it holds."""
    try:
        array = np.asarray(column)
    except (OverflowError, ValueError):
        array = np.array(["?"])
    if array.dtype == np.int32 or array.size == 0:
        return array.astype(np.int32, copy=False)
    limits = np.iinfo(np.int32)
    if array.dtype.kind not in "iu" or array.min() < limits.min or array.max() > limits.max:
        raise ScheduleError("the columns of a table of transfers hold whole numbers of at most 32 bits")
    return array.astype(np.int32)


def _frozen(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    array = np.ascontiguousarray(array)
    if array.base is not None:
        array = array.copy()
    array.flags.writeable = False
    return array


def _gather_runs(values: IntArray, first: OffsetArray, rows: npt.NDArray[np.integer]) -> tuple[IntArray, OffsetArray]:
    """The runs values[first[i]:first[i+1]] for i in rows, one after the other, and their offsets."""
    if len(values) == len(first) - 1 and first[-1] == len(values) and (np.diff(first) == 1).all():
        return values[rows], np.arange(len(rows) + 1, dtype=np.int64)
    length = np.diff(first)[rows]
    offsets = np.concatenate(([0], np.cumsum(length)))
    pick = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - first[rows], length)
    return values[pick], offsets
