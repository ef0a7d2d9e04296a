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
from paceline.bench.training.results import Row, Setting, TrainingResults
from paceline.bench.training.scaling import Scale, bounds_of, layered_s
from paceline.bench.training.strategies import (
    ALONE,
    AUTO_BYTES,
    CHECKED_STEPS,
    DEAR,
    SETTLING_ITERATIONS,
    SHARDED,
    TUNED,
    TUNING_ITERATIONS,
    Job,
    replayer,
)
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster
from paceline.policy.fusion import USUAL_BYTES, usual_threshold

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
        return Job(strategy, self.profile.model, self.scale.size_factor, self.scale.time_factor)

    @property
    def words(self) -> str:
        """What the ranks are doing."""
        return f"a replay of {self.profile.model}"

    def scaled_bucket_bytes(self, strategy: str) -> int:
        """What a strategy fuses in the lab."""
        true_bytes = self.bucket_bytes
        if true_bytes is None:
            true_bytes = usual_threshold(self.profile.gradient_bytes) if strategy.startswith(DEAR) else USUAL_BYTES
        return max(1, round(true_bytes * self.scale.size_factor))

    def setting(self, lab: Lab | None) -> Setting:
        """How to read the figures; without a lab there are no limits."""
        bounds = bounds_of(self.scaled, lab.cluster) if lab else None
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
            bucket_bytes={name: self.scaled_bucket_bytes(name) for name in self.strategies},
            forward_s=self.scaled.forward_s,
            backward_s=self.scaled.backward_s,
            bounds=bounds,
            layered_s=layered_s(self.scaled, bounds) if bounds else None,
        )


def measure(replay: Replay, lab: Lab | None, seen: Seen) -> TrainingResults:
    """Let all strategies, and the computation alone, take turns."""
    names = [*replay.strategies, ALONE]
    machine = Machine.here()
    seen(f"starting {replay.num_ranks} ranks of {', '.join(names)}", 0.0)
    contenders = [replayer(replay.job(name)) for name in names]
    with crews(contenders, replay.num_ranks, program=PROGRAM, lab=lab, timeout_s=replay.timeout_s) as started:
        between_s = calibrate(started[-1], replay, seen)
        found = {}
        for crew in started:
            name = crew.contender.name
            seen(f"{name} {'finds its bucket size' if name.endswith(TUNED) else 'checks its weights'}", 0.0)
            if name.endswith(TUNED):
                found[name] = searched(crew, replay, between_s)
            else:
                found[name] = prepared(crew, replay, order_for(replay, replay.scaled_bucket_bytes(name), between_s))
            settle(crew, replay)
        take_turns(started, found, replay, seen)
        versions = {crew.contender.name: crew.versions for crew in started}
        environment = {crew.contender.name: crew.contender.variables for crew in started}
    setting = replay.setting(lab)
    rows = [Row.of(name, samples, found, setting) for name, samples in found.items()]
    return TrainingResults(setting, replay.rounds, versions, environment, machine, rows)


def calibrate(alone: Crew, replay: Replay, seen: Seen) -> float:
    """What passes between two layers of the bare module, on average: seconds beyond its profile.

    Found with layers that take their whole time, and again with what was found.
    """
    seen("measuring what passes between layers", 0.0)
    between_s = 0.0
    for _ in range(2):
        samples = prepared(alone, replay, order_for(replay, replay.scaled_bucket_bytes(ALONE), between_s))
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
    samples = prepared(crew, replay, order_for(replay, AUTO_BYTES, between_s))
    add_block(crew, Samples(), replay, Block(0, TUNING_ITERATIONS - CHECKED_STEPS))
    return samples


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


def order_for(replay: Replay, bucket_bytes: int, between_s: float = 0.0) -> Prepare:
    """What all ranks of a run are told to prepare."""
    return Prepare(replay.words, bucket_bytes, "bytes", between_s=between_s)
