"""One interleaved run: for each size, blocks of the contenders take turns, A B C A B C, for some rounds.

So whatever else the machine does falls on all of them alike. A block is a barrier and then iterations back to back,
as in nccl-tests; an iteration lasts as long as on its slowest rank. How many iterations a block has follows from a
time budget that is the same for all contenders, and from how fast the contender was so far.

Collectives can also be measured cold: then all ranks meet at a barrier before each call and sleep or compute for a
while. Such an iteration lasts from the moment the last rank calls until the last rank is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from paceline.bench.contenders import Contender
from paceline.bench.crew import Crew, crews
from paceline.bench.figures import BESIDE, SHARED, Operation, Ratio, Summary, bus_factor, limit_s
from paceline.bench.rank_process.messages import MEMORIES, Block, Pause, Prepare, Prepared, Timed
from paceline.bench.results import ONE_HOST, Machine, Results, Row
from paceline.bench.sizes import ITEM_BYTES, elements
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.lab import Lab, PortBytes

_MOST_ITERATIONS = 50_000
_FEWEST_ITERATIONS = 5
_WARM_UP_S = 0.1
_MOST_WARM_UPS = 20
_LONGEST_PAUSE_S = 10.0
_MOVED_BYTES = 1_000_000
_MOVING_ITERATIONS = 32  # on one host Paceline moves large buffers to huge pages within so many


@dataclass(frozen=True)
class Effort:
    """How long to measure a contender at a size: seconds, or exactly so many iterations; spread over the rounds."""

    seconds: float = 2.0
    iterations: int | None = None
    rounds: int = 5

    def __post_init__(self) -> None:
        """Refuse what measures nothing."""
        if not (0 < self.seconds <= 3600 and 1 <= self.rounds <= 1000):
            raise UsageError("--seconds is more than 0 and at most 3600, and --rounds 1 to 1000")
        if self.iterations is not None and not self.rounds <= self.iterations <= 1_000_000:
            raise UsageError(f"--iterations is at least --rounds ({self.rounds}), so that each round has one")

    def block(self, spent: Samples, iteration_s: float) -> int:
        """Iterations of the next block, from what was spent so far and what an iteration takes."""
        rounds_left = self.rounds - len(spent.rounds)
        if self.iterations is not None:
            return -(-(self.iterations - spent.count) // rounds_left)
        affordable = (self.seconds - spent.loop_s) / rounds_left / max(iteration_s, 1e-7)
        fewest, most = -(-_FEWEST_ITERATIONS // self.rounds), -(-_MOST_ITERATIONS // self.rounds)
        return int(min(max(affordable, fewest), most))


@dataclass
class Samples:
    """Seconds of each timed iteration of one contender at one size, by round."""

    rounds: list[list[float]] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)  # of the last after the first, where ranks call from barriers
    loop_s: float = 0.0
    wrong: int = 0
    calls: int = 0  # in which these bytes crossed the hosts' ports: more than were timed
    sent_bytes: list[int] = field(default_factory=list)
    received_bytes: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many iterations were timed."""
        return sum(map(len, self.rounds))

    def add(self, timed: Sequence[Timed]) -> None:
        """A block's iterations: as long as on the slowest rank, or from the last call to the end after barriers."""
        each = [list(ranks) for ranks in zip(*(one.durations_ns for one in timed), strict=True)]
        begins = [list(ranks) for ranks in zip(*(one.begins_ns for one in timed), strict=True)]
        if begins:
            self.arrivals_s += [(max(began) - min(began)) * 1e-9 for began in begins]
            ends = [max(map(sum, zip(*both, strict=True))) for both in zip(begins, each, strict=True)]
            self.rounds.append([(end - max(began)) * 1e-9 for end, began in zip(ends, begins, strict=True)])
        else:
            self.rounds.append([max(ranks) * 1e-9 for ranks in each])
        self.loop_s += _loop_s(timed)

    def add_traffic(self, before: Sequence[PortBytes], after: Sequence[PortBytes], calls: int) -> None:
        """What crossed each host's port in so many calls."""
        sent = [later.sent - earlier.sent for earlier, later in zip(before, after, strict=True)]
        received = [later.received - earlier.received for earlier, later in zip(before, after, strict=True)]
        self.sent_bytes = [sum(both) for both in zip(self.sent_bytes or [0] * len(sent), sent, strict=True)]
        self.received_bytes = [sum(both) for both in zip(self.received_bytes or [0] * len(sent), received, strict=True)]
        self.calls += calls

    def summary(self) -> Summary:
        """Median and spread of all."""
        samples = [sample for part in self.rounds for sample in part]
        return Summary.of(samples, sum(samples) if self.arrivals_s else self.loop_s)

    def over(self, subject: Samples) -> Ratio:
        """Our time over the subject's; what ran side by side is compared side by side."""
        rounds = [float(np.median(a) / np.median(b)) for a, b in zip(self.rounds, subject.rounds, strict=True)]
        ours, theirs = self.summary(), subject.summary()
        means = ours.loop_mean_s / theirs.loop_mean_s
        return Ratio(ours.median_s / theirs.median_s, means, min(rounds), max(rounds))


