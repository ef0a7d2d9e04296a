"""What the controller tells a rank when it starts it, and what ranks say while they train: lines of JSON.

Times are of the machine's monotonic clock, which all ranks share.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Strategy(Enum):
    """A way to train: how gradients or weights are combined, and by whom."""

    DDP_GLOO = "DDP on Gloo"
    DDP = "DDP on Paceline"
    DATA_PARALLEL = "DataParallel on Paceline"
    DECENTRALIZED = "Decentralized on Paceline"

    @property
    def backend(self) -> str:
        """The torch.distributed backend."""
        return "gloo" if self is Strategy.DDP_GLOO else "paceline"

    @property
    def synchronous(self) -> bool:
        """Whether all ranks make each step together. Otherwise each rank makes steps at its own speed."""
        return self is not Strategy.DECENTRALIZED


class Job(msgspec.Struct, frozen=True):
    """What to train and how. ``pace_bytes_per_s`` is what a rank may send where its link does not limit it.

    A synchronous training has ``iterations`` steps of every rank. A decentralised one has as many steps in all, and
    ranks share them as they come.
    """

    folder: str
    num_ranks: int
    iterations: int
    late_rank: int
    late_s: float
    pace_bytes_per_s: int = 0
    batch: int = 32
    seed: int = 0


class Flight(msgspec.Struct, array_like=True, frozen=True):
    """A collective, or an average of weights, under way: from its launch until its end."""

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

    ``algorithms`` and ``told`` (who the backend says is late) are empty where a backend says nothing. ``waited_s`` is
    how long a decentralised training has waited at its end for the other ranks and for the last average; ``averages``
    is how many averages this rank took part in, by the number of ranks.
    """

    strategy: Strategy
    ended_s: float
    accuracy: float
    away: float
    algorithms: list[str]
    told: list[str]
    waited_s: float = 0.0
    averages: dict[int, int] = {}  # msgspec copies it


Message = Step | Finished
