"""How long a new process group takes, first collective included: Paceline against Gloo, in the lab.

    python benchmarks/groups.py [--scenario lan4] [--groups 20]

Needs root (docs/lab.md). All ranks call ``new_group`` and all-reduce 4 KB in it; contenders take turns. A time is from
the last rank's call to the last rank's end, on the machine's one clock. The first group of a process also starts the
engine and measures the links: it has a row of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

CONTENDERS = ("paceline", "gloo")
COUNT = 1024  # floats: 4 KB


def rank_process(groups: int) -> None:
    """One rank: prints when it called and when it was done, for each group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for turn in range(groups + 1):
        for name in CONTENDERS[:: -1 if turn % 2 else 1]:  # who comes first must not matter
            dist.barrier()
            called = time.monotonic()
            group = dist.new_group(backend=name)
            numbers = torch.ones(COUNT)
            dist.all_reduce(numbers, group=group)
            ended = time.monotonic()
            assert numbers[0] == dist.get_world_size()
            print(json.dumps([turn, name, called, ended]), flush=True)
            dist.barrier()
            dist.destroy_process_group(group)
    dist.barrier()
    dist.destroy_process_group()


def measure(scenario: str, groups: int) -> dict[str, list[float]]:
    """Seconds for each group, by contender; the first is the first of the process."""
    from paceline.lab import Lab

    command = [sys.executable, str(Path(__file__).resolve()), "--rank-process", "--groups", str(groups)]
    with Lab.preset(scenario) as lab:
        ranks = [rank.popen(command, stdout=subprocess.PIPE, text=True) for rank in lab.ranks]
        with ThreadPoolExecutor(len(ranks)) as readers:
            said = list(readers.map(lambda rank: rank.communicate(timeout=900)[0].splitlines(), ranks))
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed; its error is above")
    took_s: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for same in zip(*said, strict=True):
        events = [json.loads(line) for line in same]
        took_s[events[0][1]].append(max(event[3] for event in events) - max(event[2] for event in events))
    return took_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenario", default="lan4", help="a preset of the lab (default: lan4)")
    parser.add_argument("--groups", type=int, default=20, help="after the first (default: 20)")
    parser.add_argument("--rank-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_process:
        rank_process(options.groups)
        return
    took_s = measure(options.scenario, options.groups)
    print(f"# new_group of all ranks, and an all-reduce of 4 KB in it; {options.scenario}, medians of {options.groups}")
    print(f"{'backend':<10}{'the first':>12}{'a later one':>14}{'least-most':>20}{'against gloo':>14}")
    gloo_s = median(took_s["gloo"][1:])
    for name, times_s in took_s.items():
        first_s, *later_s = times_s
        spread = f"{min(later_s) * 1e3:.1f}-{max(later_s) * 1e3:.1f} ms"
        middle_s = median(later_s)
        print(f"{name:<10}{first_s * 1e3:>9.1f} ms{middle_s * 1e3:>11.1f} ms{spread:>20}{gloo_s / middle_s:>13.2f}x")


if __name__ == "__main__":
    main()
