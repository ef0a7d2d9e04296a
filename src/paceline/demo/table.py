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
TOLERANCE = 0.04
"""A decentralised training may read this share fewer of the held-out digits right: 14 of 360. Its ranks take the
batches in another order each time: ten trainings came to 95.3% to 97.5%, where the others come to 97.5%."""
_LARGE_BYTES = 1 << 18
_CHOSEN = re.compile(r"(?P<kind>\w+) up to (?P<bytes>\d+) bytes(?:, late (?P<late>[\d:,]+))?: (?P<name>\w+).*")
_FOR_GRADIENTS = ("allreduce", "reducescatter", "allgather")


def results_table(trainings: Sequence[Training]) -> Table:
    """All trainings side by side; the first is what the others are compared with."""
    table = Table(header_style="bold")
    table.add_column("", no_wrap=True)
    for training in trainings:
        table.add_column(training.strategy.value)
    first = trainings[0]
    rows: dict[str, Callable[[Training], str]] = {
        "iteration of a rank on time": lambda one: _iteration(one, first),
        "steps of late rank / of others": _steps,
        "images a second, all ranks": lambda one: _images(one, first),
        f"to {TARGET:.0%} accuracy while training": lambda one: _reached(one),
        "whole training": lambda one: _against(figures.total_s(one), figures.total_s(first)),
        "exposed comm. an iteration": _exposed,
        "who was late (measured here)": _who_was_late,
        "who was late (backend says)": lambda one: escape("; ".join(one.finished[0].told)) or "-",
        "algorithms": _algorithms,
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
    """Whether synchronous trainings read equally many held-out digits right, and decentralised ones about as many.

    About as many: at most ``TOLERANCE`` fewer. That is judged where the synchronous ones have come to ``TARGET``;
    before, the order of the batches and a few steps more or less make a larger difference.
    """
    together = {one.finished[0].accuracy for one in trainings if one.strategy.synchronous}
    apart = [one.finished[0].accuracy for one in trainings if not one.strategy.synchronous]
    lowest = min(together) - TOLERANCE if min(together) >= TARGET else 0.0
    return len(together) == 1 and all(accuracy >= lowest for accuracy in apart)


def _against(seconds: float, first_s: float) -> str:
    words = format_duration(seconds)
    return words if seconds in (0.0, first_s) else f"{words} ({first_s / seconds:.2f}x)"


def _iteration(training: Training, first: Training) -> str:
    """Compared only where all ranks make each iteration together."""
    seconds = figures.iteration_s(training)
    return _against(seconds, figures.iteration_s(first)) if training.strategy.synchronous else format_duration(seconds)


def _steps(training: Training) -> str:
    """``23 / 99 to 102``."""
    others = [len(steps) for steps in training.punctual]
    span = str(min(others)) if min(others) == max(others) else f"{min(others)} to {max(others)}"
    return f"{len(training.steps[training.late_rank])} / {span}"


def _images(training: Training, first: Training) -> str:
    rate, first_rate = figures.images_per_s(training), figures.images_per_s(first)
    return f"{rate:.0f}" if training is first else f"{rate:.0f} ({rate / first_rate:.2f}x)"


def _exposed(training: Training) -> str:
    words = format_duration(figures.exposed_s(training))
    if training.strategy.synchronous:
        return words
    return f"{words}; {format_duration(figures.ending_s(training))} at the end"


def _reached(training: Training) -> str:
    seconds = figures.reached_s(training, TARGET)
    return "not reached" if seconds is None else format_duration(seconds)


def _algorithms(training: Training) -> str:
    if not training.strategy.synchronous:
        sizes = [f"{number} of {size} ranks" for size, number in figures.num_averages(training).items()]
        return "averages: " + (", ".join(sizes) or "one, at the end")
    return escape("\n".join(large_algorithms(training.finished[0].algorithms))) or "Gloo's own"


def _who_was_late(training: Training) -> str:
    rank, seconds = figures.latest(training)
    return f"rank {rank}, by {format_duration(seconds)}"