@dataclass(frozen=True)
class Question:
    """What to measure."""

    operation: Operation
    sizes: Sequence[int]
    num_ranks: int
    subject: Contender
    peers: Sequence[Contender] = ()
    dtype: str = "float32"
    effort: Effort = field(default_factory=Effort)
    timeout_s: float = 120.0
    memory: str = "torch"
    pause: Pause | None = None
    beside: Operation | None = None

    def __post_init__(self) -> None:
        """Refuse contenders that cannot be told apart, and sizes without elements."""
        if self.memory not in MEMORIES:
            raise UsageError(f"--memory is one of {', '.join(MEMORIES)}, not {self.memory!r}")
        if self.pause is not None and not 0 < self.pause.seconds <= _LONGEST_PAUSE_S:
            raise UsageError(f"--{self.pause.kind} is more than 0 and at most {_LONGEST_PAUSE_S:g} s")
        names = [contender.name for contender in (self.subject, *self.peers)]
        if len(set(names)) < len(names):
            raise UsageError(f"each contender is measured once, but they are {', '.join(names)}")
        if not 1 <= self.num_ranks <= 64:
            raise UsageError(f"a collective is measured with 1 to 64 ranks on one machine, not {self.num_ranks}")
        mpi = next((contender.name for contender in (self.subject, *self.peers) if contender.is_mpi), None)
        if mpi and self.dtype in ("float16", "bfloat16"):
            raise UsageError(f"{mpi} has no {self.dtype}: take another --dtype or leave {mpi} out")
        if self.beside is not None and not {self.operation, self.beside} <= BESIDE:
            raise UsageError(f"--beside runs one of {', '.join(sorted(BESIDE))} at the same time as another of them")
        if self.beside is not None and mpi:
            raise UsageError(f"{mpi} runs one collective at a time here: leave out --beside, or {mpi}")
        for size in self.sizes:
            elements(self.operation, size, self.dtype, self.num_ranks, self.beside)


def measure(question: Question, lab: Lab | None, seen: Callable[[str, float], None]) -> Results:
    """Measure everything the question asks; ``seen`` hears what is being done and the share of work done."""
    contenders = [question.subject, *question.peers]
    machine = Machine.here()
    sizes = [0] if question.operation is Operation.BARRIER else list(question.sizes)
    seen(f"starting {question.num_ranks} ranks of {', '.join(one.name for one in contenders)}", 0.0)
    rows: list[Row] = []
    with crews(contenders, question.num_ranks, lab=lab, timeout_s=question.timeout_s) as started:
        for index, size in enumerate(sizes):
            count = elements(question.operation, size, question.dtype, question.num_ranks, question.beside)
            beside = question.beside.value if question.beside else ""
            prepare = Prepare(question.operation.value, count, question.dtype, memory=question.memory, beside=beside)

            def heard(what: str, share: float, before: int = index) -> None:
                seen(what, (before + share) / len(sizes))

            warm_ups = _MOVING_ITERATIONS if lab is None and size >= _MOVED_BYTES else 1
            found = interleave(
                started, prepare, question.effort, heard, warm_ups=warm_ups, pause=question.pause, lab=lab
            )
            rows += point(question, started, count, found, lab)
    place, loss = (lab.cluster.name, lab.loss) if lab else (ONE_HOST, 0.0)
    return record(question, started, rows, machine, place, loss=loss)


def record(
    question: Question,
    started: Sequence[Crew],
    rows: list[Row],
    machine: Machine,
    place: str,
    sweep: str | None = None,
    loss: float = 0.0,
) -> Results:
    """What is kept of a run."""
    return Results(
        operation=question.operation.value,
        redop=question.operation.redop,
        dtype=question.dtype,
        num_ranks=question.num_ranks,
        place=place,
        subject=question.subject.name,
        versions={crew.contender.name: crew.versions for crew in started},
        environment={crew.contender.name: crew.contender.variables for crew in started},
        rounds=question.effort.rounds,
        machine=machine,
        rows=rows,
        sweep=sweep,
        memory=question.memory,
        pause=question.pause,
        beside=question.beside.value if question.beside else None,
        loss=loss,
    )


