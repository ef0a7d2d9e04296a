"""What a replay found out, in the form it is saved in."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paceline.bench.figures import Ratio, Summary
from paceline.bench.measure import Samples
from paceline.bench.results import Machine
from paceline.bench.training.bounds import Bounds
from paceline.bench.training.strategies import ALONE


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
    bucket_bytes: dict[str, int]  # by strategy
    forward_s: float
    backward_s: float
    bounds: Bounds | None
    layered_s: float | None


class Row(msgspec.Struct, frozen=True):
    """One strategy. ``exposed_s`` is what it takes longer than the computation alone, of the same run; ``hidden_s`` is
    the rest of what communication takes at the limit of the links. Ratios are a peer's time over this one's.
    """

    strategy: str
    time: Summary
    wrong: int
    exposed_s: float
    hidden_s: float | None
    ddp_gloo_over: Ratio | None
    ddp_over: Ratio | None
    over_dear_bound: float | None
    over_wait_free_bound: float | None
    over_layered_bound: float | None

    @classmethod
    def of(cls, name: str, samples: Samples, found: Mapping[str, Samples], setting: Setting) -> Row:
        """The figures of one of the strategies that were measured side by side."""
        time, bounds = samples.summary(), setting.bounds
        exposed_s = max(0.0, time.median_s - found[ALONE].summary().median_s)
        return cls(
            strategy=name,
            time=time,
            wrong=samples.wrong,
            exposed_s=exposed_s,
            hidden_s=max(0.0, bounds.all_reduce_s - exposed_s) if bounds and name != ALONE else None,
            ddp_gloo_over=found["ddp-gloo"].over(samples) if "ddp-gloo" in found else None,
            ddp_over=found["ddp"].over(samples) if "ddp" in found else None,
            over_dear_bound=time.median_s / bounds.dear_s if bounds else None,
            over_wait_free_bound=time.median_s / bounds.wait_free_s if bounds else None,
            over_layered_bound=time.median_s / setting.layered_s if setting.layered_s else None,
        )


class TrainingResults(msgspec.Struct, frozen=True):
    """A whole run."""

    setting: Setting
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
