"""``paceline bench`` with what follows it: a collective's name, or ``training``."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from paceline.cli import bench, bench_training

_COLLECTIVE, _TRAINING = "collective", "training"


class _Bench(TyperGroup):
    """Whatever is not a training is the name of a collective, or its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the verb before arguments that have none."""
        return super().parse_args(ctx, args if args[:1] == [_TRAINING] else [_COLLECTIVE, *args])


app = typer.Typer(cls=_Bench, help="Measure collectives, or a replayed training.")
app.command(_COLLECTIVE, hidden=True)(bench.bench)
app.command(_TRAINING)(bench_training.training)
