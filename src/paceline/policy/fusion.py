"""How much to fuse: thresholds that were tried and their iteration times in, the next threshold out. Pure.

Bayesian optimisation of one variable, the logarithm of the threshold: a Gaussian process with a fitted noise level, and
the point of the highest expected improvement. The process is scikit-learn's: of the libraries at hand it is the best
kept, fits the noise of iteration times by itself, and is a function of its data, where others (optuna,
bayesian-optimization, which is built on it) bring a loop, a storage and a state of their own. Without scikit-learn the
thresholds are those of a grid.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

USUAL_BYTES = 25_000_000
"""As much as DistributedDataParallel fuses, unless the model is large."""

MOST_BUCKETS = 20
"""More of them hide nothing more, and each costs its start-ups, twice."""

TRIALS = 10
"""How many thresholds are tried."""

CANDIDATES = 129
"""How finely the range of thresholds is looked at."""

_EXPLORE = 0.1
"""Expected improvement counts what exceeds the best by this share of the spread of times."""

_OPENING = (0.62, 0.25, 0.88)
"""The first trials, as parts of the range (of logarithms): with fewer the process knows nothing."""


def usual_threshold(model_bytes: int) -> int:
    """What to fuse where nobody has said or tried anything.

    >>> usual_threshold(100_000_000), usual_threshold(1_000_000_000)
    (25000000, 50000000)
    """
    return max(USUAL_BYTES, model_bytes // MOST_BUCKETS)


@dataclass(frozen=True)
class Trial:
    """A threshold, and the time an iteration took with it."""

    threshold_bytes: int
    iteration_s: float


def has_library() -> bool:
    """Whether scikit-learn is installed."""
    from importlib.util import find_spec

    return find_spec("sklearn") is not None


def best(trials: Sequence[Trial], *, use_library: bool = True) -> Trial:
    """The trial that is best by what all of them say together: one that was fast by chance has slower neighbours.

    Without scikit-learn it is the one with the shortest iterations.
    """
    if not use_library or len(trials) <= len(_OPENING):
        return min(trials, key=lambda trial: trial.iteration_s)
    parts = np.log([float(trial.threshold_bytes) for trial in trials])
    parts = (parts - parts.min()) / (float(np.ptp(parts)) or 1.0)
    process = _fitted(parts, np.array([trial.iteration_s for trial in trials]))
    return trials[int(np.argmax(process.predict(parts[:, None])))]


def next_threshold(trials: Sequence[Trial], low_bytes: int, high_bytes: int, *, use_library: bool = True) -> int:
    """What to try after these trials, between the two limits.

    >>> next_threshold([], 1_000_000, 256_000_000)
    31140434
    """
    span = math.log(high_bytes / low_bytes)

    def threshold(part: float) -> int:
        return round(low_bytes * math.exp(part * span))

    if span <= 0:
        return low_bytes
    if len(trials) < len(_OPENING):
        return threshold(_OPENING[len(trials)])
    if not use_library:
        return threshold(_unvisited([math.log(trial.threshold_bytes / low_bytes) / span for trial in trials]))
    parts = np.array([math.log(trial.threshold_bytes / low_bytes) / span for trial in trials])
    times_s = np.array([trial.iteration_s for trial in trials])
    candidates = np.linspace(0.0, 1.0, CANDIDATES)
    return threshold(float(candidates[int(np.argmax(_expected_improvement(parts, times_s, candidates)))]))


def _unvisited(parts: Sequence[float]) -> float:
    """The middle of the widest gap: a grid that is refined as long as there are trials."""
    edges = sorted({0.0, 1.0, *parts})
    gaps = [(right - left, left) for left, right in itertools.pairwise(edges)]
    width, left = max(gaps)
    return left + width / 2


def _expected_improvement(
    parts: NDArray[np.float64], times_s: NDArray[np.float64], candidates: NDArray[np.float64]
) -> NDArray[np.float64]:
    """How much each candidate is expected to shorten an iteration, in units of the spread of the times so far."""
    process = _fitted(parts, times_s)
    means, deviations = process.predict(candidates[:, None], return_std=True)
    gains = means - float(process.predict(parts[:, None]).max()) - _EXPLORE
    ratios = gains / np.maximum(deviations, 1e-9)
    density = np.exp(-0.5 * ratios**2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * (1 + math.erf(ratio / math.sqrt(2))) for ratio in ratios])
    improvement: NDArray[np.float64] = gains * below + deviations * density
    return improvement


def _fitted(parts: NDArray[np.float64], times_s: NDArray[np.float64]) -> Any:
    """The process that explains how much shorter than the mean times are, in units of their spread."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern, WhiteKernel

    spread_s = float(np.std(times_s)) or 1.0
    scores = (float(np.mean(times_s)) - times_s) / spread_s
    kernel = Matern(length_scale=0.3, length_scale_bounds=(0.1, 2.0), nu=2.5) + WhiteKernel(0.05, (1e-3, 0.5))
    process = GaussianProcessRegressor(kernel, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a fit at a limit of its range is good enough
        process.fit(parts[:, None], scores)
    return process
