"""One interleaved run of a replay: blocks of iterations of all strategies take turns, A B C A B C.

A block starts with an iteration that is not timed, because communication of one iteration may end in the next: the
timed ones begin with what the iteration before has left under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.bench.crew import Crew, crews
from paceline.bench.measure import Samples
from paceline.bench.rank_process.messages import Block, Prepare, Prepared, Timed
from paceline.bench.results import Machine
from paceline.bench.training.profile import Profile
from paceline.bench.training.results import Row, Setting, TrainingResults, Trial, best_ddp
from paceline.bench.training.scaling import Scale, bounds_of
from paceline.bench.training.strategies import (
    ALONE,
    AUTO,
    CHECKED_STEPS,
    DDP,
    DDP_BUCKETS,
    DEAR,
    SETTLING_ITERATIONS,
    SHARDED,
    TRIED_BYTES,
    TRIED_ITERATIONS,
    TRIED_WITHOUT_FIRST,
    TUNED,
    TUNING_ITERATIONS,
    Buckets,
    Job,
    replayer,
)
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster
from paceline.policy.fusion import USUAL_BYTES, usual_threshold
from paceline.units import format_size

if TYPE_CHECKING:
    from paceline.lab import Lab

CALIBRATED_STEPS = 5
"""Iterations of the bare module whose median is compared with its profile."""

PROGRAM = Path(__file__).with_name("rank_program.py")
Seen = Callable[[str, float], None]


@dataclass(frozen=True)
class Replay:
    """What to replay: a profile at its true size, its scale, the cluster it is scaled to, and who takes part.

    ``bucket_bytes`` is that of the true model; it is scaled like sizes are. None: what each strategy fuses by itself.
    With ``clip``, gradients are clipped in each iteration; with ``scaler``, a GradScaler makes the steps.
    """

    profile: Profile
    network: str
    scale: Scale
    cluster: Cluster
    strategies: Sequence[str]
    num_ranks: int
    iterations: int = 15
    rounds: int = 3
    bucket_bytes: int | None = None
    clip: bool = False
    scaler: bool = False
    timeout_s: float = 120.0
    scaled: Profile = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what measures nothing."""
        if not 1 <= self.rounds <= self.iterations <= 10_000:
            raise UsageError(f"--iterations is at least --rounds ({self.rounds}) and at most 10000")
        if not 2 <= self.num_ranks <= 64:
            raise UsageError(f"a training is replayed with 2 to 64 ranks on one machine, not {self.num_ranks}")
        object.__setattr__(self, "scaled", self.scale.apply(self.profile))

    def job(self, strategy: str) -> Job:
        """What the ranks of a strategy are told."""
        factors = self.scale.size_factor, self.scale.time_factor
        return Job(strategy, self.profile.model, *factors, self.clip, self.scaler)

    @property
    def words(self) -> str:
        """What the ranks are doing."""
        return f"a replay of {self.profile.model}"

    def buckets(self, strategy: str) -> Buckets:
        """What a strategy fuses in the lab if nothing is tuned."""
        if self.bucket_bytes is not None:
            true = Buckets(self.bucket_bytes)
        elif strategy.startswith(DDP):
            true = DDP_BUCKETS
        else:
            is_dear = strategy.startswith(DEAR)
            true = Buckets(usual_threshold(self.profile.gradient_bytes) if is_dear else USUAL_BYTES)
        return true.scaled(self.scale.size_factor)

    def tried(self) -> list[Buckets]:
        """What is tried for DDP in the lab, with its small first bucket where that is smaller than the others."""
        whole, first = self.scaled.gradient_bytes, DDP_BUCKETS.scaled(self.scale.size_factor).first
        scaled = {max(1, round(size * self.scale.size_factor)) for size in TRIED_BYTES}
        sizes = [*sorted(size for size in scaled if size < whole), whole]
        return [Buckets(size, first if first < size else 0) for size in sizes]

    def setting(self, lab: Lab | None, buckets: Mapping[str, Buckets]) -> Setting:
        """How to read the figures; without a lab there are no limits."""
        return Setting(
            model=self.profile.model,
            source=self.profile.source,
            network=self.network,
            place=lab.cluster.name if lab else "one host",
            num_ranks=self.num_ranks,
            num_tensors=self.profile.num_tensors,
            num_elements=self.profile.num_elements,
            size_factor=self.scale.size_factor,
            time_factor=self.scale.time_factor,
            gradient_bytes=self.scaled.gradient_bytes,
            buckets=dict(buckets),
            clip=self.clip,
            scaler=self.scaler,
            forward_s=self.scaled.forward_s,
            backward_s=self.scaled.backward_s,
            bounds=bounds_of(self.scaled, lab.cluster) if lab else None,
        )


