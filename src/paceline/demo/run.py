"""Runs a demonstration: a stage, ranks, and bars that show how far they are."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.demo import figures
from paceline.demo.crew import Crew
from paceline.demo.figures import Training
from paceline.demo.messages import Job, Strategy
from paceline.demo.places import Place, open_stage
from paceline.units import format_duration

NUM_RANKS, LATE_RANK = 4, 3


@dataclass(frozen=True)
class Demonstration:
    """What was seen, and on what stage."""

    trainings: list[Training]
    words: str


def demonstrate(place: Place, iterations: int, late_s: float, rate_bytes_per_s: float, out: Console) -> Demonstration:
    """Train in every strategy; progress goes to the console."""
    trainings = {strategy: Training(strategy, NUM_RANKS, LATE_RANK) for strategy in Strategy}
    with (
        tempfile.TemporaryDirectory(prefix="paceline-demo-") as folder,
        open_stage(place, NUM_RANKS, rate_bytes_per_s) as stage,
    ):
        out.print(stage.words, style="dim", soft_wrap=True)
        job = Job(folder, NUM_RANKS, iterations, LATE_RANK, late_s, stage.pace_bytes_per_s)
        with _progress(out) as progress, Crew(job, stage) as crew:
            steps = iterations * NUM_RANKS
            tasks = {strategy: progress.add_task(strategy.value, total=steps, news="") for strategy in Strategy}
            for rank, message in crew.messages():
                training = trainings[message.strategy]
                training.add(rank, message)
                progress.update(tasks[message.strategy], completed=len(training.told), news=_news(training))
    return Demonstration(list(trainings.values()), stage.words)


def _progress(out: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<25}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[news]}"),
        console=out,
    )


def _news(training: Training) -> str:
    accuracy = figures.recent_accuracy(training)
    return f"{format_duration(figures.iteration_s(training))} an iteration, reads {accuracy:.0%} right"
