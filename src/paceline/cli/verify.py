"""``paceline verify``: is a saved schedule right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from paceline.cli import tables
from paceline.ir import files
from paceline.ir.verify import verify as prove


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A schedule saved as .json or .msgpack.")],
) -> None:
    """Prove a saved schedule, or say which transfer breaks which rule (exit code 1).

    \b
    Examples:
      paceline plan allreduce --ranks 8 --algorithm ring --json ring.json
      paceline verify ring.json
    """
    schedule = files.load(file)
    out = tables.console()
    out.print(f"[bold]{escape(schedule.algorithm)}[/]: {schedule.collective}, {schedule.num_chunks} chunks")
    for line in tables.proof_lines(prove(schedule)):
        out.print(line)