def measure(replay: Replay, lab: Lab | None, seen: Seen) -> TrainingResults:
    """Let all strategies, and the computation alone, take turns."""
    names = [*replay.strategies, ALONE]
    machine = Machine.here()
    seen(f"starting {replay.num_ranks} ranks of {', '.join(names)}", 0.0)
    contenders = [replayer(replay.job(name)) for name in names]
    with crews(contenders, replay.num_ranks, program=PROGRAM, lab=lab, timeout_s=replay.timeout_s) as started:
        between_s = calibrate(started[-1], replay, seen)
        found: dict[str, Samples] = {}
        buckets: dict[str, Buckets] = {}
        tuning: dict[str, list[Trial]] = {}
        for crew in started:
            name = crew.contender.name
            seen(f"{name} {'finds its bucket size' if name.endswith(TUNED) else 'checks its weights'}", 0.0)
            if name.endswith(TUNED) and name.startswith(DEAR):
                found[name] = searched(crew, replay, between_s)
            else:
                buckets[name] = replay.buckets(name)
                if name.endswith(TUNED):
                    tuning[name] = tune(crew, replay, between_s, seen)
                    buckets[name] = fastest(tuning[name])[0].buckets
                found[name] = prepared(crew, replay, order_for(replay, buckets[name], between_s))
                found[name].wrong += sum(trial.wrong for trial in tuning.get(name, ()))
            settle(crew, replay)
        take_turns(started, found, replay, seen)
        versions = {crew.contender.name: crew.versions for crew in started}
        environment = {crew.contender.name: crew.contender.variables for crew in started}
    setting = replay.setting(lab, {name: size for name, size in buckets.items() if name != ALONE})
    rows = [Row.of(name, samples, found, setting) for name, samples in found.items()]
    return TrainingResults(setting, tuning, best_ddp(found), replay.rounds, versions, environment, machine, rows)


def calibrate(alone: Crew, replay: Replay, seen: Seen) -> float:
    """What passes between two layers of the bare module, on average: seconds beyond its profile.

    Found with layers that take their whole time, and again with what was found.
    """
    seen("measuring what passes between layers", 0.0)
    between_s = 0.0
    for _ in range(2):
        samples = prepared(alone, replay, order_for(replay, replay.buckets(ALONE), between_s))
        add_block(alone, samples, replay, Block(1, CALIBRATED_STEPS))
        beyond_s = samples.summary().median_s - replay.scaled.compute_s
        between_s = max(0.0, between_s + beyond_s / (2 * len(replay.scaled.layers)))
    return between_s


def prepared(crew: Crew, replay: Replay, prepare: Prepare) -> Samples:
    """Have the model wrapped and its weights checked; no times yet."""
    answers = crew.ask(prepare, Prepared, replay.words, expected_s=2 * CHECKED_STEPS * replay.scaled.compute_s)
    return Samples(wrong=sum(one.wrong for one in answers))


def settle(crew: Crew, replay: Replay) -> None:
    """Give DataParallel the time to decide what is all-reduced; sharded, nothing is."""
    if crew.contender.name.startswith(DEAR) and SHARDED not in crew.contender.name:
        add_block(crew, Samples(), replay, Block(0, SETTLING_ITERATIONS))


def searched(crew: Crew, replay: Replay, between_s: float) -> Samples:
    """The same for a strategy that finds its bucket size; then it has time to do so."""
    samples = prepared(crew, replay, order_for(replay, AUTO, between_s))
    add_block(crew, Samples(), replay, Block(0, TUNING_ITERATIONS - CHECKED_STEPS))
    return samples


def tune(crew: Crew, replay: Replay, between_s: float, seen: Seen) -> list[Trial]:
    """Time DDP with each bucket size that is tried, then the fastest ones without the small first bucket, too."""

    def tried(buckets: Buckets) -> Trial:
        seen(f"{crew.contender.name} tries buckets of {format_size(buckets.size)}", 0.0)
        samples = prepared(crew, replay, order_for(replay, buckets, between_s))
        add_block(crew, samples, replay, Block(1, TRIED_ITERATIONS))
        return Trial(buckets, samples.summary(), samples.wrong)

    trials = [tried(buckets) for buckets in replay.tried()]
    without = [trial.buckets for trial in fastest(trials)[:TRIED_WITHOUT_FIRST] if trial.buckets.first]
    return trials + [tried(Buckets(buckets.size)) for buckets in without]


def fastest(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with the shortest medians first."""
    return sorted(trials, key=lambda trial: trial.time.median_s)


def take_turns(started: Sequence[Crew], found: Mapping[str, Samples], replay: Replay, seen: Seen) -> None:
    """Add all rounds to the samples of each crew."""
    for turn in range(replay.rounds):
        for index, crew in enumerate(started):
            name = crew.contender.name
            seen(f"{replay.profile.model}: {name}", (turn + index / len(started)) / replay.rounds)
            count = -(-(replay.iterations - found[name].count) // (replay.rounds - turn))
            add_block(crew, found[name], replay, Block(1, count))
    seen("done", 1.0)


def add_block(crew: Crew, samples: Samples, replay: Replay, block: Block) -> None:
    """Run a block and keep its times, an iteration as long as on its slowest rank."""
    expected_s = 2 * (block.warmup + block.iterations) * replay.scaled.compute_s
    samples.add(crew.ask(block, Timed, replay.words, expected_s=expected_s))


def order_for(replay: Replay, buckets: Buckets, between_s: float = 0.0) -> Prepare:
    """What all ranks of a run are told to prepare."""
    return Prepare(replay.words, buckets.size, "bytes", between_s=between_s, first_count=buckets.first)
