"""What a run found out, in the form it is saved in, and medians over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

import msgspec

from paceline.bench.results import Machine

DDP_PREFIX = "ddp-"


class Training(msgspec.Struct, frozen=True):
    """One training: a scheme in a scenario with a seed. ``failed`` says what went wrong; then the rest is empty.

    Lists are by worker. ``target_s`` is when the mean of all workers' weights reached the target on held-out samples
    (``mean_curve``), ``samples`` the samples of all workers until then, and ``own_target_s`` when the workers' own
    weights did, by the losses of their batches (``own_curve``). They are None if that was not within ``elapsed_s``.
    ``outside_s`` is a worker's time outside computation, ``wait_s`` the part of it that a scheme counts as waiting for
    others. ``consensus`` is the root mean square distance of the workers' weights from their mean at the end, before
    the last average, and ``consensus_share`` that over the norm of the mean. ``loss`` and ``accuracy`` are those of the
    final average on held-out samples (of worker 0, where nothing is averaged). ``busy`` is the share of all cores.
    """

    scheme: str
    scenario: str
    seed: int
    failed: str = ""
    target_s: float | None = None
    samples: int | None = None
    own_target_s: float | None = None
    elapsed_s: float = 0.0
    steps: list[int] = []
    steps_per_s: list[float] = []
    outside_s: list[float] = []
    wait_s: list[float] = []
    finish_s: float = 0.0
    sent_bytes: list[int] = []
    groups: dict[int, int] = {}
    failed_groups: int = 0
    consensus: float | None = None
    consensus_share: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    busy: float = 0.0
    processor_s: float = 0.0
    weights_differ: bool = False
    learning_rate: float = 0.0
    buckets: str = ""
    mean_curve: list[tuple[float, float]] = []
    own_curve: list[tuple[float, float]] = []


When = Callable[[Training], float | None]


def of_mean(one: Training) -> float | None:
    """Return when the mean of all workers' weights reached the target."""
    return one.target_s


def of_own(one: Training) -> float | None:
    """Return when the workers' own weights reached the target."""
    return one.own_target_s


class Spread(msgspec.Struct, frozen=True):
    """The median over seeds, with the least and the most; infinite where a target was not reached."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Summarise; a missing value counts as infinite.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, least=1.0, most=3.0)
        """
        known = [math.inf if value is None else value for value in values]
        return cls(statistics.median(known), min(known), max(known)) if known else None


class Setting(msgspec.Struct, frozen=True):
    """What was trained, and where. ``all_reduce_s`` is what one takes at the limit of the links.

    Where there is no lab, that and the rate of the first host's link are None.
    """

    place: str
    num_workers: int
    parameters: int
    vector_bytes: int
    compute_s: float
    jitter: float
    all_reduce_s: float | None
    up_bytes_per_s: float | None
    stretch: float
    batch: int
    learning_rate: float
    lr_warmup: int
    momentum: float
    target: float
    window: int
    seeds: int
    steps: int | None
    give_up_s: float


class DecentralizedResults(msgspec.Struct, frozen=True):
    """A whole run. ``probes`` has DDP's times a step by bucket size, before the trainings."""

    setting: Setting
    schemes: list[str]
    scenarios: list[str]
    machine: Machine
    slow: dict[str, list[float]]
    probes: dict[str, dict[str, float]]
    trainings: list[Training]

    def of(self, scheme: str, scenario: str) -> list[Training]:
        """Return the trainings of a scheme in a scenario that did not fail, by seed."""
        return [one for one in self.trainings if (one.scheme, one.scenario) == (scheme, scenario) and not one.failed]

    def spread(self, scheme: str, scenario: str, figure: Callable[[Training], float | None]) -> Spread | None:
        """Return a figure over seeds; None where all trainings failed."""
        return Spread.of(figure(one) for one in self.of(scheme, scenario))

    def time_s(self, scheme: str, scenario: str, when: When = of_mean) -> Spread | None:
        """Return the time to the target."""
        return self.spread(scheme, scenario, when)

    def best_ddp(self, scenario: str) -> str | None:
        """Return the DDP with the shortest median time to the target, if one has reached it."""
        times = {
            scheme: spread.median
            for scheme in self.schemes
            if scheme.startswith(DDP_PREFIX)
            and (spread := self.time_s(scheme, scenario)) is not None
            and math.isfinite(spread.median)
        }
        return min(times, key=lambda scheme: times[scheme], default=None)

    def ratio(self, peer: str | None, scheme: str, scenario: str, when: When = of_mean) -> Spread | None:
        """Return a peer's time over a scheme's: of the medians, and the least and the most of the seeds both ran."""
        if peer is None:
            return None
        theirs, ours = self.time_s(peer, scenario, when), self.time_s(scheme, scenario, when)
        if theirs is None or ours is None or math.isinf(ours.median):
            return None
        pairs = {one.seed: when(one) for one in self.of(peer, scenario)}
        ratios = [
            (pairs[one.seed] or math.inf) / took_s
            for one in self.of(scheme, scenario)
            if (took_s := when(one)) and one.seed in pairs
        ]
        if not ratios:
            return None
        return Spread(theirs.median / ours.median, min(ratios), max(ratios))

    def rate(self, scheme: str, scenario: str, *, fast: bool) -> Spread | None:
        """Return steps a second of a worker, the mean of the fast or of the slow ones; None if there are none."""
        slow = self.slow[scenario]
        chosen = [worker for worker, factor in enumerate(slow) if (factor == 1.0) == fast]
        if not chosen:
            return None
        return self.spread(scheme, scenario, lambda one: statistics.fmean(one.steps_per_s[worker] for worker in chosen))
