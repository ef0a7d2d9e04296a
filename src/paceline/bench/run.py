"""A run from start to end: MPIs installed if need be, the lab up, progress shown, everything gone afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.bench import peers
from paceline.bench.measure import Question, check_lab, measure
from paceline.bench.results import Results
from paceline.ir.cluster import Cluster


def run(question: Question, lab: str | None = None, *, loss: float = 0.0, install: bool = True) -> Results:
    """Measure, in the lab of that name or on this host; what is going on is said on standard error.

    ``loss`` is the share of packets lost on the way to a host of the lab.
    """
    errors = Console(stderr=True, highlight=False)
    if lab is not None:
        check_lab(question)
    for contender in (question.subject, *question.peers):
        if contender.is_mpi:
            peers.ensure(contender.name, install=install, say=lambda line: errors.print(escape(line), soft_wrap=True))
    with contextlib.ExitStack() as stack:
        place = None
        if lab is not None:
            from paceline.lab import Lab

            place = stack.enter_context(Lab(cluster=Cluster.named(lab), loss=loss))
        return measure(question, place, stack.enter_context(progress(errors)))


@contextlib.contextmanager
def progress(errors: Console) -> Iterator[Callable[[str, float], None]]:
    """A function that hears what is done and the share of work done, and shows it if somebody is looking."""
    # Drawn between blocks only: a bar that moves by itself would take its time from what is measured.
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, auto_refresh=False, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, share: bar.update(task, description=what, completed=share, refresh=True)
