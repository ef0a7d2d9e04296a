"""What a run found out, in the form it is saved in."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from paceline.bench.figures import Ratio, Summary
from paceline.bench.rank_process.messages import Pause
from paceline.errors import UsageError

ONE_HOST = "one host"  # the place of a run outside the lab


class Row(msgspec.Struct, frozen=True):
    """One contender at one point; a barrier has no bytes and no bandwidth, one host has no limit.

    ``share_of_limit`` is the limit over the median; ``over_subject`` compares its time with the subject's. Where ranks
    are late or pause, ``time`` begins when the last one calls, and ``arrival_s`` is the median time between first and
    last call. In a lab, ``sent_bytes`` and ``received_bytes`` are what crossed each host's port in a call, headers and
    the contender's barriers included.
    """

    contender: str
    num_ranks: int
    size_bytes: int
    count: int
    time: Summary
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    wrong: int
    limit_s: float | None
    share_of_limit: float | None
    over_subject: Ratio | None
    late_s: dict[int, float] = {}
    arrival_s: float | None = None
    pieces: int | None = None
    sent_bytes: list[float] = []
    received_bytes: list[float] = []

    @property
    def delay_s(self) -> float:
        """How late the latest rank was meant to be."""
        return max(self.late_s.values(), default=0.0)


class Machine(msgspec.Struct, frozen=True):
    """Where, when and by which command it was measured."""

    command: str
    date: str
    cores: int
    processor: str
    kernel: str
    python: str
    load_average: float

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        return cls(
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            cores=len(os.sched_getaffinity(0)),
            processor=_processor(),
            kernel=platform.release(),
            python=platform.python_version(),
            load_average=round(os.getloadavg()[0], 2),
        )


class Results(msgspec.Struct, frozen=True):
    """A whole run: the question, who took part, and a row for each point and contender.

    ``sweep`` is what was varied where ranks were late, ``memory`` where torch's tensors lay, ``pause`` what all ranks
    did before each call, ``beside`` the operation that ran at the same time, and ``loss`` the share of packets lost on
    the way to a host.
    """

    operation: str
    redop: str
    dtype: str
    num_ranks: int
    place: str
    subject: str
    versions: dict[str, dict[str, str]]
    environment: dict[str, dict[str, str]]
    rounds: int
    machine: Machine
    rows: list[Row]
    sweep: str | None = None
    memory: str = "torch"
    pause: Pause | None = None
    beside: str | None = None
    loss: float = 0.0

    @property
    def ranks(self) -> str:
        """How many there were, for people."""
        return "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} ranks"

    def of(self, contender: str, size_bytes: int | None = None) -> Row:
        """The row of a contender, at a size as it was measured, or its last."""
        rows = [row for row in self.rows if row.contender == contender and size_bytes in (None, row.size_bytes)]
        if not rows:
            raise UsageError(f"{contender} was not measured at {size_bytes} bytes")
        return rows[-1]

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        save_json(self, path)


def save_json(results: msgspec.Struct, path: Path) -> None:
    """Write the results of any bench, for people and programs."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
