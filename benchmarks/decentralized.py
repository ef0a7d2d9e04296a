"""Decentralised training against its goals: the table that docs/decentralized_bench.md explains.

    python benchmarks/decentralized.py [--only TEXT] [--seeds 3] [--stretch 1] [--json FILE] [--plot FOLDER]
    python benchmarks/decentralized.py [--only TEXT] --read FILE

Each case is one run of ``paceline bench decentralized`` in the lab (needs root). A ratio is the other's median time to
the target over ours, with the least and the most of the seeds; *best ddp* is the faster of DDP on Gloo and on Paceline.
*Own weights* is the same ratio of when the workers' own weights reach the target.
Rates are steps a second of fast workers, as a share of the same scheme's with all workers alike. Accuracy is that of
the final average after equally many samples, in points above the other's.
Exits with 1 if a goal is missed or was not measured, be it that ``--only`` left it out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.bench.decentralized.cases import parse_scenarios, parse_schemes
from paceline.bench.decentralized.report import draw, legend, scenario_table
from paceline.bench.decentralized.results import DecentralizedResults, Spread, of_own
from paceline.bench.decentralized.run import Plan
from paceline.cli.bench_decentralized import run_with_progress
from paceline.errors import PacelineError
from paceline.ir.cluster import Cluster
from paceline.lab import unavailable

BEST_DDP = "best ddp"
TIME, RATE, ACCURACY = "time", "fast workers' steps/s", "accuracy"
ACCURACY_STEPS = 150
WIDTH = 190


@dataclass(frozen=True)
class Goal:
    """At least this: of a ratio of times, of a share of a rate, or of points of accuracy."""

    scenario: str
    ours: str
    against: str
    least: float
    what: str = TIME


@dataclass(frozen=True)
class Case:
    """One run, and its goals."""

    name: str
    lab: str
    schemes: str
    goals: tuple[Goal, ...]
    slow: str = ""
    slow_links: str = ""
    homogeneous: bool = True
    steps: int | None = None

    def plan(self, seeds: int, stretch: float) -> Plan:
        """Return what to ask of the bench."""
        return Plan(
            contestants=parse_schemes(self.schemes),
            scenarios=parse_scenarios([self.slow], [self.slow_links], homogeneous=self.homogeneous),
            seeds=seeds,
            cluster=Cluster.preset(self.lab),
            in_lab=True,
            stretch=stretch,
            steps=self.steps,
        )


CASES = [
    Case(
        "speeds",
        "lan8",
        "ddp-gloo,ddp-paceline,adpsgd,ripples,ripples-blocking",
        (
            Goal("none", "ripples", BEST_DDP, 1.2),
            Goal("none", "ripples", "adpsgd", 1.0),
            Goal("none", "ripples", "ripples-blocking", 1.25),
            Goal("0:2x", "ripples", BEST_DDP, 1.7),
            Goal("0:5x", "ripples", BEST_DDP, 3.5),
            Goal("half:2x", "ripples", BEST_DDP, 1.4),
            Goal("0:5x", "ripples", "none", 0.95, RATE),
        ),
        slow="0:2x,0:5x,half:2x",
    ),
    Case(
        "server",
        "lan8",
        "ps,ripples",
        (Goal("none", "ripples", "ps", 3.0), Goal("0:5x", "ripples", "ps", 4.0)),
        slow="0:5x",
    ),
    Case(
        "links",
        "lan8",
        "ddp-gloo,ddp-paceline,ripples-link-aware,ripples-plain,"
        "ripples-link-aware:overlap=false,ripples-plain:overlap=false",
        (
            Goal("links half:5x", "ripples-link-aware", "ripples-plain", 1.3),
            Goal("links half:5x", "ripples-link-aware:overlap=false", "ripples-plain:overlap=false", 1.3),
            Goal("links half:5x", "ripples-link-aware", BEST_DDP, 2.0),
        ),
        slow_links="half:5x",
        homogeneous=False,
    ),
    Case(
        "accuracy",
        "lan8",
        "allreduce,ripples",
        (Goal("none", "ripples", "allreduce", -0.5, ACCURACY),),
        steps=ACCURACY_STEPS,
    ),
    Case(
        "hosts",
        "lan2x4",
        "ripples-first-come,ripples-inter-intra,ripples-first-come:overlap=false,ripples-inter-intra:overlap=false,static",
        (
            Goal("none", "ripples-inter-intra", "ripples-first-come", 1.2),
            Goal("none", "ripples-inter-intra:overlap=false or static", "ripples-first-come:overlap=false", 1.2),
        ),
    ),
]


@dataclass(frozen=True)
class Verdict:
    """One goal, and what was measured of it; None if it was not."""

    case: str
    goal: Goal
    against: str
    found: Spread | None
    own: Spread | None = None

    @property
    def missed(self) -> bool:
        """Whether it was measured and not reached."""
        return self.found is not None and self.found.median < self.goal.least


def judge(case: Case, results: DecentralizedResults) -> list[Verdict]:
    """Say what became of the goals."""
    return [_judge(case, goal, results) for goal in case.goals]


def _judge(case: Case, goal: Goal, results: DecentralizedResults) -> Verdict:
    if goal.what == RATE:
        found = _rates(results, goal)
        return Verdict(case.name, goal, "all alike", found)
    if goal.what == ACCURACY:
        return Verdict(case.name, goal, goal.against, _accuracy(results, goal))
    against = results.best_ddp(goal.scenario) if goal.against == BEST_DDP else goal.against
    ratios = [
        (ratio, results.ratio(against, ours, goal.scenario, of_own))
        for ours in goal.ours.split(" or ")
        if (ratio := results.ratio(against, ours, goal.scenario)) is not None
    ]
    best = max(ratios, key=lambda pair: pair[0].median, default=(None, None))
    return Verdict(case.name, goal, against or BEST_DDP, *best)


def _rates(results: DecentralizedResults, goal: Goal) -> Spread | None:
    slowed = results.rate(goal.ours, goal.scenario, fast=True)
    alike = results.rate(goal.ours, goal.against, fast=True)
    if slowed is None or alike is None:
        return None
    return Spread(slowed.median / alike.median, slowed.least / alike.median, slowed.most / alike.median)


def _accuracy(results: DecentralizedResults, goal: Goal) -> Spread | None:
    ours, theirs = (results.of(name, goal.scenario) for name in (goal.ours, goal.against))
    known = {one.seed: one.accuracy for one in theirs if one.accuracy is not None}
    return Spread.of(
        100 * (one.accuracy - known[one.seed]) for one in ours if one.accuracy is not None and one.seed in known
    )


def table(verdicts: Sequence[Verdict]) -> Table:
    """Return all goals in one table."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("case", "slow", "what", "ours", "against"):
        found.add_column(name, no_wrap=True)
    for name in ("found", "seeds", "own weights", "goal"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("reached")
    for one in verdicts:
        unit = {TIME: "x", RATE: "", ACCURACY: " points"}[one.goal.what]
        cells = ["-", "-"]
        if one.found is not None:
            cells = [f"{one.found.median:.2f}{unit}", f"{one.found.least:.2f} to {one.found.most:.2f}"]
        cells.append("-" if one.own is None else f"{one.own.median:.2f}x")
        reached = "not measured" if one.found is None else "no" if one.missed else "yes"
        goal = one.goal
        found.add_row(
            one.case, goal.scenario, goal.what, goal.ours, one.against, *cells, f"{goal.least:g}{unit}", reached
        )
    return found


def measured(
    cases: Sequence[Case], arguments: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, DecentralizedResults]:
    """Return the results of each case that can be measured."""
    found = {}
    no_lab = unavailable()
    for case in cases:
        try:
            if no_lab:
                raise PacelineError(no_lab)
            found[case.name] = run_with_progress(case.plan(arguments.seeds, arguments.stretch))
        except PacelineError as error:
            say(f"left out: {case.name}: {error}")
            continue
        if arguments.json:  # after each case: the next one may be interrupted
            arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        if arguments.plot:
            draw(found[case.name], arguments.plot / f"decentralized_{case.name}.png")
    return found


def main() -> int:
    """Measure the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this text, like speeds")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each scheme in each scenario (default: 3)")
    parser.add_argument("--stretch", type=float, default=1.0, help="slow rates and times together (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the results of all cases")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="save a picture of each case")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing: the results saved before")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a case's table when it is done
    cases = [case for case in CASES if arguments.only in case.name]
    if not cases:
        parser.error(f"no case has {arguments.only!r} in its name; there are: {', '.join(one.name for one in CASES)}")
    for path in (arguments.json and arguments.json.absolute().parent, arguments.plot):
        if path and not path.is_dir():
            parser.error(f"there is no folder {path}")
    out = Console(highlight=False, width=max(Console().width, WIDTH))

    def say(text: str) -> None:
        out.print(text, markup=False)

    if arguments.read:
        try:
            results = msgspec.json.decode(arguments.read.read_bytes(), type=dict[str, DecentralizedResults])
        except (OSError, msgspec.MsgspecError) as error:
            parser.error(f"--read {arguments.read}: {error}")
    else:
        results = measured(cases, arguments, say)
    verdicts: list[Verdict] = []
    for case in cases:
        if case.name not in results:
            verdicts += [Verdict(case.name, goal, goal.against, None) for goal in case.goals]
            continue
        one = results[case.name]
        for scenario in one.scenarios:
            out.print(scenario_table(one, scenario))
        for line in legend(one):
            say(line)
        say("")
        verdicts += judge(case, one)
    out.print(table(verdicts))
    missed = sum(one.missed for one in verdicts)
    unknown = sum(len(case.goals) for case in CASES) - sum(one.found is not None for one in verdicts)
    say(f"{sum(len(case.goals) for case in CASES)} goals: {missed} missed, {unknown} not measured")
    return int(missed + unknown > 0)


if __name__ == "__main__":
    sys.exit(main())
