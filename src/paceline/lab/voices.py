"""What the ranks of a run say: shown line by line behind the rank, and remembered where it may be an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TextIO

from paceline.units import format_duration

_COLOURS = ("36", "33", "32", "35", "34", "31", "96", "93")
_LONGEST_LINE_BYTES = 1 << 16
_MOST_REMEMBERED = 60
_LAST_LINES = 10
_TRACEBACK = "Traceback (most recent call last)"


def prefix(rank: int, stream: TextIO) -> str:
    """``[3] ``, coloured on a terminal unless NO_COLOR asks for none."""
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return f"[{rank}] "
    return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m[{rank}]\x1b[0m "


class Voice:
    """One stream of one rank."""

    def __init__(self, rank: int, stream: TextIO) -> None:
        self.rank = rank
        self.stream = stream
        self.remembered: list[str] = []
        self._rest = b""

    def say(self, data: bytes) -> None:
        """Show the lines that are complete; keep the rest until it is. No data means that there will be no more."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        if lines:
            text = [line.decode(errors="replace").removesuffix("\r") for line in lines]
            self._remember(text)
            start = prefix(self.rank, self.stream)
            self.stream.write("".join(f"{start}{line}\n" for line in text))
            self.stream.flush()

    def _remember(self, lines: list[str]) -> None:
        """From the first traceback on, which is the cause of those that follow; or else the last lines."""
        for line in lines:
            found = bool(self.remembered) and _TRACEBACK in self.remembered[0]
            if not found and _TRACEBACK in line:
                self.remembered = [line]
            elif not found:
                self.remembered = [*self.remembered[1 - _LAST_LINES :], line]
            elif len(self.remembered) < _MOST_REMEMBERED:
                self.remembered.append(line)


def show_failure(rank: int, words: str, error: Voice) -> None:
    """Say on standard error who failed first, and repeat what it said there."""
    repeated = "".join(f"{prefix(rank, sys.stderr)}{line}\n" for line in error.remembered)
    what_it_said = "; it said:\n" if repeated else ", without a word on standard error\n"
    sys.stderr.write(f"\npaceline lab: rank {rank} failed first, {words}{what_it_said}{repeated}")
    sys.stderr.flush()


def show_timeout(ranks: Iterable[int], timeout_s: float) -> None:
    """Say on standard error who was still running when time was up."""
    still = ", ".join(map(str, sorted(ranks)))
    sys.stderr.write(f"\npaceline lab: still running after {format_duration(timeout_s)}, and ended: ranks {still}\n")
    sys.stderr.flush()
