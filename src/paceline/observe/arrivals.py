"""Who arrives when: what rank 0 has seen of the arrivals at a group's large all-reduces, and what it says of each rank.

Times are of rank 0's clock alone, taken by its progress thread, so clocks need not agree and a late training thread
does not hide the arrivals of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Raw = tuple[int, int, int, str, tuple[float, ...]]
"""As the engine has it: decision number, collective, bytes, choice, seconds after the first arrival by rank."""

_NOTICEABLE_S = 0.02
"""A rank counts as late in a step when it comes so much later than the median rank."""

_STEPS, _LEAST_STEPS, _MOSTLY = 20, 5, 0.8
"""People are told of a rank that is late in most of its last 20 steps; after 5 steps, not earlier."""


@dataclass(frozen=True)
class Arrival:
    """One collective: its number in the group, its size, what was decided for it, and when each rank came."""

    seq: int
    size_bytes: int
    choice: str
    late_s: tuple[float, ...]


@dataclass(frozen=True)
class Lateness:
    """How one rank arrived in the last steps, in seconds behind the median rank: typical, and its spread."""

    rank: int
    steps: int
    times_late: int
    median_s: float
    low_s: float
    high_s: float

    @property
    def mostly(self) -> bool:
        """Whether people should hear of it."""
        return self.steps >= _LEAST_STEPS and self.times_late >= _MOSTLY * self.steps

    def __str__(self) -> str:
        """Like "rank 3 arrives 212 ms late in 19 of 20 steps"."""
        return f"rank {self.rank} arrives {self.median_s * 1e3:.0f} ms late in {self.times_late} of {self.steps} steps"


def arrival(raw: Raw) -> Arrival:
    """From the engine's record."""
    _, seq, size_bytes, choice, late_s = raw
    return Arrival(seq, size_bytes, choice, tuple(late_s))


def lateness(arrivals: Sequence[Arrival], steps: int = _STEPS) -> list[Lateness]:
    """The lateness of each rank in the last steps. ``low_s`` and ``high_s`` hold the middle four fifths."""
    recent = arrivals[-steps:]
    if not recent:
        return []
    behind = [[seconds - median(seen.late_s) for seconds in seen.late_s] for seen in recent]
    summary = []
    for rank in range(len(recent[0].late_s)):
        column = sorted(row[rank] for row in behind)
        edge = len(column) // 10
        late = [seconds for seconds in column if seconds > _NOTICEABLE_S]
        summary.append(
            Lateness(
                rank=rank,
                steps=len(column),
                times_late=len(late),
                median_s=median(late or column),
                low_s=column[edge],
                high_s=column[-1 - edge],
            )
        )
    return summary


def metrics(arrivals: Sequence[Arrival]) -> dict[str, float]:
    """The same as flat numbers, for whatever collects metrics: ``paceline_late_seconds{rank="3"}`` and so on."""
    numbers: dict[str, float] = {"paceline_decisions_total": float(len(arrivals))}
    numbers["paceline_decisions_for_late_ranks_total"] = float(sum(seen.choice != "" for seen in arrivals))
    for one in lateness(arrivals):
        label = f'{{rank="{one.rank}"}}'
        numbers[f"paceline_late_seconds{label}"] = one.median_s
        numbers[f"paceline_late_low_seconds{label}"] = one.low_s
        numbers[f"paceline_late_high_seconds{label}"] = one.high_s
        numbers[f"paceline_late_share{label}"] = one.times_late / one.steps
    return numbers


def news(before: frozenset[int], summary: Sequence[Lateness]) -> tuple[frozenset[int], list[str]]:
    """Who is mostly late now, and what to tell people: only what has changed since ``before``."""
    late = frozenset(one.rank for one in summary if one.mostly)
    still = frozenset(one.rank for one in summary if one.rank in before and 2 * one.times_late >= one.steps)
    lines = [str(one) for one in summary if one.rank in late - before]
    lines += [f"rank {rank} arrives in time again" for rank in sorted(before - late - still)]
    return late | still, lines
