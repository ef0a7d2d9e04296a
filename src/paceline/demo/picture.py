"""The picture of a demonstration: two iterations of the late rank in every training, below each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.demo.figures import Training, complement, iteration_s
from paceline.demo.messages import Step
from paceline.draw.timelines import Activity, Bar, Panel, draw_timelines
from paceline.units import format_duration

_SHOWN = 2


def draw_trainings(trainings: Sequence[Training], late_rank: int, words: str, path: Path) -> None:
    """Draw iterations late enough for habits to have been learnt."""
    panels = [panel_of(training, late_rank) for training in trainings]
    draw_timelines(panels, f"{_SHOWN} iterations of rank {late_rank}, which is late: {words}", path)


def panel_of(training: Training, late_rank: int) -> Panel:
    """Two iterations of the late rank, at two thirds of a training, and what all ranks did meanwhile."""
    first = max(0, min(2 * training.num_iterations // 3, training.num_iterations - _SHOWN - 1))
    late = training.steps[late_rank]
    after = late[first + _SHOWN :]
    begin_s, end_s = late[first].began_s, after[0].began_s if after else late[-1].ended_s
    bars = [
        [moved for bar in _bars(steps, training.waits[rank], training, rank) if (moved := _clip(bar, begin_s, end_s))]
        for rank, steps in enumerate(training.steps)
    ]
    marks = [step.began_s - begin_s for step in late[first : first + _SHOWN]]
    whose = "" if training.strategy.synchronous else " of a rank that is on time"
    title = f"{training.strategy.value}: {format_duration(iteration_s(training))} an iteration{whose}"
    return Panel(title, bars, marks)


def _bars(steps: Sequence[Step], waits: Sequence[tuple[float, float]], training: Training, rank: int) -> list[Bar]:
    bars = [Bar(Activity.WAITING, begin_s, end_s) for begin_s, end_s in waits]
    bars += [Bar(Activity.COMMUNICATING, one.launched_s, one.done_s) for one in training.flights[rank]]
    for step in steps:
        bars.append(Bar(Activity.LOADING, step.began_s, step.loaded_s))
        bars += [Bar(Activity.COMPUTING, *part) for part in complement(step.loaded_s, step.ended_s, waits)]
    return bars


def _clip(bar: Bar, begin_s: float, end_s: float) -> Bar | None:
    """The part of a bar that shows, on the picture's clock."""
    first_s, last_s = max(bar.begin_s, begin_s), min(bar.end_s, end_s)
    return Bar(bar.activity, first_s - begin_s, last_s - begin_s) if first_s < last_s else None
