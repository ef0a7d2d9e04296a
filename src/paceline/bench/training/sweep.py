"""Iteration time against a grid of bucket sizes, and with the size that the wrapper finds while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.bench.crew import Crew, crews
from paceline.bench.measure import Samples
from paceline.bench.rank_process.messages import Block, Prepared
from paceline.bench.results import Machine
from paceline.bench.training.measure import PROGRAM, Replay, Seen, add_block, order_for
from paceline.bench.training.results import SweepPoint, SweepResults
from paceline.bench.training.scaling import bounds_of
from paceline.bench.training.strategies import AUTO_BYTES, CHECKED_STEPS, replayer

if TYPE_CHECKING:
    from paceline.lab import Lab

GRID_POINTS = 12
TUNING_ITERATIONS = 60
"""So many iterations a search may take; then the clock runs."""

SPAN = 100
"""The largest bucket over the smallest."""


def grid(gradient_bytes: int, points: int = GRID_POINTS) -> list[int]:
    """Bucket sizes from a hundredth of the model to all of it, equal factors apart.

    >>> grid(10_000, 3)
    [100, 1000, 10000]
    """
    return [max(1, round(size)) for size in np.geomspace(gradient_bytes / SPAN, gradient_bytes, points)]


def sweep(replay: Replay, strategy: str, lab: Lab | None, seen: Seen) -> SweepResults:
    """Measure all points of the grid, one after another, then the search."""
    machine, sizes = Machine.here(), grid(replay.scaled.gradient_bytes)
    contender = replayer(replay.job(strategy))
    seen(f"starting {replay.num_ranks} ranks of {strategy}", 0.0)
    with crews([contender], replay.num_ranks, program=PROGRAM, lab=lab, timeout_s=replay.timeout_s) as (crew,):
        points = []
        for index, size in enumerate(sizes):
            seen(f"{strategy}: buckets of {size} bytes", index / (len(sizes) + 5))
            points.append(_point(crew, replay, size, warmup=1))
        seen(f"{strategy}: finds its bucket size", len(sizes) / (len(sizes) + 5))
        tuned = _point(crew, replay, AUTO_BYTES, warmup=TUNING_ITERATIONS - CHECKED_STEPS)
    bounds = bounds_of(replay.scaled, lab.cluster) if lab else None
    setting = replay.setting(lab.cluster.name if lab else "one host", bounds)
    environment = {strategy: contender.variables}
    return SweepResults(setting, strategy, environment, machine, points, tuned, TUNING_ITERATIONS)


def _point(crew: Crew, replay: Replay, size: int, warmup: int) -> SweepPoint:
    prepare, samples = order_for(replay.profile.model, size), Samples()
    expected_s = (warmup + replay.iterations) * (replay.scaled.forward_s + replay.scaled.backward_s)
    samples.wrong = sum(one.wrong for one in crew.ask(prepare, Prepared, prepare.operation, expected_s=expected_s))
    add_block(crew, samples, Block(warmup, replay.iterations), prepare.operation, 2 * expected_s)
    return SweepPoint(size or None, samples.summary(), samples.wrong)
