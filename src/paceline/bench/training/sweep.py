"""Iteration time against a grid of bucket sizes, and with the size that the wrapper finds while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.bench.crew import crews
from paceline.bench.rank_process.messages import Block
from paceline.bench.results import Machine
from paceline.bench.training.measure import (
    PROGRAM,
    Replay,
    Seen,
    add_block,
    calibrate,
    order_for,
    prepared,
    searched,
    settle,
    take_turns,
)
from paceline.bench.training.results import SweepPoint, SweepResults
from paceline.bench.training.strategies import ALONE, TUNING_ITERATIONS, Buckets, replayer

if TYPE_CHECKING:
    from paceline.lab import Lab

GRID_POINTS = 12
SPAN = 100
"""The largest bucket over the smallest."""


def grid(gradient_bytes: int, points: int = GRID_POINTS) -> list[int]:
    """Bucket sizes from a hundredth of the model to all of it, equal factors apart.

    >>> grid(10_000, 3)
    [100, 1000, 10000]
    """
    return [max(1, round(size)) for size in np.geomspace(gradient_bytes / SPAN, gradient_bytes, points)]


def sweep(replay: Replay, strategy: str, lab: Lab | None, seen: Seen) -> SweepResults:
    """Measure the points of the grid, one after another; search; then the best of the grid and the find take turns."""
    machine, sizes = Machine.here(), grid(replay.scaled.gradient_bytes)
    fixed, tuned = (f"{strategy}, {how}" for how in ("fixed", "tuned"))
    contenders = [
        replayer(replay.job(strategy), fixed),
        replayer(replay.job(strategy), tuned),
        replayer(replay.job(ALONE)),
    ]
    seen(f"starting {replay.num_ranks} ranks of {', '.join(one.name for one in contenders)}", 0.0)
    with crews(contenders, replay.num_ranks, program=PROGRAM, lab=lab, timeout_s=replay.timeout_s) as started:
        between_s = calibrate(started[-1], replay, seen)
        points = []
        for index, size in enumerate(sizes):
            seen(f"{strategy}: buckets of {size} bytes", 0.5 * index / len(sizes))
            samples = prepared(started[0], replay, order_for(replay, Buckets(size), between_s))
            settle(started[0], replay)
            add_block(started[0], samples, replay, Block(1, replay.iterations))
            points.append(SweepPoint.of(size, samples))
        seen(f"{strategy}: finds its bucket size", 0.5)
        found = {tuned: searched(started[1], replay, between_s)}
        best_bytes, _ = min(zip(sizes, points, strict=True), key=lambda pair: pair[1].time.median_s)
        found[fixed] = prepared(started[0], replay, order_for(replay, Buckets(best_bytes), between_s))
        for crew in started[:2]:
            settle(crew, replay)
        take_turns(started[:2], found, replay, lambda what, share: seen(what, 0.8 + 0.2 * share))
    return SweepResults(
        replay.setting(lab, {}),
        strategy,
        {strategy: contenders[0].variables},
        machine,
        points,
        best=SweepPoint.of(best_bytes, found[fixed]),
        tuned=SweepPoint.of(None, found[tuned]),
        tuned_over_best=found[tuned].over(found[fixed]),
        tuning_iterations=TUNING_ITERATIONS,
    )