def interleave(
    started: Sequence[Crew],
    prepare: Prepare,
    effort: Effort,
    seen: Callable[[str, float], None],
    *,
    late_ns: dict[int, int] | None = None,
    lessons: int = 0,
    warm_ups: int = 1,
    pause: Pause | None = None,
    lab: Lab | None = None,
) -> list[Samples]:
    """Samples of each contender for one prepared operation, taken in turns; with ``late_ns``, of ranks that are late.

    Each contender has at least ``warm_ups`` iterations before; the first has ``lessons``, to find out who is late. With
    ``pause`` all ranks pause before each call. Of a ``lab``, the bytes that cross its ports are counted.
    """
    doing = f"{prepare.operation} beside {prepare.beside}" if prepare.beside else prepare.operation
    if prepare.count:
        doing += f" of {prepare.count} {prepare.dtype}"
    found = [Samples() for _ in started]
    iteration_s: list[float] = []
    for crew, samples in zip(started, found, strict=True):
        seen(f"{doing}: {crew.contender.name} warms up", 0.0)
        samples.wrong = sum(one.wrong for one in crew.ask(prepare, Prepared, doing))
        # Twice, as the first time the speed is unknown.
        once = _loop_s(crew.ask(Block(0, 1, late_ns, pause), Timed, doing))
        least = max(warm_ups, 0 if iteration_s else lessons)
        several = max(least, min(int(_WARM_UP_S / once), _MOST_WARM_UPS))
        warm = crew.ask(Block(0, several, late_ns, pause), Timed, doing, expected_s=several * once)
        iteration_s.append(_loop_s(warm) / several)
    for turn in range(effort.rounds):
        for index, (crew, samples) in enumerate(zip(started, found, strict=True)):
            seen(f"{doing}: {crew.contender.name}", (turn + index / len(started)) / effort.rounds)
            # What the others left in the caches is not this one's fault.
            warmup = min(int(_WARM_UP_S / iteration_s[index]), _MOST_WARM_UPS)
            block = Block(warmup, effort.block(samples, iteration_s[index]), late_ns, pause)
            expected_s = block.iterations * iteration_s[index]
            before = lab.port_bytes() if lab else []
            timed = crew.ask(block, Timed, doing, expected_s=expected_s)
            samples.add(timed)
            if lab:
                samples.add_traffic(before, lab.port_bytes(), block.warmup + block.iterations)
            iteration_s[index] = samples.loop_s / samples.count
    seen(doing, 1.0)
    return found


def _loop_s(timed: Sequence[Timed]) -> float:
    return max(one.loop_ns for one in timed) * 1e-9


def check_lab(question: Question) -> None:
    """Refuse contenders that cannot be started on the hosts of a lab."""
    for contender in (question.subject, *question.peers):
        if contender.is_mpi:
            raise UsageError(f"{contender.name} is measured on one host only: leave out --lab, or {contender.name}")


def point(
    question: Question,
    started: Sequence[Crew],
    count: int,
    found: Sequence[Samples],
    lab: Lab | None,
    late_s: Mapping[int, float] | None = None,
) -> list[Row]:
    """The rows of one point, from the samples of all contenders, the subject's first."""
    operation, size = question.operation, count * ITEM_BYTES[question.dtype]
    limit = limit_s(operation, lab.cluster, size, late_s, question.beside) if lab else None
    rows = []
    for crew, samples in zip(started, found, strict=True):
        time = samples.summary()
        rows.append(
            Row(
                contender=crew.contender.name,
                num_ranks=crew.num_ranks,
                size_bytes=size,
                count=count // crew.num_ranks if operation in SHARED else count,
                time=time,
                algbw_bytes_per_s=size / time.median_s,
                busbw_bytes_per_s=size / time.median_s * bus_factor(operation, crew.num_ranks),
                wrong=samples.wrong,
                limit_s=limit,
                share_of_limit=limit / time.median_s if limit else None,
                over_subject=None if samples is found[0] else samples.over(found[0]),
                late_s=dict(late_s or {}),
                arrival_s=float(np.median(samples.arrivals_s)) if samples.arrivals_s else None,
                pieces=crew.contender.pieces,
                sent_bytes=[sent / samples.calls for sent in samples.sent_bytes],
                received_bytes=[received / samples.calls for received in samples.received_bytes],
            )
        )
    return rows
