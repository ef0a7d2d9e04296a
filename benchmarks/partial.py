"""A partial all-reduce among some ranks, against an all-reduce in a Gloo group of these ranks made beforehand.

    python benchmarks/partial.py [--scenario lan8] [--members 4] [--mb 2.5] [--turns 40]

In the lab with root (docs/lab.md), or with ``--ranks N`` by N processes of this host. Contenders take turns. A time is
from the last member's call to the last member's end, on the machine's one clock. *The same members* call again and
again; *new members* are another set of ranks at each call, most of which never met as a set before, though each two of
them have; *strangers*, in the first call of all, have not even had a connection.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles

STRANGERS, SAME, NEW, GLOO = "strangers", "the same members", "new members", "gloo, a group of them"


def rank_process(num_members: int, megabytes: float, turns: int) -> None:
    """One rank: prints when it called and when it was done, for each call it takes part in."""
    import torch
    import torch.distributed as dist

    import paceline

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    everybody = dist.new_group(backend="paceline")
    same = list(range(num_members))
    of_gloo = dist.new_group(same, backend="gloo")
    sets = [list(some) for some in itertools.combinations(range(size), num_members) if list(some) != same]
    random.Random(0).shuffle(sets)
    numbers = torch.ones(int(megabytes * 1e6 / 4))

    def call(turn: int, name: str, members: list[int]) -> None:
        dist.barrier()
        if rank not in members:
            return
        called = time.monotonic()
        if name == GLOO:
            dist.all_reduce(numbers, dist.ReduceOp.SUM, group=of_gloo)
            numbers.div_(num_members)
        else:
            paceline.partial_all_reduce(numbers, members, group=everybody)
        print(json.dumps([turn, name, called, time.monotonic()]), flush=True)

    call(0, GLOO, same)  # which connects them
    call(0, STRANGERS, same)
    for pair in itertools.combinations(range(size), 2):  # from here on every two ranks have met
        call(0, "in pairs", list(pair))
    for turn in range(1, turns + 1):
        calls = [(SAME, same), (GLOO, same), (NEW, sets[turn % len(sets)])]
        for name, members in calls[:: -1 if turn % 2 else 1]:  # who comes first must not matter
            call(turn, name, members)
    assert numbers[0] == 1
    dist.barrier()
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each call, by what it was."""
    command = [sys.executable, str(Path(__file__).resolve()), "--rank-process"]
    command += ["--members", str(options.members), "--mb", str(options.mb), "--turns", str(options.turns)]
    if options.ranks:
        world = {"WORLD_SIZE": str(options.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29567"}
        start = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **world, "RANK": str(rank)})
            for rank in range(options.ranks)
        ]
        said = _read(start)
    else:
        from paceline.lab import Lab

        with Lab.preset(options.scenario) as lab:
            said = _read([rank.popen(command, stdout=subprocess.PIPE, text=True) for rank in lab.ranks])
    events: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for lines in said:
        for turn, name, called, ended in map(json.loads, lines):
            if turn > 0 or name == STRANGERS:
                events.setdefault((turn, name), []).append((called, ended))
    took_s: dict[str, list[float]] = {}
    for (_, name), calls in events.items():
        took_s.setdefault(name, []).append(max(end for _, end in calls) - max(called for called, _ in calls))
    return took_s


def _read(ranks: list[subprocess.Popen[str]]) -> list[list[str]]:
    with ThreadPoolExecutor(len(ranks)) as readers:
        said = list(readers.map(lambda rank: rank.communicate(timeout=900)[0].splitlines(), ranks))
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed; its error is above")
    return said


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenario", default="lan8", help="a preset of the lab (default: lan8)")
    parser.add_argument("--ranks", type=int, default=0, help="on this host instead of the lab")
    parser.add_argument("--members", type=int, default=4, help="of each operation (default: 4)")
    parser.add_argument("--mb", type=float, default=2.5, help="megabytes of float32 (default: 2.5)")
    parser.add_argument("--turns", type=int, default=40, help="of each contender (default: 40)")
    parser.add_argument("--rank-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_process:
        rank_process(options.members, options.mb, options.turns)
        return
    took_s = measure(options)
    place = f"{options.ranks} ranks on one host" if options.ranks else options.scenario
    print(f"# all-reduce of {options.mb:g} MB among {options.members} ranks, {place}; medians of {options.turns}")
    print(f"{'members':<24}{'time':>10}{'25%-75%':>22}{'against gloo':>14}")
    gloo_s = median(took_s[GLOO])
    for name in (SAME, NEW, STRANGERS, GLOO):
        middle_s = median(took_s[name])
        low_s, _, high_s = quantiles(took_s[name], n=4) if len(took_s[name]) > 1 else (middle_s,) * 3
        spread = f"{low_s * 1e3:.2f}-{high_s * 1e3:.2f} ms"
        print(f"{name:<24}{middle_s * 1e3:>7.2f} ms{spread:>22}{gloo_s / middle_s:>13.2f}x")


if __name__ == "__main__":
    main()
