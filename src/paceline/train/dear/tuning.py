"""The fusion threshold: fixed, from a file, or tuned while training.

Rank 0 measures iterations from step() to step() and asks :mod:`paceline.policy.fusion` what to try next; the others
follow what it says in the agreement of a step. After ten trials the best threshold stays, and is saved.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from paceline.errors import FileFormatError, UsageError
from paceline.policy.fusion import TRIALS, Trial, best, has_library, next_threshold, usual_threshold
from paceline.train.dear.laps import Laps
from paceline.units import format_duration, format_size

log = logging.getLogger("paceline.dear")

LOW_BYTES = 1_000_000
HIGH_BYTES = 256_000_000
"""Between these a search looks, or from a hundredth of a small model to all of it."""


class Tuner:
    """A threshold, and on rank 0 the search for a better one."""

    def __init__(
        self,
        threshold_bytes: int,
        *,
        searching: bool = False,
        path: Path | None = None,
        high_bytes: int = HIGH_BYTES,
        laps: Laps | None = None,
    ) -> None:
        self.threshold_bytes = threshold_bytes
        self.trials: list[Trial] = []
        self.searching = searching
        self._path = path
        self._low_bytes = max(1, min(LOW_BYTES, high_bytes // 100))
        self._high_bytes = high_bytes
        self._laps = laps or Laps()
        self._library = has_library()
        if searching and not self._library:
            log.info("scikit-learn is not installed: thresholds are those of a grid (pip install 'paceline[tune]')")

    def next_threshold_bytes(self) -> int:
        """Rank 0, once a step: the threshold to change to, or 0 to go on."""
        if not self.searching:
            return 0
        iteration_s = self._laps.lap()
        if iteration_s is None:
            return 0
        trial = Trial(self.threshold_bytes, iteration_s)
        self.trials.append(trial)
        log.info(
            "fusion, trial %d of %d: %s takes %s an iteration",
            len(self.trials),
            TRIALS,
            format_size(trial.threshold_bytes),
            format_duration(trial.iteration_s),
        )
        if len(self.trials) < TRIALS:
            chosen = next_threshold(self.trials, self._low_bytes, self._high_bytes, use_library=self._library)
            self._laps.pass_over()  # choosing takes time that is no iteration's
            return chosen
        return self._finish()

    def _finish(self) -> int:
        self.searching = False
        winner = best(self.trials, use_library=self._library)
        log.info("fusion: %s is best", format_size(winner.threshold_bytes))
        if self._path is not None:
            save(self._path, winner.threshold_bytes, self.trials)
        return winner.threshold_bytes

    def follow(self, threshold_bytes: int) -> None:
        """All ranks: this threshold holds from now on."""
        self.threshold_bytes = threshold_bytes


def make_tuner(
    bucket_mb: float | str | None, path: str | Path | None, model_bytes: int, *, may_search: bool = True
) -> Tuner:
    """A tuner for what the user asked: megabytes, or "auto"; a file of an earlier search ends the search."""
    if bucket_mb is None:
        return Tuner(usual_threshold(model_bytes))
    file = Path(path) if path is not None else None
    if isinstance(bucket_mb, str):
        if bucket_mb != "auto":
            raise UsageError(f"bucket_mb is a number of megabytes or 'auto', not {bucket_mb!r}")
        if file is not None and file.exists():
            return Tuner(load(file))
        if not may_search:
            usual = Tuner(usual_threshold(model_bytes))
            log.info(
                "fusion: no search, as PACELINE_DETERMINISTIC is set: %s are fused", format_size(usual.threshold_bytes)
            )
            return usual
        high_bytes = max(2, min(HIGH_BYTES, model_bytes))
        return Tuner(min(usual_threshold(model_bytes), high_bytes), searching=True, path=file, high_bytes=high_bytes)
    if not bucket_mb > 0:
        raise UsageError(f"bucket_mb is a positive number of megabytes, not {bucket_mb}")
    return Tuner(max(1, round(bucket_mb * 1e6)))


def save(path: Path, threshold_bytes: int, trials: list[Trial]) -> None:
    """Write the result of a search, with its trials."""
    tried = [{"threshold_bytes": trial.threshold_bytes, "iteration_s": trial.iteration_s} for trial in trials]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"threshold_bytes": threshold_bytes, "trials": tried}, indent=2) + "\n")


def load(path: Path) -> int:
    """The threshold that a search has found."""
    try:
        found: Any = json.loads(path.read_text())
        threshold_bytes = found["threshold_bytes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(f"{path} is no result of a fusion search ({error}): delete it to search anew") from None
    if not isinstance(threshold_bytes, int) or threshold_bytes <= 0:
        raise FileFormatError(f"{path}: threshold_bytes is {threshold_bytes!r}, not a number of bytes: delete the file")
    return threshold_bytes
