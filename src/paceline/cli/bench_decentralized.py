"""``paceline bench decentralized``: time to a target loss, with slow workers and slow links."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from paceline.bench.decentralized.cases import USUAL_SCHEMES, parse_scenarios, parse_schemes
from paceline.bench.decentralized.report import draw, legend, scenario_table
from paceline.bench.decentralized.results import DecentralizedResults
from paceline.bench.decentralized.run import Plan, run
from paceline.bench.results import save_json
from paceline.bench.run import progress
from paceline.cli import tables
from paceline.draw.canvas import check_picture_path
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster
from paceline.units import parse_duration

_WIDTH = 190


def decentralized(
    schemes: Annotated[
        str,
        typer.Option(metavar="NAMES", help="With commas; options like ripples:group_size=4:lr=0.05; or alone."),
    ] = ",".join(USUAL_SCHEMES),
    lab: Annotated[
        str | None, typer.Option(help="Train between the lab's hosts, like lan8 (needs root). Default: this host.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Workers on this host, without a lab. Default: 2.")] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHO:FACTORx", help="0:2x, 0+1:5x, half:2x; a scenario each; several times or with commas."
        ),
    ] = None,
    slow_links: Annotated[
        list[str] | None, typer.Option(metavar="WHO:FACTORx", help="The same for the links of hosts.")
    ] = None,
    homogeneous: Annotated[bool, typer.Option(help="Measure with all workers alike, too.")] = True,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each scheme in each scenario.")] = 3,
    compute: Annotated[str, typer.Option(help="What a step computes.")] = "60ms",
    communication: Annotated[
        float, typer.Option(help="An all-reduce over the computation of a step; sets the links' rates.")
    ] = 1.2,
    stretch: Annotated[float, typer.Option(help="Slow rates and times together, where cores are too busy.")] = 1.0,
    width: Annotated[int, typer.Option(help="Of the model's layers.")] = Plan.width,
    batch: Annotated[int, typer.Option(help="Samples of a worker in a step.")] = Plan.batch,
    lr: Annotated[float, typer.Option(help="Learning rate of all schemes.")] = Plan.learning_rate,
    lr_warmup: Annotated[
        int, typer.Option(min=0, help="Steps in which the learning rate rises to --lr.")
    ] = Plan.lr_warmup,
    momentum: Annotated[float, typer.Option(help="Of all schemes.")] = Plan.momentum,
    target: Annotated[
        float, typer.Option(help="Loss above the least possible at which the clock stops.")
    ] = Plan.target,
    window: Annotated[
        int, typer.Option(help="Batches of all workers whose mean loss is that of their own weights.")
    ] = Plan.window,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Train for so many steps a worker, past the target, in place of to it.")
    ] = None,
    give_up: Annotated[str, typer.Option(help="How long a training may take.")] = "180s",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without an answer after which a rank hangs.")] = 60.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Save all figures.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw loss against time (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Train a real model to a target loss: DDP and decentralised schemes, with slow workers and slow links.

    \b
    Examples:
      paceline bench decentralized --lab lan8 --slow 0:2x,0:5x --slow half:2x --json FILE --plot FILE
      paceline bench decentralized --lab lan8 --schemes ddp-paceline,ripples --slow-links half:5x --seeds 1
      paceline bench decentralized --ranks 2 --schemes ddp-gloo,static,alone --compute 5ms
    """
    if plot is not None:
        check_picture_path(plot)
    if json is not None and not json.absolute().parent.is_dir():
        raise UsageError(f"cannot write {json}: there is no folder {json.absolute().parent}")
    if lab is not None and ranks is not None:
        raise UsageError(f"{lab} says how many workers there are; leave --ranks out")
    cluster = Cluster.preset(lab) if lab else Cluster.uniform(1, ranks_per_host=ranks or 2)
    plan = Plan(
        contestants=parse_schemes(schemes),
        scenarios=parse_scenarios(slow, slow_links, homogeneous=homogeneous),
        seeds=seeds,
        cluster=cluster,
        in_lab=lab is not None,
        compute_s=parse_duration(compute),
        communication=communication,
        stretch=stretch,
        batch=batch,
        learning_rate=lr,
        lr_warmup=lr_warmup,
        momentum=momentum,
        target=target,
        window=window,
        steps=steps,
        give_up_s=parse_duration(give_up),
        timeout_s=timeout,
        width=width,
    )
    results = run_with_progress(plan)
    show(results)
    if json is not None:
        save_json(results, json)
    if plot is not None:
        draw(results, plot)
    if any(one.failed or one.weights_differ for one in results.trainings):
        raise typer.Exit(1)


def run_with_progress(plan: Plan) -> DecentralizedResults:
    """Run in the plan's lab, or on this host."""
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(progress(Console(stderr=True, highlight=False)))
        place = None
        if plan.in_lab:
            from paceline.lab import Lab

            place = stack.enter_context(Lab(cluster=plan.emulated()))
        return run(plan, place, seen)


def show(results: DecentralizedResults) -> None:
    """Print a table for each scenario, and the legend."""
    out = tables.console()
    wide = Console(highlight=False, width=max(out.width, _WIDTH))
    for scenario in results.scenarios:
        wide.print(scenario_table(results, scenario))
        wide.print()
    for line in legend(results):
        out.print(escape(line), style="dim", soft_wrap=True)
