"""``paceline bench`` and its verbs: the collectives, ``training`` and ``decentralized``."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from paceline.bench.figures import Operation
from paceline.cli import bench, bench_decentralized, bench_training
from paceline.errors import UsageError

_SHORT = {
    Operation.ALL_REDUCE: "The sum of all ranks' tensors, on every rank.",
    Operation.ALL_GATHER: "Every rank's tensor, on every rank.",
    Operation.REDUCE_SCATTER: "A share of the sum, on each rank.",
    Operation.BROADCAST: "One rank's tensor, on every rank.",
    Operation.ALL_TO_ALL: "A part of each rank's tensor, to each rank.",
    Operation.BARRIER: "Nobody goes on before all have come.",
    Operation.SEND_RECV: "A tensor to the next rank, another from the one before.",
}


class _Bench(TyperGroup):
    """Collectives may be written ``all-reduce`` and ``all_reduce`` too."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a verb, however it is written."""
        return super().get_command(ctx, cmd_name.lower().replace("-", "").replace("_", ""))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A verb that is not there gets a sentence with those that are."""
        if self.get_command(ctx, args[0]) is None:
            raise UsageError(f"{args[0]!r} cannot be measured; there are {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Bench,
    no_args_is_help=True,
    help="Measure collectives beside their peers, a replayed training against its bounds, or time to a target loss.",
)
for _operation, _short in _SHORT.items():
    app.command(_operation.value, short_help=_short)(bench.bench)
app.command("training", short_help="A model's training, replayed: strategies in turns.")(bench_training.training)
app.command("decentralized", short_help="Time to a target loss, with slow workers and links.")(
    bench_decentralized.decentralized
)
