"""The mean of all workers' weights while they train: what finish() would leave, and its loss on held-out samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.bench.decentralized.board import SNAPSHOTS_S, first_crossing, snapshot_path

EVALUATED_EVERY = 4
"""One of so many snapshots is evaluated while workers train, since that takes time of the cores they share."""

Evaluate = Callable[[npt.NDArray[np.float32]], float]


class MeanWatch:
    """Puts the workers' snapshots together as they come, and finds when their mean reaches the target.

    ``curve`` has (time since the first snapshot could be taken, loss).
    """

    def __init__(self, folder: Path, num_workers: int, target: float, evaluate: Evaluate) -> None:
        self.curve: list[tuple[float, float]] = []
        self._folder, self._num_workers, self._target, self._evaluate = folder, num_workers, target, evaluate
        self._next = 1
        self._between: list[tuple[float, npt.NDArray[np.float32]]] = []  # means not evaluated since the last that was

    @property
    def reached_s(self) -> float | None:
        """When the loss first was at the target or below."""
        return first_crossing(self.curve, self._target)

    @property
    def known_s(self) -> float:
        """Up to when the loss is known."""
        return self.curve[-1][0] if self.curve else 0.0

    def look(self) -> None:
        """Take the snapshots that all workers have saved, and delete their files."""
        while True:
            paths = [snapshot_path(self._folder, self._next, worker) for worker in range(self._num_workers)]
            if not all(path.exists() for path in paths):
                return
            mean = np.stack([np.load(path) for path in paths]).mean(axis=0, dtype=np.float64).astype(np.float32)
            for path in paths:
                path.unlink()
            self._add(self._next * SNAPSHOTS_S, np.asarray(mean))
            self._next += 1

    def _add(self, time_s: float, mean: npt.NDArray[np.float32]) -> None:
        if self._next % EVALUATED_EVERY:
            self._between.append((time_s, mean))
            return
        before = self.reached_s
        loss = self._evaluate(mean)
        if before is None and loss <= self._target:  # when exactly: those between are wanted, too
            self.curve += [(at_s, self._evaluate(one)) for at_s, one in self._between]
        self.curve.append((time_s, loss))
        self._between.clear()
