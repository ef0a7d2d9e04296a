"""Collectives against Gloo, Open MPI, MPICH and the links' limit: the matrix that docs/performance.md reports.

    python benchmarks/collectives.py [--only TEXT] [--seconds 2] [--launches 1] [--json FILE]
    python benchmarks/collectives.py [--only TEXT] --read FILE

Each case is one interleaved run of ``paceline.bench``. The cases of the lab need root, those against MPI an MPI that
is installed or can be: what cannot be measured is said and left out. A ratio is the other's median time over ours,
with the least and the most of the rounds; the share of the limit is the limit over our median, with the quartiles.
With several launches a case is run as often with new processes, since launches differ: the row is then that of the run
whose ratio is the median, with the least and the most of the runs.
*of means* is the same of the loops' means, which is what nccl-tests would show. Goals are for medians; rows without one
are there because that rival is the fastest.
Exits with 1 if a goal is missed or was not measured, be it that ``--only`` left it out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.bench.contenders import Contender
from paceline.bench.figures import Operation
from paceline.bench.measure import Effort, Question
from paceline.bench.peers import MPI_PEERS, ensure
from paceline.bench.rank_process.messages import Pause
from paceline.bench.results import ONE_HOST, Results, Row
from paceline.bench.run import run
from paceline.bench.sizes import ITEM_BYTES, elements
from paceline.errors import PacelineError
from paceline.lab import unavailable
from paceline.units import format_duration, format_size, parse_size

LIMIT, GLOO, MPI = "limit", "gloo", "best MPI"


@dataclass(frozen=True)
class Case:
    """One run, and its goals: at a size, against whom, at least this ratio (or just to show it)."""

    operation: Operation
    num_ranks: int
    goals: tuple[tuple[str, str, float | None], ...]
    lab: str | None = None
    memory: str = "torch"
    pause: Pause | None = None

    @property
    def name(self) -> str:
        """``allreduce, 8 ranks on lan8``, and what is special."""
        special = ", huge pages" if self.memory == "huge" else ""
        if self.pause:
            special += f", after {format_duration(self.pause.seconds)} of {self.pause.kind}"
        return f"{self.operation}, {self.num_ranks} ranks on {self.lab or ONE_HOST}{special}"

    def made(self, results: Results) -> bool:
        """Whether these results are of this case."""
        here = (self.operation, self.num_ranks, self.lab or ONE_HOST, self.memory, self.pause)
        return here == (results.operation, results.num_ranks, results.place, results.memory, results.pause)

    def question(self, backend: str, effort: Effort, mpis: list[str]) -> Question:
        """What to ask of the bench."""
        peers = [GLOO] if self.lab else [GLOO, *mpis]
        if self.pause:  # most of the time is the pause's
            effort = replace(effort, seconds=3 * effort.seconds)
        return Question(
            operation=self.operation,
            sizes=sorted({parse_size(size) for size, _, _ in self.goals}),
            num_ranks=self.num_ranks,
            subject=Contender(backend),
            peers=[Contender(name) for name in peers if name != backend],
            effort=effort,
            memory=self.memory,
            pause=self.pause,
        )


SLEEP, COMPUTE = Pause("sleep", 0.02), Pause("compute", 0.02)
CASES = [
    Case(Operation.ALL_REDUCE, 8, (("64MB", LIMIT, 0.97), ("64MB", GLOO, 1.0)), "lan8"),
    Case(Operation.ALL_GATHER, 8, (("64MB", LIMIT, 0.96),), "lan8"),
    Case(Operation.REDUCE_SCATTER, 8, (("64MB", LIMIT, 0.96), ("64MB", GLOO, 2.0)), "lan8"),
    Case(Operation.BROADCAST, 8, (("64MB", GLOO, 5.0),), "lan8"),
    Case(Operation.ALL_REDUCE, 2, (("4KB", GLOO, 8.0), ("4KB", MPI, None), ("1MB", MPI, 1.2), ("64MB", MPI, 2.0))),
    Case(
        Operation.ALL_REDUCE,
        4,
        (("4KB", GLOO, 20.0), ("4KB", MPI, None), ("1MB", MPI, 1.2), ("64MB", MPI, 2.0), ("64MB", GLOO, 3.3)),
    ),
    Case(Operation.ALL_REDUCE, 2, (("64MB", MPI, 2.0),), memory="huge"),
    Case(Operation.ALL_REDUCE, 4, (("64MB", MPI, 2.0), ("64MB", GLOO, 3.3)), memory="huge"),
    Case(Operation.ALL_REDUCE, 2, (("4KB", GLOO, 8.0), ("4KB", MPI, None)), pause=SLEEP),
    Case(Operation.ALL_REDUCE, 2, (("4KB", GLOO, 8.0), ("4KB", MPI, None)), pause=COMPUTE),
    Case(Operation.ALL_REDUCE, 4, (("4KB", GLOO, 10.0), ("4KB", MPI, None)), pause=SLEEP),
    Case(Operation.ALL_REDUCE, 4, (("4KB", GLOO, 10.0), ("4KB", MPI, None)), pause=COMPUTE),
    Case(Operation.BARRIER, 2, (("0", GLOO, 8.0), ("0", MPI, None))),
    Case(Operation.BARRIER, 4, (("0", GLOO, 20.0), ("0", MPI, None))),
]


@dataclass(frozen=True)
class Verdict:
    """One goal, and what was measured of it."""

    case: str
    size: str
    ours: Row
    against: str
    theirs: Row | None
    ratio: float
    of_means: float
    least: float
    most: float
    goal: float | None

    @property
    def missed(self) -> bool:
        """Whether there is a goal and it was not reached."""
        return self.goal is not None and self.ratio < self.goal


def judge(case: Case, results: Results) -> list[Verdict]:
    """What became of the goals whose rival took part."""
    verdicts = []
    for size, against, goal in case.goals:
        count = elements(case.operation, parse_size(size), results.dtype, case.num_ranks)
        rows = [row for row in results.rows if row.size_bytes == count * ITEM_BYTES[results.dtype]]
        ours = next(row for row in rows if row.contender == results.subject)
        shown = format_size(parse_size(size)) if count else "-"
        if against == LIMIT and ours.limit_s:
            time = ours.time
            share, least, most = (
                ours.limit_s / seconds for seconds in (time.median_s, time.upper_quartile_s, time.lower_quartile_s)
            )
            mean = ours.limit_s / time.loop_mean_s
            verdicts.append(Verdict(case.name, shown, ours, against, None, share, mean, least, most, goal))
            continue
        rivals = [row for row in rows if row.contender in (MPI_PEERS if against == MPI else (against,))]
        best = min(rivals, key=lambda row: row.time.median_s, default=None)
        if best and best.over_subject:
            ratio = best.over_subject
            spread = (ratio.of_medians, ratio.of_means, ratio.least, ratio.most)
            verdicts.append(Verdict(case.name, shown, ours, best.contender, best, *spread, goal))
    return verdicts


def middle(launches: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """Of several runs of one case, for each goal the run whose ratio is the median, with the least and the most."""
    if len(launches) == 1:
        return list(launches[0])
    found = []
    for one_goal in zip(*launches, strict=True):
        ordered = sorted(one_goal, key=lambda one: one.ratio)
        median = ordered[(len(ordered) - 1) // 2]
        found.append(replace(median, least=ordered[0].ratio, most=ordered[-1].ratio))
    return found


def table(verdicts: list[Verdict]) -> Table:
    """All goals in one table."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    found.add_column("case")
    for name in ("size", "ours", "25-75%"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("against")
    for name in ("theirs", "25-75%", "ratio", "spread", "of means", "goal"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("reached")
    for one in verdicts:
        limit = format_duration(one.ours.limit_s or 0.0)
        theirs = _times(one.theirs) if one.theirs else [limit, ""]
        measured = [f"{one.ratio:.3f}", f"{one.least:.3f}-{one.most:.3f}", f"{one.of_means:.3f}"]
        goal = ["", ""] if one.goal is None else [f"{one.goal:g}", "no" if one.missed else "yes"]
        found.add_row(one.case, one.size, *_times(one.ours), one.against, *theirs, *measured, *goal)
    return found


def _times(row: Row) -> list[str]:
    time = row.time
    spread = f"{format_duration(time.lower_quartile_s)} - {format_duration(time.upper_quartile_s)}"
    return [format_duration(time.median_s), spread]


def measured(cases: Sequence[Case], arguments: argparse.Namespace, say: Callable[[str], None]) -> list[list[Results]]:
    """The launches of each case; those of one that cannot be measured are none."""
    effort = Effort(arguments.seconds, None, arguments.rounds)
    no_lab = unavailable()
    mpis = []
    for name in MPI_PEERS:
        try:
            ensure(name, install=not arguments.no_install, say=say)
            mpis.append(name)
        except PacelineError as error:
            say(f"left out: {error}")
    found: list[list[Results]] = []
    for case in cases:
        try:
            if case.lab and no_lab:
                raise PacelineError(no_lab)
            question = case.question(arguments.backend, effort, mpis)
            found.append([run(question, case.lab) for _ in range(arguments.launches)])
        except PacelineError as error:
            say(f"left out: {case.name}: {error}")
            found.append([])
    return found


def main() -> int:
    """Measure the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this text, like 'on lan8'")
    parser.add_argument("--backend", default="paceline", help="the subject (default: paceline)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for a contender at a size (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="how often contenders take turns (default: 5)")
    parser.add_argument("--launches", type=int, default=1, help="how often a case is run, ranks and all (default: 1)")
    parser.add_argument("--no-install", action="store_true", help="measure without an MPI that is missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the results of all runs")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: the table of results saved before")
    arguments = parser.parse_args()
    if arguments.launches < 1:
        parser.error("--launches is at least 1")
    cases = [case for case in CASES if arguments.only in case.name]
    if not cases:
        parser.error(f"no case has {arguments.only!r} in its name; there are: " + "; ".join(one.name for one in CASES))
    out = Console(highlight=False, width=max(Console().width, 170))

    def say(text: str) -> None:
        out.print(text, markup=False)

    if arguments.read:
        try:
            saved = msgspec.json.decode(arguments.read.read_bytes(), type=list[Results])
        except (OSError, msgspec.MsgspecError) as error:
            parser.error(f"--read {arguments.read}: {error}")
        launches = [[one for one in saved if case.made(one)] for case in cases]
    else:
        launches = measured(cases, arguments, say)
    verdicts = [middle([judge(case, one) for one in some]) for case, some in zip(cases, launches, strict=True) if some]
    out.print(table([one for some in verdicts for one in some]))
    runs = [one for some in launches for one in some]
    if runs:
        machine = runs[-1].machine
        say(f"\n{machine.cores} cores ({machine.processor}), Linux {machine.kernel}; {machine.date}: {machine.command}")
    for name, versions in {name: versions for one in runs for name, versions in one.versions.items()}.items():
        say(f"{name}: {', '.join(f'{what} {number}' for what, number in versions.items())}")
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(runs)) + b"\n")
    missed = sum(one.missed for some in verdicts for one in some)
    goals = sum(goal is not None for case in CASES for _, _, goal in case.goals)
    unknown = goals - sum(one.goal is not None for some in verdicts for one in some)
    say(f"{goals} goals: {missed} missed, {unknown} not measured")
    return int(missed + unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
