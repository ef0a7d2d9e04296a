"""``paceline plan``: one schedule, shown, proven, priced and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from paceline.algorithms import find
from paceline.cli import arguments, tables
from paceline.cli.compare import priced
from paceline.draw.canvas import check_picture_path
from paceline.errors import UsageError
from paceline.ir import files
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective, Kind
from paceline.policy import planning


def plan(
    collective: Annotated[str, typer.Argument(help="allreduce, allgather, reducescatter, broadcast, ...")],
    ranks: Annotated[int | None, typer.Option(min=1, help=arguments.RANKS_HELP)] = None,
    algorithm: Annotated[str, typer.Option(help="An algorithm, or 'best': the cheapest on this cluster.")] = "best",
    size: Annotated[str, typer.Option(help=arguments.SIZE_HELP)] = "64MB",
    late: Annotated[list[str] | None, typer.Option(help=arguments.LATE_HELP)] = None,
    cluster: Annotated[str | None, typer.Option(help=arguments.CLUSTER_HELP)] = None,
    root: Annotated[int, typer.Option(min=0, help="Root of a broadcast, reduce, gather or scatter.")] = 0,
    pieces: Annotated[
        int | None, typer.Option(min=1, help="How finely chunks are cut. Default: chosen by cost.")
    ] = None,
    chains: Annotated[
        int | None, typer.Option(min=1, help="Multicast roots at a time. Default: chosen by cost.")
    ] = None,
    all_steps: Annotated[bool, typer.Option("--all", help="Show all steps, not just the first ones.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the space-time diagram as SVG.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it as PNG.")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the schedule (.json, or .msgpack).")] = None,
) -> None:
    """Show a schedule: its steps, its proof, its cost against the limit and against ring.

    \b
    Examples:
      paceline plan allreduce --ranks 8 --algorithm stragglar --late 3
      paceline plan allreduce --cluster lan8 --late 3:500ms --png late.png
      paceline plan broadcast --ranks 12 --algorithm chain --pieces 16 --json chain.json
    """
    question, where, size_bytes = arguments.read_question(collective, ranks, cluster, late, size, root)
    for picture, suffix in ((svg, ".svg"), (png, ".png")):
        if picture is not None:
            if picture.suffix != suffix:
                raise UsageError(f"--{suffix[1:]} wants a file name that ends in {suffix}, not {picture}")
            check_picture_path(picture)
    if json is not None:
        files.check_schedule_path(json)
    given = {name: value for name, value in (("pieces", pieces), ("chains", chains)) if value is not None}
    chosen = (
        _best(question, where, size_bytes, given)
        if algorithm == "best"
        else planning.plan(question, where, size_bytes, algorithm, **given)
    )
    out = tables.console()
    shown = "" if question.kind is Kind.BARRIER else f", {size}"
    out.print(f"[bold]{chosen.algorithm}[/]: {question}{shown}, {chosen.schedule.num_chunks} chunks")
    out.print(find(chosen.algorithm).summary)
    out.print(tables.cluster_line(where))
    out.print()
    out.print(tables.schedule_table(chosen.schedule, all_steps=all_steps))
    out.print()
    for line in tables.proof_lines(chosen.proof, where):
        out.print(line)
    out.print()
    plans = [chosen]
    if chosen.algorithm != "ring" and find("ring").serves(question):
        plans.append(planning.plan(question, where, size_bytes, "ring"))
    out.print(tables.cost_table(plans, against="ring" if len(plans) > 1 else None))
    if json is not None:
        files.save(chosen.schedule, json)
        out.print(f"saved {escape(str(json))}")
    for picture in (svg, png):
        if picture is not None:
            from paceline.draw.spacetime import draw_spacetime

            draw_spacetime(chosen, picture)
            out.print(f"drew {escape(str(picture))}")


def _best(question: Collective, where: Cluster, size_bytes: int, given: dict[str, int]) -> planning.Plan:
    if given:
        raise UsageError(f"--{next(iter(given))} belongs to one algorithm: name it with --algorithm")
    return planning.worth_taking(priced(question, where, size_bytes))[0]
