"""``paceline bench training``: strategies of data-parallel training on a replayed model, against their bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.bench.results import save_json
from paceline.bench.run import progress
from paceline.bench.training.measure import Replay, Seen, measure
from paceline.bench.training.networks import NETWORKS
from paceline.bench.training.plot import draw_sweep, draw_training
from paceline.bench.training.profile import PUBLISHED, SHAPES, Profile, load_profile
from paceline.bench.training.scaling import fit
from paceline.bench.training.strategies import STRATEGIES, USUAL_STRATEGIES, parse_strategies
from paceline.bench.training.sweep import sweep
from paceline.bench.training.table import caption, sweep_legend, sweep_table, training_legend, training_table
from paceline.cli import tables
from paceline.draw.canvas import check_picture_path
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster

if TYPE_CHECKING:
    from paceline.lab import Lab

_WIDTH = 170
_NOMINAL = "lan8"  # what sizes are scaled to where there is no lab


def training(
    model: Annotated[str, typer.Option(help=f"{', '.join((*PUBLISHED, *SHAPES))}.")] = "resnet50",
    lab: Annotated[
        str | None, typer.Option(help="Replay between the lab's hosts, like lan8 (needs root). Default: this host.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks on this host. Default: 2.")] = None,
    strategies: Annotated[str, typer.Option(metavar="NAMES", help=f"With commas: {', '.join(STRATEGIES)}.")] = ",".join(
        USUAL_STRATEGIES
    ),
    network: Annotated[
        str, typer.Option(help=f"Whose ratio of communication to computation to keep: {', '.join(NETWORKS)}, 64 GPUs.")
    ] = "10gbe",
    ratio: Annotated[
        str | None, typer.Option(help="That ratio as a number like 1.2 or 4/3, in place of a network's.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="What times are multiplied by; sizes follow. Default: about 1 s an iteration.")
    ] = None,
    iterations: Annotated[int, typer.Option(help="Timed, of each strategy.")] = 15,
    rounds: Annotated[int, typer.Option(help="How often the strategies take turns.")] = 3,
    bucket_mb: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="What is fused, in megabytes of the true model. Default: what each strategy fuses by itself.",
        ),
    ] = None,
    clip: Annotated[bool, typer.Option("--clip", help="Clip the gradients in each iteration.")] = False,
    scaler: Annotated[
        bool, typer.Option("--scaler", help="Train with a GradScaler, as in mixed precision with float16.")
    ] = False,
    fusion_sweep: Annotated[
        bool, typer.Option("--fusion-sweep", help="The first strategy with 12 bucket sizes, and its own search.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without an answer after which a rank hangs.")] = 120.0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Save all figures.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw them (.png, .svg, .pdf).")] = None,
) -> None:
    """Replay a model's training: its gradients and times, strategies in turns, against the ideal bounds.

    \b
    Examples:
      paceline bench training --model resnet50 --lab lan8
      paceline bench training --model bert_base --lab lan8 --strategies ddp,dear --network 100gb --json bert.json
      paceline bench training --model uniform --ratio 4/3 --lab lan8
      paceline bench training --model resnet50 --lab lan8 --strategies dear --fusion-sweep --plot fusion.png
    """
    if plot is not None:
        check_picture_path(plot)
    if json is not None and not json.absolute().parent.is_dir():
        raise UsageError(f"cannot write {json}: there is no folder {json.absolute().parent}")
    if lab is not None and ranks is not None:
        raise UsageError(f"{lab} says how many ranks there are; leave --ranks out")
    cluster = Cluster.named(lab or _NOMINAL)
    profile = load_profile(model)
    replay = Replay(
        profile=profile,
        network=f"ratio {ratio}" if ratio else network,
        scale=fit(profile, _s_per_byte(profile, network, ratio), cluster, scale),
        cluster=cluster,
        strategies=parse_strategies(strategies),
        num_ranks=cluster.num_ranks if lab else ranks or 2,
        iterations=iterations,
        rounds=rounds,
        bucket_bytes=None if bucket_mb is None else round(bucket_mb * 1e6),
        clip=clip,
        scaler=scaler,
        timeout_s=timeout,
    )
    wrong = _sweep(replay, lab, json, plot) if fusion_sweep else _compare(replay, lab, json, plot)
    if wrong:
        raise typer.Exit(1)


def _s_per_byte(profile: Profile, network: str, ratio: str | None) -> float:
    """What an all-reduce costs where the model is said to train."""
    if ratio is not None:
        try:
            share = float(Fraction(ratio))
        except (ValueError, ZeroDivisionError, OverflowError):
            share = 0.0
        if not share > 0:
            raise UsageError(f"--ratio is communication over computation, like 1.2 or 4/3, not {ratio!r}")
        return share * profile.compute_s / profile.gradient_bytes
    if network not in NETWORKS:
        raise UsageError(f"there is no network {network!r} to replay; there are {', '.join(NETWORKS)}")
    return NETWORKS[network].all_reduce_s_per_byte


def _compare(replay: Replay, lab: str | None, json: Path | None, plot: Path | None) -> bool:
    """All strategies in turns; whether weights were wrong."""
    with _place(lab) as (place, seen):
        results = measure(replay, place, seen)
    _show(training_table(results), [*training_legend(results), *caption(results.setting, results.machine)])
    if json is not None:
        save_json(results, json)
    if plot is not None:
        draw_training(results, plot)
    return any(row.wrong for row in results.rows)


def _sweep(replay: Replay, lab: str | None, json: Path | None, plot: Path | None) -> bool:
    """One strategy with many bucket sizes; whether weights were wrong."""
    strategy = replay.strategies[0]
    if strategy not in ("dear", "dear-sharded"):
        raise UsageError("--fusion-sweep is for dear or dear-sharded: name it first in --strategies")
    with _place(lab) as (place, seen):
        results = sweep(replay, strategy, place, seen)
    _show(sweep_table(results), [sweep_legend(results), *caption(results.setting, results.machine)])
    if json is not None:
        save_json(results, json)
    if plot is not None:
        draw_sweep(results, plot)
    return any(point.wrong for point in (*results.grid, results.tuned))


@contextlib.contextmanager
def _place(lab: str | None) -> Iterator[tuple[Lab | None, Seen]]:
    """The lab, if one is asked for, and somebody to tell what is going on."""
    with contextlib.ExitStack() as stack:
        seen = stack.enter_context(progress(Console(stderr=True, highlight=False)))
        place = None
        if lab is not None:
            from paceline.lab import Lab

            place = stack.enter_context(Lab(cluster=Cluster.named(lab)))
        yield place, seen


def _show(table: Table, lines: list[str]) -> None:
    out = tables.console()
    Console(highlight=False, width=max(out.width, _WIDTH)).print(table)
    out.print()
    for line in lines:
        out.print(escape(line), style="dim", soft_wrap=True)
