"""What the controller tells a rank when it starts it, and what ranks say while they train: lines of JSON.

Times are of the machine's monotonic clock, which all ranks share.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Strategy(Enum):
    """A way to train: how gradients are combined, and by whom."""

    DDP_GLOO = "DDP on Gloo"
    DDP = "DDP on Paceline"
    DATA_PARALLEL = "DataParallel on Paceline"

    @property
    def backend(self) -> str:
        """The torch.distributed backend."""
        return "gloo" if self is Strategy.DDP_GLOO else "paceline"


class Job(msgspec.Struct, frozen=True):
    """What to train and how. ``pace_bytes_per_s`` is what a rank may send where its link does not limit it."""

    folder: str
    num_ranks: int
    iterations: int
    late_rank: int
    late_s: float
    pace_bytes_per_s: int = 0
    batch: int = 32
    seed: int = 0


class Flight(msgspec.Struct, array_like=True, frozen=True):
    """A collective under way, from its launch until its end."""

    operation: str
    launched_s: float
    done_s: float


class Step(msgspec.Struct, tag=True, frozen=True):
    """One iteration of one rank: loading a batch, waiting for collectives, and the flights that ended in it."""

    strategy: Strategy
    number: int
    began_s: float
    loaded_s: float
    ended_s: float
    waits: list[tuple[float, float]]
    flights: list[Flight]
    num_correct: int
    num_seen: int


class Finished(msgspec.Struct, tag=True, frozen=True):
    """A training has ended. ``away`` is the largest difference of a weight from the first training's.

    ``algorithms`` and ``told`` (who the backend says is late) are empty where a backend says nothing.
    """

    strategy: Strategy
    ended_s: float
    accuracy: float
    away: float
    algorithms: list[str]
    told: list[str]


Message = Step | Finished
