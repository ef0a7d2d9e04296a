"""``paceline tour``: a tour of schedules, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from paceline.cli import tables
from paceline.draw.canvas import check_picture_path
from paceline.errors import ProofError
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective, Kind
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfers
from paceline.ir.verify import verify
from paceline.policy import planning

SIZE_BYTES = 64_000_000


def tour(
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the late rank's all-reduce (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Take a tour: a collective is data, a proof, a price and a picture.

    \b
    Example:
      paceline tour --picture late_rank.png
    """
    if picture is not None:
        check_picture_path(picture)
    out = tables.console()
    question = Collective(Kind.ALL_REDUCE, 8)
    lan = Cluster.preset("lan8")

    _head(out, "An algorithm is data", "StragglAR for 8 ranks, with rank 3 late: who sends which chunk to whom.")
    late = lan.with_late({3: 2.0})
    chosen = planning.plan(question, late, SIZE_BYTES, "stragglar")
    coarse = planning.plan(question, late, SIZE_BYTES, "stragglar", pieces=1)
    out.print(tables.schedule_table(coarse.schedule, all_steps=True))

    _head(out, "Data can be proven", "The checker knows no algorithm; it executes every transfer on sets.")
    for line in tables.proof_lines(coarse.proof):
        out.print(line)
    out.print("Without its last transfer, or with one repeated:")
    for broken in _broken(coarse.schedule):
        try:
            verify(broken)
        except ProofError as error:
            out.print(f"  [bold red]refused[/]: {escape(str(error))}")

    _head(out, "Data can be priced", "64 MB, nobody late; then rank 3 comes 2 s late; then ranks 3 and 5 do.")
    for cluster in (lan, late, lan.with_late({3: 2.0, 5: 2.0})):
        out.print(tables.cluster_line(cluster))
        out.print(tables.cost_table(planning.compare(question, cluster, SIZE_BYTES), against="ring"))
        out.print()

    _head(out, "Data can be drawn", "Ranks across, time down.")
    if picture is None:
        out.print("paceline plan allreduce --cluster lan8 --late 3:2s --png late_rank.png")
    else:
        from paceline.draw.spacetime import draw_spacetime

        draw_spacetime(coarse, picture)
        out.print(f"drew {escape(str(picture))}")
    ring = planning.plan(question, late, SIZE_BYTES, "ring")
    faster = ring.cost.exposed_s / chosen.cost.exposed_s
    out.print(
        f"\nWhen rank 3 is late, its all-reduce takes {faster:.2f}x less time after it arrives than a ring's (model)."
    )


def _head(out: Console, title: str, subtitle: str) -> None:
    out.rule(f"[bold]{title}", align="left")
    out.print(subtitle)
    out.print()


def _broken(schedule: Schedule) -> list[Schedule]:
    """The schedule with its last transfer dropped, and with its first reduce done twice."""
    table = schedule.transfers
    rows = list(table)
    dropped = rows[:-1]
    repeated = [rows[0], *rows]
    return [
        Schedule(schedule.collective, schedule.num_chunks, Transfers.from_rows(part), schedule.algorithm)
        for part in (dropped, repeated)
    ]
