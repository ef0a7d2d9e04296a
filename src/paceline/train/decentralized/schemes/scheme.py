"""What all schemes have in common: who averages what, and when, around an optimizer's step."""

from __future__ import annotations

import inspect
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.train.decentralized.mesh import Mesh
from paceline.train.decentralized.weights import Weights


class TimedAverage(NamedTuple):
    """One average: how many workers took part, and when, by ``time.perf_counter()``."""

    num_members: int
    began_s: float
    ended_s: float


@dataclass
class Statistics:
    """What a worker has done so far."""

    steps: int = 0
    wait_s: float = 0.0
    """Seconds the training thread has waited for other workers."""
    groups: Counter[int] = field(default_factory=Counter)
    """How many averages it took part in, by the number of members."""
    failed_groups: int = 0
    bytes_sent: int = 0
    """Payload, estimated from the sizes of vectors and groups."""
    average_s: float = 0.0
    """Seconds from the start to the end of averages, summed."""
    recent: deque[TimedAverage] = field(default_factory=lambda: deque(maxlen=64))
    """The last averages."""

    def count_average(self, num_members: int, vector_bytes: int, took_s: float) -> None:
        """Note an all-reduce among some workers, which sends 2 (n - 1) / n of the vector."""
        self.groups[num_members] += 1
        self.bytes_sent += int(2 * (num_members - 1) / num_members * vector_bytes)
        self.average_s += took_s
        ended_s = time.perf_counter()
        self.recent.append(TimedAverage(num_members, ended_s - took_s, ended_s))


@dataclass(frozen=True)
class GeneratorPlace:
    """Where a generator runs that is not this job's own, and the secret that its workers know."""

    address: str
    secret: bytes


@dataclass
class Worker:
    """What a scheme works with: this worker's weights, and the way to the others'."""

    mesh: Mesh
    """Its ``worker`` is this worker's number; ``GroupMesh`` also has ``num_workers`` and ``group``."""
    weights: Weights
    optimizer: Optimizer
    total_steps: int | None
    """Training ends when all workers together have made so many steps; None: when their data ends."""
    timeout_s: float
    """How long a worker waits for others that must come, as at the end of training."""
    generator: GeneratorPlace | None = None
    model: str = ""
    """A fingerprint of the module: workers with another one cannot average with this."""
    statistics: Statistics = field(default_factory=Statistics)


class Scheme(ABC):
    """Who averages what, and when.

    The training thread calls ``before_step`` and ``after_step`` around each step of the optimizer, ``finish`` at the
    end, and ``average`` now and then. A scheme may have threads of its own; they read weights by
    ``self.weights.read``, which waits while a step is under way, and leave changes to ``after_step``.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.mesh = worker.mesh
        self.weights = worker.weights
        self.statistics = worker.statistics
        self.done = threading.Event()

    def before_step(self) -> None:  # noqa: B027  # most schemes have nothing to do here
        """Gradients are complete; the weights may be changed, too. Not called by an optimizer with a closure."""

    @abstractmethod
    def after_step(self) -> None:
        """The optimizer has made its step."""

    @abstractmethod
    def finish(self) -> None:
        """End what is under way; then all workers that are alive have the mean of their weights."""

    @abstractmethod
    def average(self) -> torch.Tensor:
        """Return the mean of all live workers' weights (``weights.num_weights`` elements); no weights change."""

    def close(self) -> None:  # noqa: B027  # nor here
        """End threads and connections; nothing may be waited for any more."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in here as waiting for others."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.statistics.wait_s += time.perf_counter() - begin


def check_options(kind: type[Scheme], name: str, options: dict[str, Any]) -> None:
    """Raise an error that lists a scheme's options if there are others."""
    known = [one for one in inspect.signature(kind).parameters if one != "worker"]
    for option in options:
        if option not in known:
            takes = ", ".join(known) if known else "no options"
            raise UsageError(f"scheme {name!r} has no option {option!r}: it takes {takes}")
