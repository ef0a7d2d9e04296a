"""What a replay found out, in the form it is saved in."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paceline.bench.figures import Ratio, Summary
from paceline.bench.measure import Samples
from paceline.bench.results import Machine
from paceline.bench.training.bounds import Bounds
from paceline.bench.training.strategies import ALONE, DDP, Buckets


class Setting(msgspec.Struct, frozen=True):
    """What was replayed. Factors are what sizes and times of the true model were multiplied by; the rest is scaled."""

    model: str
    source: str
    network: str
    place: str
    num_ranks: int
    num_tensors: int
    num_elements: int
    size_factor: float
    time_factor: float
    gradient_bytes: int
    buckets: dict[str, Buckets]  # by strategy; those that search while they train are not there
    clip: bool
    scaler: bool
    forward_s: float
    backward_s: float
    bounds: Bounds | None


class Trial(msgspec.Struct, frozen=True):
    """What a tuned DDP did with one choice of buckets, before the clock ran."""

    buckets: Buckets
    time: Summary
    wrong: int


class Row(msgspec.Struct, frozen=True):
    """One strategy. ``exposed_s`` is what it takes longer than the computation alone, of the same run. Ratios are a
    peer's time over this one's: ``best_ddp_over`` that of the fastest DDP of the run.
    """

    strategy: str
    time: Summary
    wrong: int
    exposed_s: float
    best_ddp_over: Ratio | None
    ddp_gloo_over: Ratio | None
    ddp_over: Ratio | None
    over_bound: float | None
    over_layers_bound: float | None
    over_wait_free_layers_bound: float | None

    @classmethod
    def of(cls, name: str, samples: Samples, found: Mapping[str, Samples], setting: Setting) -> Row:
        """The figures of one of the strategies that were measured side by side."""
        time, bounds, best = samples.summary(), setting.bounds, best_ddp(found)
        return cls(
            strategy=name,
            time=time,
            wrong=samples.wrong,
            exposed_s=max(0.0, time.median_s - found[ALONE].summary().median_s),
            best_ddp_over=found[best].over(samples) if best else None,
            ddp_gloo_over=found["ddp-gloo"].over(samples) if "ddp-gloo" in found else None,
            ddp_over=found["ddp"].over(samples) if "ddp" in found else None,
            over_bound=time.median_s / bounds.any_schedule_s if bounds else None,
            over_layers_bound=time.median_s / bounds.layers_s if bounds else None,
            over_wait_free_layers_bound=time.median_s / bounds.wait_free_layers_s if bounds else None,
        )


def best_ddp(found: Mapping[str, Samples]) -> str | None:
    """The strategy of DistributedDataParallel with the shortest median, if there is one."""
    names = [name for name in found if name.startswith(DDP)]
    return min(names, key=lambda name: found[name].summary().median_s, default=None)


class TrainingResults(msgspec.Struct, frozen=True):
    """A whole run. ``tuning`` has all that the tuned DDPs tried, in the order of the trials."""

    setting: Setting
    tuning: dict[str, list[Trial]]
    best_ddp: str | None
    rounds: int
    versions: dict[str, dict[str, str]]
    environment: dict[str, dict[str, str]]
    machine: Machine
    rows: list[Row]

    def of(self, strategy: str) -> Row:
        """The row of a strategy."""
        return next(row for row in self.rows if row.strategy == strategy)


class SweepPoint(msgspec.Struct, frozen=True):
    """One bucket size of a sweep, in the lab; None is what the wrapper has found by itself."""

    bucket_bytes: int | None
    time: Summary
    wrong: int

    @classmethod
    def of(cls, bucket_bytes: int | None, samples: Samples) -> SweepPoint:
        """What was measured with a size."""
        return cls(bucket_bytes, samples.summary(), samples.wrong)


class SweepResults(msgspec.Struct, frozen=True):
    """Iteration time against bucket size. ``best`` is the fastest of the grid, measured anew beside ``tuned``."""

    setting: Setting
    strategy: str
    environment: dict[str, dict[str, str]]
    machine: Machine
    grid: list[SweepPoint]
    best: SweepPoint
    tuned: SweepPoint
    tuned_over_best: Ratio
    tuning_iterations: int
