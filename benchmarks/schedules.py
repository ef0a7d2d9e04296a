"""How long it takes to build, prove and price schedules, against the goals this project sets itself.

    python benchmarks/schedules.py [--repeats 5] [--json FILE]

Each case runs in a process of its own, so that its peak memory is its own. Times are medians; for build + prove the
fastest and the slowest run are given too (the slowest is the first, which touches its memory for the first time). A
goal is reached if the slowest run reaches it. Exits with 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """One schedule, and the most that building and proving it may take."""

    name: str
    algorithm: str
    kind: str
    num_ranks: int
    parameters: dict[str, Any]
    goal_s: float | None = None
    goal_mb: float | None = None


CASES = [
    Case("ring all-reduce, n = 1024", "ring", "allreduce", 1024, {}, goal_s=5.0, goal_mb=1000.0),
    Case("StragglAR, n = 64, k = 4", "stragglar", "allreduce", 64, {"late": 3, "pieces": 4}, goal_s=0.1),
    Case("StragglAR, n = 256, k = 2", "stragglar", "allreduce", 256, {"late": 3, "pieces": 2}, goal_s=1.0),
    Case("Bruck all-reduce, n = 1024", "bruck", "allreduce", 1024, {}),
    Case("two late of 64 ranks, k = 1", "late_ranks", "allreduce", 64, {"arrivals": [0] * 62 + [200] * 2, "pieces": 1}),
    Case("multicast all-gather, n = 1024", "multicast", "allgather", 1024, {"chains": 4}),
]


@dataclass(frozen=True)
class Result:
    """Medians in seconds, peak memory of the process in MB."""

    name: str
    transfers: int
    build_s: float
    prove_s: float
    price_s: float
    fastest_s: float
    slowest_s: float
    peak_mb: float


def measure(case: Case, repeats: int) -> Result:
    """Run one case in this process."""
    from paceline import ALGORITHMS, Cluster, Collective, Host, Kind, cost, verify

    collective = Collective(Kind(case.kind), case.num_ranks)
    cluster = Cluster.uniform(case.num_ranks, Host()).with_late({case.num_ranks - 1: 10.0})
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        schedule = ALGORITHMS[case.algorithm](collective, **case.parameters)
        built = time.perf_counter()
        verify(schedule)
        proven = time.perf_counter()
        cost(schedule, cluster, 64e6)
        times.append((built - begin, proven - built, time.perf_counter() - proven))
    build, prove, price = (statistics.median(column) for column in zip(*times, strict=True))
    both = [b + p for b, p, _ in times]
    return Result(
        name=case.name,
        transfers=len(schedule.transfers),
        build_s=build,
        prove_s=prove,
        price_s=price,
        fastest_s=min(both),
        slowest_s=max(both),
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    )


def measure_apart(case: Case, repeats: int) -> Result:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--only", case.name, "--repeats", str(repeats)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return Result(**json.loads(done.stdout))


def verdict(case: Case, result: Result) -> str:
    """Whether the goals are reached."""
    told = []
    if case.goal_s is not None:
        told.append(f"<= {case.goal_s:g} s: {'yes' if result.slowest_s <= case.goal_s else 'NO'}")
        both = result.build_s + result.prove_s
        told.append(f"price < build + prove: {'yes' if result.price_s < both else 'NO'}")
        told.append(f"price / build alone: {result.price_s / result.build_s:.1f}")
    if case.goal_mb is not None:
        told.append(f"<= {case.goal_mb:g} MB: {'yes' if result.peak_mb <= case.goal_mb else 'NO'}")
    return ", ".join(told)


def main() -> int:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description="Time building, proving and pricing of schedules.")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each case (default 5)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats takes 1 or more")
    if options.only is not None:
        case = next(case for case in CASES if case.name == options.only)
        print(json.dumps(asdict(measure(case, options.repeats))))
        return 0
    print(f"Python {platform.python_version()}, {platform.machine()}; medians of {options.repeats} runs\n")
    print("| schedule | transfers | build | prove | build + prove, fastest to slowest | price | peak memory | goals |")
    print("|---|---|---|---|---|---|---|---|")
    missed, results = False, []
    for case in CASES:
        result = measure_apart(case, options.repeats)
        results.append(asdict(result))
        told = verdict(case, result)
        missed |= "NO" in told
        print(
            f"| {case.name} | {result.transfers:,} | {result.build_s:.3f} s | {result.prove_s:.3f} s "
            f"| {result.fastest_s:.3f} to {result.slowest_s:.3f} s | {result.price_s:.3f} s "
            f"| {result.peak_mb:.0f} MB | {told} |",
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
