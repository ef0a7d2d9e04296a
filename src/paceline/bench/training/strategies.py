"""The ways to train that are compared, and how their ranks are told which one they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from paceline.bench.contenders import Contender
from paceline.bench.rank_process.messages import Setup
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.lab import Lab

VARIABLE = "REPLAY_JOB"
"""Where a rank finds its :class:`Job`."""

ALONE = "alone"
"""The same iteration without communication: measured in every run, to tell what communication adds."""

STRATEGIES = {
    "ddp-gloo": "gloo",
    "ddp-gloo-tuned": "gloo",
    "ddp": "paceline",
    "ddp-tuned": "paceline",
    "dear": "paceline",
    "dear-sharded": "paceline",
    "dear-tuned": "paceline",
    "dear-sharded-tuned": "paceline",
    "fsdp2": "paceline",
}
"""Names of the command line, and the backend they run on."""

USUAL_STRATEGIES = ("ddp-gloo", "ddp-gloo-tuned", "ddp", "ddp-tuned", "dear", "dear-sharded")
"""What a fair comparison needs: DDP with its defaults and at its best, on both backends; both modes of DataParallel."""

DDP = "ddp"
"""How the names of strategies begin that are DistributedDataParallel's."""

DEAR = "dear"
"""How the names of strategies begin that are DataParallel's."""

SHARDED = "-sharded"
"""What their names have in them where they shard."""

TUNED = "-tuned"
"""How the name of a strategy ends that finds its own before the clock runs."""

TUNING_ITERATIONS = 60
"""So many iterations the search of DataParallel may take; then the clock runs."""

TRIED_ITERATIONS = 4
"""So many iterations DDP is timed with each bucket size that is tried, after it has made its buckets."""

TRIED_BYTES = tuple(size * 2**20 for size in (1, 4, 10, 25, 50, 100))
"""Bucket sizes of the true model that are tried for DDP; the whole model in one bucket is tried, too."""

TRIED_WITHOUT_FIRST = 2
"""So many of the fastest sizes are tried once more without the small first bucket."""

SETTLING_ITERATIONS = 50
"""So many more has DataParallel to find how many buckets it all-reduces (ten steps, then eight trials of five)."""

CHECKED_STEPS = 6
"""Iterations before the clock runs: buckets are made anew after the first, and weights are checked after the last."""


class Job(msgspec.Struct, frozen=True):
    """What a rank replays, and how. With ``clip``, each iteration clips the gradients before the step; with ``scaler``,
    a GradScaler scales the loss and makes the step.
    """

    strategy: str
    model: str
    size_factor: float
    time_factor: float
    clip: bool = False
    scaler: bool = False


class Buckets(msgspec.Struct, frozen=True):
    """Bytes that a strategy fuses. ``first`` is the size of DDP's first bucket; 0: as large as the others."""

    size: int
    first: int = 0

    def scaled(self, factor: float) -> Buckets:
        """The same in a model whose sizes are multiplied by ``factor``.

        >>> Buckets(1000, 10).scaled(0.01), Buckets(1000).scaled(0.01)
        (Buckets(size=10, first=1), Buckets(size=10, first=0))
        """
        return Buckets(max(1, round(self.size * factor)), self.first and max(1, round(self.first * factor)))


AUTO = Buckets(0)
"""What asks a strategy to find its own bucket size."""

DDP_BUCKETS = Buckets(25 * 2**20, 2**20)
"""The defaults of DistributedDataParallel."""


@dataclass(frozen=True)
class Replayer(Contender):
    """A strategy on its backend."""

    backend: str = "paceline"

    def setup(self, rank: int, num_ranks: int, port: int, lab: Lab | None) -> Setup:
        """As of a contender, but the name is not the backend's."""
        return Setup(self.backend, num_ranks, super().setup(rank, num_ranks, port, lab).environment)


def replayer(job: Job, name: str | None = None) -> Replayer:
    """The contender for a job."""
    job_text = msgspec.json.encode(job).decode()
    return Replayer(name or job.strategy, {VARIABLE: job_text}, STRATEGIES.get(job.strategy, "paceline"))


def parse_strategies(text: str) -> list[str]:
    """Names with commas, each once."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in STRATEGIES]
    if unknown or not names or len(set(names)) < len(names):
        raise UsageError(f"--strategies takes some of {', '.join(STRATEGIES)}, each once, not {text!r}")
    return names
