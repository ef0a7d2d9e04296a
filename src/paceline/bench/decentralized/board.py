"""What ranks and controller tell each other while they train: one file that all have mapped into memory.

Ranks write how far they are and each batch's loss; the controller writes when the clock starts and when training ends.
Nothing of it crosses the network that is measured.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

MOST_STEPS = 20_000
"""Steps of a worker that the board can hold."""

SNAPSHOTS_S = 0.25
"""Workers save their weights so often, all at the same times, counted from when the controller says go."""

_GO, _STOP, _GO_NS = 0, 1, 2
_WARM, _STEPS = 0, 1
_HEADER = 3

Floats = npt.NDArray[np.float64]


class Board:
    """A rank writes ``note_*``; the controller writes ``go`` and ``stop``; both read."""

    def __init__(self, path: Path, num_ranks: int, *, create: bool = False) -> None:
        self._num_ranks = num_ranks
        words = _HEADER + 2 * num_ranks
        size = 8 * (words + 2 * MOST_STEPS * num_ranks)
        if create:
            with path.open("wb") as file:
                file.truncate(size)
        whole = np.memmap(path, mode="r+", dtype=np.int64, shape=(size // 8,))
        self._header = whole[:_HEADER]
        self._counts = whole[_HEADER:words].reshape(num_ranks, 2)
        self._records = whole[words:].view(np.float64).reshape(num_ranks, MOST_STEPS, 2)

    # Orders: 0 is none; workers that keep in step begin and end at this step, counted from the first warm-up step.

    @property
    def go(self) -> int:
        """The step at which training begins after the warm-up."""
        return int(self._header[_GO])

    @go.setter
    def go(self, step: int) -> None:
        self._header[_GO_NS] = time.monotonic_ns()
        self._header[_GO] = step

    @property
    def go_s(self) -> float:
        """When the controller said go, by the monotonic clock."""
        return float(self._header[_GO_NS]) * 1e-9

    @property
    def stop(self) -> int:
        """The step at which training ends."""
        return int(self._header[_STOP])

    @stop.setter
    def stop(self, step: int) -> None:
        self._header[_STOP] = step

    # A rank's progress.

    def note_warm(self, rank: int, steps: int) -> None:
        """Note how many warm-up steps a rank has made."""
        self._counts[rank, _WARM] = steps

    def note_loss(self, rank: int, time_s: float, loss: float) -> None:
        """Note the loss of a rank's next batch."""
        steps = int(self._counts[rank, _STEPS])
        if steps < MOST_STEPS:
            self._records[rank, steps] = time_s, loss
            self._counts[rank, _STEPS] = steps + 1  # after the record, so that nobody reads it too early

    @property
    def warm(self) -> list[int]:
        """Warm-up steps by rank."""
        return [int(count) for count in self._counts[:, _WARM]]

    @property
    def steps(self) -> list[int]:
        """Training steps by rank."""
        return [int(count) for count in self._counts[:, _STEPS]]

    @property
    def began_s(self) -> float:
        """When the first batch was seen, by the monotonic clock."""
        return float(min(one[0, 0] for one in self.losses() if len(one)))

    def batches_until(self, time_s: float) -> int:
        """Return how many batches all workers had seen by a moment of the monotonic clock."""
        return sum(int(np.count_nonzero(one[:, 0] <= time_s)) for one in self.losses())

    def losses(self) -> list[Floats]:
        """Return (time, loss) of all batches, by rank."""
        return [np.array(self._records[rank, :steps]) for rank, steps in enumerate(self.steps)]


@dataclass(frozen=True)
class Curve:
    """The moving mean of the losses of all workers' batches, in the order of time.

    A point is the mean of the last ``window`` batches, whoever's they are. Times count from the first batch.
    """

    times_s: Floats
    losses: Floats
    window: int

    @classmethod
    def of(cls, records: list[Floats], window: int) -> Curve:
        """Merge the records of all workers."""
        merged = np.concatenate([one for one in records if len(one)] or [np.empty((0, 2))])
        merged = merged[np.argsort(merged[:, 0], kind="stable")]
        if len(merged) < window:
            return cls(np.empty(0), np.empty(0), window)
        sums = np.concatenate([[0.0], np.cumsum(merged[:, 1])])
        means = (sums[window:] - sums[:-window]) / window
        return cls(merged[window - 1 :, 0] - merged[0, 0], means, window)

    def reached(self, target: float) -> float | None:
        """Return the time at which the mean first is at the target or below; else None."""
        below = np.flatnonzero(self.losses <= target)
        return float(self.times_s[below[0]]) if len(below) else None

    def thinned(self, points: int) -> list[tuple[float, float]]:
        """Return at most so many points, with equal numbers of batches between them."""
        if not len(self.times_s):
            return []
        chosen = np.unique(np.linspace(0, len(self.times_s) - 1, points).round().astype(int)).tolist()
        pairs = [(round(float(self.times_s[one]), 3), round(float(self.losses[one]), 4)) for one in chosen]
        return [(time_s, loss) for time_s, loss in pairs if math.isfinite(loss)]


def snapshot_path(folder: Path, number: int, rank: int) -> Path:
    """Return where a worker saves its weights at a time."""
    return folder / f"weights{number}_{rank}.npy"


def save_snapshot(weights: npt.NDArray[np.float32], folder: Path, numbers: Sequence[int], rank: int) -> None:
    """Save a worker's weights as its snapshots of these numbers. Whoever sees one of the files sees all of it."""
    path = folder / f"saving{rank}.npy"
    np.save(path, weights)
    for number in numbers[1:]:
        os.link(path, snapshot_path(folder, number, rank))
    os.replace(path, snapshot_path(folder, numbers[0], rank))


def first_crossing(points: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return when a curve of (time, value) first is at the target or below; None if it is above all the time.

    Values between two points are on a line.

    >>> first_crossing([(0.0, 3.0), (1.0, 2.0), (2.0, 1.0)], 1.5)
    1.5
    """
    place = next((place for place, (_, value) in enumerate(points) if value <= target), None)
    if place is None:
        return None
    time_s, value = points[place]
    if place == 0:
        return time_s
    before_s, before = points[place - 1]
    return before_s + (before - target) / (before - value) * (time_s - before_s)
