"""Accounts of what was hidden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.train.dear.overlap import Flight, Recorder, StepOverlap, covered_s, trace_events


def test_a_union_of_intervals_counts_nothing_twice() -> None:
    assert covered_s([]) == 0
    assert covered_s([(3.0, 4.0), (0.0, 2.0), (1.0, 1.5), (1.5, 3.5)]) == 4.0


def _step() -> StepOverlap:
    flights = [
        Flight("reduce-scatter", 1, 2_000_000, 1.0, done_s=1.4),
        Flight("reduce-scatter", 0, 1_000_000, 1.2, waited_s=0.1, done_s=1.6),
        Flight("all-gather", 0, 1_000_000, 2.0, waited_s=0.25, done_s=2.5),
    ]
    return StepOverlap(7, flights)


def test_hidden_is_what_was_in_flight_and_not_waited_for() -> None:
    step = _step()
    assert step.in_flight_s == pytest.approx(1.1)
    assert step.exposed_s == pytest.approx(0.35)
    assert step.hidden_s == pytest.approx(0.75)
    assert step.line() == (
        "step 7: communication 1.1 s, hidden 750 ms, exposed 350 ms; waited for all-gather 0 (1 MB) 250 ms, "
        "reduce-scatter 0 (1 MB) 100 ms"
    )


def test_a_trace_has_an_event_for_each_operation() -> None:
    events = trace_events([_step()], rank=3)
    assert [event["name"] for event in events] == ["reduce-scatter 1", "reduce-scatter 0", "all-gather 0"]
    assert {event["pid"] for event in events} == {3}
    assert events[0]["dur"] == pytest.approx(0.4e6)


class Done:
    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def test_a_recorder_returns_steps_whose_all_gathers_are_over(tmp_path: Path) -> None:
    recorder = Recorder(0)
    work: Any = Done()
    launched = recorder.launched("all-gather", 0, 10, work)
    assert recorder.next_step() is None
    assert launched.is_completed()
    launched.wait()
    done = recorder.next_step()
    assert done is not None
    assert done.step == 0
    assert done.flights[0].waited_s == 0.0
    flight = done.flights[0]
    assert flight.done_s is not None
    assert done.in_flight_s == flight.done_s - flight.launched_s > 0
    recorder.save(tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 1
