"""``paceline compare``: all algorithms side by side, as a table and as curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from paceline.cli import arguments, tables
from paceline.draw.canvas import check_picture_path
from paceline.draw.curves import Curves, draw_curves
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective
from paceline.policy import planning
from paceline.units import format_size

SIZES = [4**power * 1000 for power in range(11)]
RANKS = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def compare(
    collective: Annotated[str, typer.Argument(help="allreduce, allgather, reducescatter, broadcast, ...")],
    ranks: Annotated[int | None, typer.Option(min=1, help=arguments.RANKS_HELP)] = None,
    size: Annotated[str, typer.Option(help=arguments.SIZE_HELP)] = "64MB",
    late: Annotated[list[str] | None, typer.Option(help=arguments.LATE_HELP)] = None,
    cluster: Annotated[str | None, typer.Option(help=arguments.CLUSTER_HELP)] = None,
    root: Annotated[int, typer.Option(min=0, help="Root of a broadcast, reduce, gather or scatter.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot time against size and against the number of ranks (.png, .svg, .pdf)."),
    ] = None,
) -> None:
    """Price every algorithm for a collective, the fastest first. What is shown is proven.

    \b
    Examples:
      paceline compare allreduce --ranks 8 --size 64MB --late 3:500ms
      paceline compare allgather --cluster uplink8 --plot allgather.png
    """
    question, where, size_bytes = arguments.read_question(collective, ranks, cluster, late, size, root)
    if plot is not None:
        check_picture_path(plot)
    out = tables.console()
    plans = priced(question, where, size_bytes)
    out.print(f"[bold]{question}[/], {size}")
    out.print(tables.cluster_line(where))
    out.print()
    out.print(tables.cost_table(plans, against="ring"))
    if plot is not None:
        with Progress(console=out, transient=True, disable=not out.is_terminal) as progress:
            panels = _panels(question, where, size_bytes, progress)
        title = f"{question.kind} on {where.name}, {tables.late_words(where)}".removesuffix(", ")
        draw_curves(panels, title, plot)
        out.print(f"drew {escape(str(plot))}")


def priced(question: Collective, where: Cluster, size_bytes: float) -> list[planning.Plan]:
    """All algorithms that make sense, the fastest first, behind a progress bar."""
    out = tables.console()
    left_out = planning.too_large(question)
    if left_out:
        out.print(f"not priced, as their schedules would be too large: {', '.join(left_out)}")
    if not planning.worth_comparing(question, where):
        raise UsageError(f"there is no algorithm for {question}: take fewer ranks")
    with Progress(console=out, transient=True, disable=not out.is_terminal) as progress:
        task = progress.add_task("pricing", total=len(planning.worth_comparing(question, where)))
        return planning.compare(question, where, size_bytes, seen=lambda _: progress.advance(task))


def _panels(question: Collective, where: Cluster, size_bytes: int, progress: Progress) -> list[Curves]:
    ranks = sorted({n for n in RANKS if n > question.root} | {question.num_ranks})
    by_size = Curves(f"bytes, {question.num_ranks} ranks")
    by_ranks = Curves(f"ranks, {format_size(size_bytes)}")
    task = progress.add_task("drawing", total=len(SIZES) + len(ranks))
    for size in SIZES:
        for plan in planning.compare(question, where, size):
            by_size.add(plan.algorithm, size, plan.cost.exposed_s, plan.cost.bound_s)
        progress.advance(task)
    for n in ranks:
        for plan in planning.compare(Collective(question.kind, n, question.root), where.resized(n), size_bytes):
            by_ranks.add(plan.algorithm, n, plan.cost.exposed_s, plan.cost.bound_s)
        progress.advance(task)
    return [by_size, by_ranks]
