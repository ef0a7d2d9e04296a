"""``paceline demo``: a training with a late rank and thin links, by Gloo and by Paceline."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.markup import escape

from paceline.cli import tables
from paceline.demo.places import Place
from paceline.draw.canvas import can_draw, check_picture_path
from paceline.errors import UsageError
from paceline.lab import unavailable, unprivileged
from paceline.units import format_duration, parse_duration, parse_rate

_LATEST_S = 10.0
_PLACE_HELP = (
    "lab: emulated hosts, with or without root; loopback: paced connections; auto: lab where the kernel allows it."
)
_ITERATIONS_HELP = "Of each synchronous training. The decentralised one makes as many steps in all."


def demo(
    iterations: Annotated[int, typer.Option(min=3, max=10_000, help=_ITERATIONS_HELP)] = 80,
    late: Annotated[str, typer.Option(help="How long rank 3 takes to load each batch.")] = "200ms",
    rate: Annotated[str, typer.Option(help="Rate of the links, like 200mbit.")] = "200mbit",
    place: Annotated[Place, typer.Option(help=_PLACE_HELP)] = Place.AUTO,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to draw the timelines (.png, .svg, .pdf). [demo.png]")
    ] = None,
) -> None:
    """Train one model four times on four ranks, with one rank late and thin links: what does it cost?

    DDP on Gloo first, then on Paceline, then Paceline's DataParallel, from the same weights and with the same
    batches. Then Paceline's Decentralized, where nobody waits for the late rank: it makes as many steps in all, but
    each rank its own. Ends with a table and, where matplotlib is installed, a picture. Needs no root.

    \b
    Examples:
      paceline demo
      paceline demo --late 500ms --rate 100mbit --picture thin.png
    """
    if picture is None and can_draw():
        picture = Path("demo.png")
    if picture is not None:
        check_picture_path(picture)
    late_s, rate_bytes_per_s = parse_duration(late), parse_rate(rate)
    if late_s > _LATEST_S:
        raise UsageError(f"--late is at most {format_duration(_LATEST_S)}, not {late}: nobody would wait for the end")
    if place is not Place.LOOPBACK and unavailable() is not None and unprivileged.works():
        options = {"--place": "lab", "--iterations": str(iterations), "--late": late, "--rate": rate}
        if picture is not None:
            options["--picture"] = str(picture)
        words = [word for pair in options.items() for word in pair]
        code = "from paceline.cli.main import run; run()"
        raise typer.Exit(unprivileged.run_as_root_of_its_own([sys.executable, "-c", code, "demo", *words]))
    if place is Place.AUTO:
        place = Place.LAB if unavailable() is None else Place.LOOPBACK
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    _show(place, iterations, late_s, rate_bytes_per_s, picture)


def _show(place: Place, iterations: int, late_s: float, rate_bytes_per_s: float, picture: Path | None) -> None:
    from paceline.demo.picture import draw_trainings
    from paceline.demo.run import LATE_RANK, demonstrate
    from paceline.demo.table import results_table, same_accuracy

    out = tables.console()
    out.print(f"Rank {LATE_RANK} of 4 takes {format_duration(late_s)} to load each batch; 5 MB of gradients.")
    seen = demonstrate(place, iterations, late_s, rate_bytes_per_s, out)
    out.print()
    out.print(results_table(seen.trainings))
    out.print(escape(seen.words), style="dim", soft_wrap=True)
    if not same_accuracy(seen.trainings):
        out.print("[bold red]the trainings do not end with the same accuracy[/]")
    if picture is None:
        out.print("For a picture of the timelines as well, pip install matplotlib and run this again.")
    else:
        draw_trainings(seen.trainings, LATE_RANK, seen.words.partition(";")[0], picture)
        out.print(f"drew {escape(str(picture))}")


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave by the way that cleans up."""
    del frame
    sys.exit(128 + number)
