"""Late ranks: how ``--late`` and ``PACELINE_LAB_LATE`` are written, and how late this process is.

The lab does not slow anybody down. It tells every host who is late, in the variable ``PACELINE_LAB_LATE``
(``3:500ms,5:1s``; default: nobody), and programs that want to show what lateness does sleep before each collective
or step::

    time.sleep(paceline.lab.late_s())
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.units import parse_duration

VARIABLE = "PACELINE_LAB_LATE"
_ENTRY = re.compile(r"\s*([0-9]{1,6}):(.+)")


def parse_late(text: str) -> dict[int, float]:
    """Seconds a rank: ``parse_late("3:500ms,5:1s") == {3: 0.5, 5: 1.0}``; nobody is late when the text is empty."""
    late: dict[int, float] = {}
    for entry in text.split(",") if text.strip() else []:
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise UsageError(f"lateness is written RANK:DURATION, like 3:500ms, not {entry!r}")
        rank = int(match.group(1))
        if rank in late:
            raise UsageError(f"rank {rank} is said to be late twice; name it once")
        late[rank] = parse_duration(match.group(2))
    return late


def format_late(late_s: Mapping[int, float]) -> str:
    """What :func:`parse_late` reads: ranks in order, in microseconds or coarser."""
    return ",".join(f"{rank}:{_duration(late)}" for rank, late in sorted(late_s.items()) if late > 0)


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1_000)):
        if seconds * factor == round(seconds * factor):
            return f"{round(seconds * factor)}{unit}"
    return f"{seconds * 1e6:.3f}us"


def late_s() -> float:
    """How late this process is meant to be, in seconds; 0.0 when nobody said so."""
    try:
        late = parse_late(os.environ.get(VARIABLE, ""))
    except UsageError as error:
        raise UsageError(f"{VARIABLE} makes no sense: {error}") from None
    if not late:
        return 0.0
    rank = os.environ.get("RANK", "")
    if not rank.isdecimal():
        raise UsageError(
            f"{VARIABLE} is set, but RANK is {rank!r}, so nobody knows whether this process is late; "
            "start it with paceline lab or torchrun, or unset the variable"
        )
    return late.get(int(rank), 0.0)
