"""The table of a demonstration: a column a training, a row a question."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.markup import escape
from rich.table import Table

from paceline.demo import figures
from paceline.demo.figures import Training
from paceline.units import format_duration

TARGET = 0.95
_LARGE_BYTES = 1 << 18
_CHOSEN = re.compile(r"(?P<kind>\w+) up to (?P<bytes>\d+) bytes(?:, late (?P<late>[\d:,]+))?: (?P<name>\w+).*")
_FOR_GRADIENTS = ("allreduce", "reducescatter", "allgather")


def results_table(trainings: Sequence[Training]) -> Table:
    """All trainings side by side; the first is what the others are compared with."""
    table = Table(header_style="bold")
    table.add_column("")
    for training in trainings:
        table.add_column(training.strategy.value)
    first = trainings[0]
    rows: dict[str, Callable[[Training], str]] = {
        "iteration (median)": lambda one: _against(figures.iteration_s(one), figures.iteration_s(first)),
        f"time to {TARGET:.0%} accuracy while training": lambda one: _reached(one),
        "whole training": lambda one: _against(figures.total_s(one), figures.total_s(first)),
        "exposed communication an iteration": lambda one: format_duration(figures.exposed_s(one)),
        "who was late (measured here)": _who_was_late,
        "who was late (as the backend says)": lambda one: escape("; ".join(one.finished[0].told)) or "-",
        "algorithms for gradients": _algorithms,
        "accuracy on held-out digits": lambda one: f"{one.finished[0].accuracy:.2%}",
        "largest difference of a weight": lambda one: "-" if one is first else f"{one.finished[0].away:.1e}",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(training) for training in trainings))
    return table


def large_algorithms(lines: Sequence[str]) -> list[str]:
    """Of what a backend says it has chosen, what carried gradients, like ``allreduce, rank 3 late: stragglar``."""
    matches = [match for line in lines if (match := _CHOSEN.fullmatch(line))]
    large = [one for one in matches if int(one["bytes"]) >= _LARGE_BYTES and one["kind"] in _FOR_GRADIENTS]
    return list(dict.fromkeys(f"{one['kind']}{_late(one['late'])}: {one['name']}" for one in large))


def _late(choice: str | None) -> str:
    """``, rank 3 late`` for the choice ``3:181``: by how much is in another row."""
    ranks = [entry.partition(":")[0] for entry in choice.split(",")] if choice else []
    return f", rank {' and '.join(ranks)} late" if ranks else ""


def same_accuracy(trainings: Sequence[Training]) -> bool:
    """Whether all trainings read equally many held-out digits right."""
    return len({one.finished[0].accuracy for one in trainings}) == 1


def _against(seconds: float, first_s: float) -> str:
    words = format_duration(seconds)
    return words if seconds in (0.0, first_s) else f"{words} ({first_s / seconds:.2f}x)"


def _reached(training: Training) -> str:
    seconds = figures.reached_s(training, TARGET)
    return "not reached" if seconds is None else format_duration(seconds)


def _algorithms(training: Training) -> str:
    return escape("\n".join(large_algorithms(training.finished[0].algorithms))) or "Gloo's own"


def _who_was_late(training: Training) -> str:
    rank, seconds = figures.latest(training)
    return f"rank {rank}, by {format_duration(seconds)}"
