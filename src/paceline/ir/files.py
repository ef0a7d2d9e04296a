"""Schedules as files: JSON that people and other tools can read, and the same in compact MessagePack.

The format is described in docs/schedule_format.md. A file is checked completely before anything large is made of it:
the decoder knows the type and range of every field, and :class:`Schedule` checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.errors import FileFormatError, ScheduleError, UsageError
from paceline.ir.collective import MAX_CHUNKS, MAX_RANKS, Collective, Kind
from paceline.ir.reading import plain, read_at_most
from paceline.ir.schedule import MAX_MOVES, Schedule
from paceline.ir.transfers import Transfers

FORMAT, VERSION = "paceline.schedule", 1
_MAX_FILE_BYTES = 512 << 20
_MAX_JSON_BYTES = 80 << 20  # a decoder may need thirty times as much

_Step = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
_Chunk = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHUNKS)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNKS)]
_Name = Annotated[str, msgspec.Meta(max_length=100)]
_T = TypeVar("_T")


class _Header(msgspec.Struct):
    format: str
    version: int


class _CollectiveEntry(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    root: _Rank = 0


class _JsonTransfers(msgspec.Struct, forbid_unknown_fields=True):
    step: list[_Step]
    source: list[_Rank]
    destination: list[_Rank | list[_Rank]]
    chunk: list[_Chunk]
    count: list[_Count]
    reduce: list[bool]


class _PackedTransfers(msgspec.Struct, forbid_unknown_fields=True):
    step: bytes
    source: bytes
    destination: bytes
    fanout: bytes
    chunk: bytes
    count: bytes
    reduce: bytes


class _JsonFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    algorithm: _Name
    collective: _CollectiveEntry
    num_chunks: _Count
    transfers: _JsonTransfers


class _PackedFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    algorithm: _Name
    collective: _CollectiveEntry
    num_chunks: _Count
    transfers: _PackedTransfers


def save(schedule: Schedule, path: str | Path) -> None:
    """Write the schedule: JSON to a ``.json`` file, MessagePack to a ``.msgpack`` file."""
    path = Path(path)
    check_schedule_path(path)
    data = to_json(schedule) if path.suffix == ".json" else to_msgpack(schedule)
    if path.suffix == ".json" and len(data) > _MAX_JSON_BYTES:
        raise UsageError(f"{path} would be larger than {_MAX_JSON_BYTES >> 20} MiB: save it as .msgpack")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def check_schedule_path(path: Path) -> None:
    """Refuse a name we cannot save to before anything is computed."""
    if path.suffix not in (".json", ".msgpack"):
        raise UsageError(f"a schedule is saved as .json or as .msgpack, not as {path.name}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def load(path: str | Path) -> Schedule:
    """Read a schedule of either form. It is well-formed; whether it is right, ``verify`` says."""
    path = Path(path)
    data = read_at_most(path, _MAX_FILE_BYTES)
    try:
        return from_bytes(data)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from None


def to_json(schedule: Schedule) -> bytes:
    """The readable form."""
    table = schedule.transfers
    destination: list[int | list[int]] = table.destination.tolist()
    if not table.unicast:
        first = table.first.tolist()
        groups = [table.destination[a:b].tolist() for a, b in pairwise(first)]
        destination = [group[0] if len(group) == 1 else group for group in groups]
    transfers = _JsonTransfers(
        table.step.tolist(),
        table.source.tolist(),
        destination,
        table.chunk.tolist(),
        table.count.tolist(),
        table.reduce.tolist(),
    )
    return msgspec.json.encode(
        _JsonFile(FORMAT, VERSION, schedule.algorithm, _entry(schedule), schedule.num_chunks, transfers)
    )


def to_msgpack(schedule: Schedule) -> bytes:
    """The compact form: the same fields, columns as little-endian 32-bit integers (reduce: bytes 0 and 1)."""
    table = schedule.transfers
    columns = (table.step, table.source, table.destination, table.fanout, table.chunk, table.count)
    step, source, destination, fanout, chunk, count = (column.astype("<i4").tobytes() for column in columns)
    reduce = table.reduce.astype(np.uint8).tobytes()
    transfers = _PackedTransfers(step, source, destination, fanout, chunk, count, reduce)
    return msgspec.msgpack.encode(
        _PackedFile(FORMAT, VERSION, schedule.algorithm, _entry(schedule), schedule.num_chunks, transfers)
    )


def from_bytes(data: bytes) -> Schedule:
    """A schedule from either form, told apart by the first byte."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data[:4096].lstrip()[:1] == b"{":
        if len(data) > _MAX_JSON_BYTES:
            raise FileFormatError(f"JSON may have {_MAX_JSON_BYTES >> 20} MiB here: save large schedules as .msgpack")
        return _from_json(data)
    return _from_msgpack(data)


def _entry(schedule: Schedule) -> _CollectiveEntry:
    collective = schedule.collective
    return _CollectiveEntry(collective.kind, collective.num_ranks, collective.root)


def _decode(data: bytes, decoder: Callable[..., Any], shape: type[_T]) -> _T:
    try:
        header = decoder(data, type=_Header)
        if header.format != FORMAT:
            raise FileFormatError(f"its format is {plain(header.format, 50)!r}, and only {FORMAT!r} is understood")
        if header.version != VERSION:
            raise FileFormatError(f"its version is {header.version}; this Paceline reads version {VERSION}")
        content: _T = decoder(data, type=shape)
        return content
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FileFormatError(f"it is not a schedule file: {plain(str(error))}") from None


def _from_json(data: bytes) -> Schedule:
    content = _decode(data, msgspec.json.decode, _JsonFile)
    rows = content.transfers
    groups = [[to] if isinstance(to, int) else to for to in rows.destination]
    return _schedule(
        content,
        step=rows.step,
        source=rows.source,
        chunk=rows.chunk,
        count=rows.count,
        reduce=rows.reduce,
        destination=[rank for group in groups for rank in group],
        fanout=[len(group) for group in groups],
    )


def _from_msgpack(data: bytes) -> Schedule:
    content = _decode(data, msgspec.msgpack.decode, _PackedFile)
    rows = content.transfers
    if any(
        len(column) % 4 for column in (rows.step, rows.source, rows.destination, rows.fanout, rows.chunk, rows.count)
    ):
        raise FileFormatError("a column of 32-bit integers has a length that is not a multiple of 4 bytes")
    if rows.reduce.strip(b"\x00\x01"):
        raise FileFormatError("the column reduce has bytes other than 0 and 1")
    return _schedule(
        content,
        step=_column(rows.step),
        source=_column(rows.source),
        chunk=_column(rows.chunk),
        count=_column(rows.count),
        reduce=np.frombuffer(rows.reduce, np.uint8).astype(np.bool_),
        destination=_column(rows.destination),
        fanout=_column(rows.fanout),
    )


def _column(data: bytes) -> npt.NDArray[np.int32]:
    return np.frombuffer(data, "<i4").astype(np.int32)


def _schedule(content: _JsonFile | _PackedFile, *, fanout: npt.ArrayLike, **columns: npt.ArrayLike) -> Schedule:
    """Make the schedule; every column must tell of the same number of transfers, in the order of their steps."""
    lengths = {name: np.size(column) for name, column in columns.items() if name != "destination"}
    lengths["destination"] = np.size(fanout)
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in sorted(lengths.items()))
        raise FileFormatError(f"its columns tell of different numbers of transfers: {told}")
    if np.size(columns["destination"]) > MAX_MOVES:
        raise FileFormatError(f"it moves more than the {MAX_MOVES} chunks that a schedule may move")
    step, fan = np.asarray(columns["step"], np.int32), np.asarray(fanout, np.int64)
    if (step < 0).any():
        raise FileFormatError(f"the step of transfer {int(np.argmax(step < 0))} is negative")
    if (np.diff(step) < 0).any():
        raise FileFormatError(f"the steps of transfers {int(np.argmax(np.diff(step) < 0))} and the next go back")
    if not content.algorithm.isprintable():
        raise FileFormatError("the algorithm's name has characters that cannot be printed")
    try:
        collective = Collective(content.collective.kind, content.collective.num_ranks, content.collective.root)
        table = Transfers(first=np.concatenate(([0], np.cumsum(fan))), **columns)
        return Schedule(collective, content.num_chunks, table, content.algorithm)
    except ScheduleError as error:
        raise FileFormatError(str(error)) from None
