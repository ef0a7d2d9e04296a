"""What of communication was hidden behind computation: times of each bucket, a line for the log, events for a trace.

An operation is *in flight* from its launch until it was found done; *exposed* is the time in which somebody waited for
it. What was in flight and not waited for was hidden. Operations overlap, so a step's time in flight is the length of
the union of its intervals. An operation whose end nobody waited for counts until the moment somebody looked.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from paceline.units import format_duration, format_size

KEPT_STEPS = 100
"""How many steps a recorder remembers."""


@dataclass(slots=True)
class Flight:
    """One operation: which bucket, when it was launched, when and for how long it was waited for."""

    operation: str
    bucket: int
    size_bytes: int
    launched_s: float
    waited_s: float = 0.0
    done_s: float | None = None

    @property
    def exposed_s(self) -> float:
        """How long it was waited for."""
        return self.waited_s


@dataclass
class StepOverlap:
    """All flights of a step: reductions before step(), all-gathers after it."""

    step: int
    flights: list[Flight] = field(default_factory=list)

    @property
    def in_flight_s(self) -> float:
        """How long anything was under way."""
        return covered_s([(one.launched_s, one.done_s) for one in self.flights if one.done_s is not None])

    @property
    def exposed_s(self) -> float:
        """How long anybody waited."""
        return sum(one.waited_s for one in self.flights)

    @property
    def hidden_s(self) -> float:
        """How long communication went on while nobody waited."""
        return max(0.0, self.in_flight_s - self.exposed_s)

    def line(self) -> str:
        """For the log: the step, then each bucket's share of the waiting."""
        buckets = ", ".join(
            f"{one.operation} {one.bucket} ({format_size(one.size_bytes)}) {format_duration(one.waited_s)}"
            for one in sorted(self.flights, key=lambda one: -one.waited_s)
            if one.waited_s > 0
        )
        return (
            f"step {self.step}: communication {format_duration(self.in_flight_s)}, hidden "
            f"{format_duration(self.hidden_s)}, exposed {format_duration(self.exposed_s)}; "
            f"waited for {buckets or 'none'}"
        )


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals.

    >>> covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def trace_events(steps: Sequence[StepOverlap], rank: int) -> list[dict[str, object]]:
    """Chrome-trace events, for Perfetto or chrome://tracing: a process a rank, a row a bucket and operation."""
    return [
        {
            "name": f"{one.operation} {one.bucket}",
            "cat": "communication",
            "ph": "X",
            "pid": rank,
            "tid": f"{one.operation} {one.bucket}",
            "ts": one.launched_s * 1e6,
            "dur": (one.done_s - one.launched_s) * 1e6,
            "args": {"step": step.step, "size_bytes": one.size_bytes, "exposed_s": one.waited_s},
        }
        for step in steps
        for one in step.flights
        if one.done_s is not None
    ]


class Launched:
    """An operation under way, whose flight is told when it was waited for."""

    __slots__ = ("_flight", "_work")

    def __init__(self, work: dist.Work, flight: Flight) -> None:
        self._work = work
        self._flight = flight

    def is_completed(self) -> bool:
        """Whether waiting for it would take no time."""
        return self._work.is_completed()

    def wait(self) -> None:
        """Wait for its end; raises its error."""
        began_s, was_done = time.perf_counter(), self._work.is_completed()
        self._work.wait()
        if was_done:
            self._flight.done_s = began_s
        else:
            self._flight.done_s = time.perf_counter()
            self._flight.waited_s += self._flight.done_s - began_s


class Recorder:
    """Keeps the last steps. The all-gathers of a step end in the next iteration, so the current one is incomplete."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.steps: deque[StepOverlap] = deque([StepOverlap(0)], maxlen=KEPT_STEPS)

    def launched(self, operation: str, bucket: int, size_bytes: int, work: dist.Work) -> Launched:
        """An operation has gone off."""
        flight = Flight(operation, bucket, size_bytes, time.perf_counter())
        self.steps[-1].flights.append(flight)
        return Launched(work, flight)

    def next_step(self) -> StepOverlap | None:
        """Step() is over: what follows belongs to the next one. Returns the last that is complete."""
        self.steps.append(StepOverlap(self.steps[-1].step + 1))
        return self.steps[-3] if len(self.steps) > 2 else None

    def save(self, path: str | Path) -> None:
        """Write a Chrome trace of the steps remembered."""
        Path(path).write_text(json.dumps({"traceEvents": trace_events(list(self.steps), self._rank)}))
