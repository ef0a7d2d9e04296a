"""All-reduce with late ranks: what remains to be done after the last one has arrived.

All ranks meet at a barrier; a late rank sleeps before it calls. An iteration is *exposed* from the moment the last rank
calls until the last rank is done, on the monotonic clock that all processes of a machine share, hosts of a lab too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import Console

from paceline.bench import peers
from paceline.bench.contenders import Contender
from paceline.bench.crew import Crew, crews
from paceline.bench.figures import Operation
from paceline.bench.measure import Question, check_lab, interleave, point, record
from paceline.bench.rank_process.messages import Prepare
from paceline.bench.results import ONE_HOST, Machine, Results, Row
from paceline.bench.run import progress
from paceline.bench.sizes import elements
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster

if TYPE_CHECKING:
    from paceline.lab import Lab

SWEEPS = ("delay", "size", "ranks", "pieces")
SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Delays of a sweep, in units of what the subject needs when nobody is late."""

PIECES = (1, 2, 4, 8, 16)
LESSONS = 12
"""Iterations in which Paceline, unless it is told what to run, may find out who is late, before it is measured."""


@dataclass(frozen=True)
class LateQuestion:
    """What to measure: who is late by how much, and what is varied (one of ``SWEEPS``, or nothing).

    A sweep of delays keeps the proportions of ``late_s``; a sweep of ranks lets the last ones be late.
    """

    base: Question
    late_s: Mapping[int, float]
    sweep: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be late, and what is not an all-reduce."""
        if self.base.operation is not Operation.ALL_REDUCE:
            raise UsageError(f"late ranks are measured with allreduce, not with {self.base.operation}")
        if self.sweep is not None and self.sweep not in SWEEPS:
            raise UsageError(f"--late-sweep takes one of {', '.join(SWEEPS)}, not {self.sweep!r}")
        if not self.all_ranks:
            raise UsageError(f"--late-sweep ranks goes from 3 to --ranks, which is {self.base.num_ranks}: give more")
        wrong = [rank for rank in self.late_s if not 0 <= rank < self.base.num_ranks]
        if wrong:
            raise UsageError(f"rank {wrong[0]} cannot be late: the ranks are 0 to {self.base.num_ranks - 1}")
        if not self.late_s or len(self.late_s) == self.base.num_ranks:
            raise UsageError("--late names at least one rank and not all of them, like 3:500ms")

    @property
    def all_ranks(self) -> Sequence[int]:
        """The numbers of ranks to measure with."""
        return range(3, self.base.num_ranks + 1) if self.sweep == "ranks" else [self.base.num_ranks]

    @property
    def num_points(self) -> int:
        """How often all contenders are measured."""
        return len(self.all_ranks) * len(self.base.sizes) * (len(SHARES) if self.sweep == "delay" else 1)


@dataclass
class _Run:
    """What is found on the way."""

    question: LateQuestion
    seen: Callable[[str, float], None]
    rows: list[Row] = field(default_factory=list)
    crews: list[Crew] = field(default_factory=list)
    points: int = 0

    def heard(self, what: str, share: float) -> None:
        """Of the point at hand so much is done."""
        self.seen(what, (self.points + share) / self.question.num_points)


def run_late(question: LateQuestion, lab: str | None = None, *, install: bool = True) -> Results:
    """Measure, in the lab of that name or on this host; what is going on is said on standard error."""
    errors = Console(stderr=True, highlight=False)
    base = question.base
    if lab is not None:
        check_lab(base)
    for contender in (base.subject, *base.peers):
        if contender.is_mpi:
            peers.ensure(contender.name, install=install, say=lambda line: errors.print(line, markup=False))
    machine = Machine.here()
    with progress(errors) as seen:
        run = _Run(question, seen)
        for num_ranks in question.all_ranks:
            with _place(lab, num_ranks) as place:
                _measure(run, num_ranks, place)
    return record(base, run.crews, run.rows, machine, lab or ONE_HOST, question.sweep)


@contextlib.contextmanager
def _place(lab: str | None, num_ranks: int) -> Iterator[Lab | None]:
    if lab is None:
        yield None
        return
    from paceline.lab import Lab

    cluster = Cluster.named(lab)
    with Lab(cluster=cluster if cluster.num_ranks == num_ranks else cluster.resized(num_ranks)) as place:
        yield place


def _measure(run: _Run, num_ranks: int, lab: Lab | None) -> None:
    """All points with so many ranks; every point has all contenders in turns."""
    base, sweep = run.question.base, run.question.sweep
    shift = base.num_ranks - num_ranks
    late_s = {max(rank - shift, 0): seconds for rank, seconds in run.question.late_s.items()}
    contenders = [
        replace(one, environment={**_links(one, lab), **one.environment}) for one in (base.subject, *base.peers)
    ]
    if sweep == "pieces":
        contenders = [_cut(contenders[0], late_s, pieces) for pieces in PIECES] + contenders[1:]
    with crews(contenders, num_ranks, lab=lab, timeout_s=base.timeout_s) as started:
        run.crews += started
        for size in base.sizes:
            count = elements(base.operation, size, base.dtype, num_ranks)
            if sweep != "delay":
                _point(run, started, count, late_s, lab)
                continue
            unit_s = _point(run, started, count, {}, lab)
            latest = max(late_s.values())
            for share in SHARES[1:]:
                delays = {rank: share * unit_s * seconds / latest for rank, seconds in late_s.items()}
                _point(run, started, count, delays, lab)


def _point(run: _Run, started: Sequence[Crew], count: int, late_s: Mapping[int, float], lab: Lab | None) -> float:
    """Measure one point, and return what the subject needs there."""
    base = run.question.base
    late_ns = {rank: round(seconds * 1e9) for rank, seconds in late_s.items()}
    prepare = Prepare(base.operation.value, count, base.dtype, dict(late_s), memory=base.memory)
    lessons = LESSONS if late_s and started[0].contender == Contender("paceline") else 0
    found = interleave(started, prepare, base.effort, run.heard, late_ns=late_ns, lessons=lessons)
    run.points += 1
    run.rows += point(base, started, count, found, lab, late_s)
    return found[0].summary().median_s


def late_contender(name: str, late_s: Mapping[int, float], algorithm: str | None = None) -> Contender:
    """A contender by name: ``ring`` is Paceline's own ring, ``messages`` Paceline over Gloo, told who is late."""
    environment = {"PACELINE_ALGORITHM": algorithm} if algorithm else {}
    if name == "ring":
        return Contender(name, {"PACELINE_ALGORITHM": "allreduce:ring", "PACELINE_LATE": "off"}, backend="paceline")
    if name == "messages":
        return Contender(name, environment, backend="gloo", messages=True)
    if name == "paceline" and algorithm:  # it has nothing to find out
        environment["PACELINE_LATE"] = ",".join(map(str, sorted(late_s)))
    return Contender(name, environment)


def _cut(contender: Contender, late_s: Mapping[int, float], pieces: int) -> Contender:
    """The same algorithm, cut in so many pieces, and told who is late."""
    algorithm = contender.environment.get("PACELINE_ALGORITHM", "allreduce:stragglar").partition("/")[0]
    told = late_contender(contender.name, late_s, f"{algorithm}/{pieces}").environment
    environment = {**contender.environment, **told}
    backend = contender.backend or contender.name
    return replace(contender, name=f"{contender.name} k={pieces}", environment=environment, backend=backend)


def _links(contender: Contender, lab: Lab | None) -> dict[str, str]:
    """What a contender that measures no links by itself must be told of a lab's."""
    if lab is None or not contender.messages:
        return {}
    host = lab.cluster.hosts[0]
    rate = min(min(one.up_bytes_per_s, one.down_bytes_per_s) for one in lab.cluster.hosts)
    return {"PACELINE_RATE": f"{rate:.0f}B/s", "PACELINE_LATENCY": f"{host.latency_s * 1e6:g}us"}
