"""All-reduce with late ranks in the lab: what remains after the last arrival, against own ring, Gloo and the limit.

    python benchmarks/late_ranks.py [ROW ...] [--reps 3] [--mb 64]

Needs root (docs/lab.md). Every row is one set of processes on hosts of 500 Mbit/s; contenders take turns in it.
*Exposed* is from the last rank's call to the last rank's end, on the machine's one clock; *limit* is one buffer over a
port, headers included. Each result is checked: the right sum, the same bits on all ranks. The row ``ddp`` is the same
with an iteration of DistributedDataParallel, 100 MB of gradients in buckets of 25 MB, instead of one all-reduce. The
row ``mixed`` is 1000 all-reduces (``--collectives``) of sizes drawn at random, with nobody late: its sums are compared,
and every decision for a late rank was wrong, and is shown with its cost. Times are medians, with the least and the
most; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from paceline.ir.cluster import ETHERNET_WIRE_FACTOR

RATE_BYTES_PER_S = 62.5e6


@dataclass(frozen=True)
class Row:
    """Hosts, who is late by how many buffer times, and the contenders: PACELINE_LATE, or gloo."""

    name: str
    ranks: int
    late: dict[int, float]
    contenders: tuple[str, ...]
    bound: float = 1.0
    warm_up: int = 1
    drawn_mb: tuple[float, ...] = field(default=())
    ddp: bool = False


def _single(ranks: int) -> Row:
    late = min(3, ranks - 1)
    return Row(f"n={ranks}, rank {late} late", ranks, {late: 1.9}, (f"{late}", "off", "gloo"))


ROWS = {
    "n8": _single(8),
    "n7": _single(7),
    "n6": _single(6),
    "n5": _single(5),
    "n3": _single(3),
    "announced": Row("n=8, rank 3 late now and then", 8, {3: 3.0}, ("auto", "off"), warm_up=0),
    "together": Row("n=8, 3 and 5 late together", 8, {3: 1.9, 5: 1.9}, ("3,5", "off", "gloo"), bound=9 / 8),
    "apart": Row("n=8, 3 and 5 late, one buffer apart", 8, {3: 1.0, 5: 2.0}, ("3:1120,5:2240", "off")),
    **{
        f"sweep{d:g}": Row(f"n=8, rank 3 late {d:g} buffers", 8, {3: d}, ("auto", "off"), warm_up=8)
        for d in (0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
    },
    "ddp": Row("n=8, DDP, rank 3 late by 1.5 s", 8, {3: 1.4}, ("auto", "off", "gloo"), warm_up=6, ddp=True),
    "mixed": Row("n=8, nobody late, mixed sizes", 8, {}, ("auto", "off"), drawn_mb=(0.001, 0.1, 1, 2, 4, 8, 16)),
}


def limit_s(size_bytes: float) -> float:
    """One buffer over a port."""
    return size_bytes * ETHERNET_WIRE_FACTOR / RATE_BYTES_PER_S


def all_reduce(data: Any, rank: int, group: Any) -> Callable[[], Any]:
    """Sets data up; the call reduces it, and returns it."""
    import torch.distributed as dist

    data.fill_(rank + 1.0)
    data[::1000] = rank / 7

    def call() -> Any:
        dist.all_reduce(data, group=group)
        return data

    return call


def iteration(model: Any, rank: int) -> Callable[[], Any]:
    """The call trains: gradients are the rank's number, and DDP's mean of them, times ranks, is returned."""
    import torch.distributed as dist

    model.zero_grad()

    def call() -> Any:
        (model(None) * (rank + 1.0)).backward()
        return model.module.weights[-1].grad * dist.get_world_size()

    return call


def wrapped(count: int, group: Any) -> Any:
    """A model in DDP: tensors of 4 MB in buckets of 25 MB, and next to no computation."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.zeros(1_000_000) for _ in range(count // 1_000_000))

        def forward(self, _: None) -> torch.Tensor:
            return torch.stack([weight.sum() for weight in self.weights]).sum()

    return DistributedDataParallel(Model(), process_group=group, bucket_cap_mb=25e6 / 2**20)


def rank_process(task: dict[str, Any]) -> None:
    """One rank: for each repetition and contender, meet, be late, reduce; prints times of call and end."""
    import torch
    import torch.distributed as dist

    from paceline.backend import arrivals, chosen_algorithms

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = {}
    for contender in task["contenders"]:
        if contender != "gloo":
            os.environ["PACELINE_LATE"] = contender
        groups[contender] = dist.new_group(backend="gloo" if contender == "gloo" else "paceline")
    late_s = task["late_s"].get(str(rank), 0.0)
    largest = max(task["counts"])
    data = torch.empty(0 if task["ddp"] else largest)
    models = {name: wrapped(largest, group) for name, group in groups.items()} if task["ddp"] else {}
    choices = dict.fromkeys(groups, 0)
    for turn, count in enumerate(task["counts"]):
        times = {}
        for name in list(groups)[:: -1 if turn % 2 else 1]:  # who comes first must not matter
            call = iteration(models[name], rank) if models else all_reduce(data[:count], rank, groups[name])
            dist.barrier()
            time.sleep(late_s)
            called = time.monotonic()
            result = call()
            ended = time.monotonic()
            assert result[1] == size * (size + 1) / 2, result[1]
            before = choices[name]
            if name != "gloo" and rank == 0:
                choices[name] = sum(one.choice != "" for one in arrivals(groups[name]))
            times[name] = called, ended, hash(result[::1000].numpy().tobytes()), choices[name] > before
        if turn >= task["warm_up"]:
            print(json.dumps({"count": count, "times": times}), flush=True)
    for name, group in groups.items():
        if name != "gloo" and rank == 0:
            lines = [line for line in chosen_algorithms(group) if "allreduce" in line]
            print(json.dumps({"chosen": {name: lines}, "late_choices": choices[name]}), flush=True)
    dist.barrier()
    os._exit(0)


@dataclass(frozen=True)
class Turn:
    """One all-reduce of each contender: seconds exposed, and whether it was chosen for a late rank."""

    count: int
    exposed_s: dict[str, float]
    chosen: dict[str, bool]


def run(row: Row, reps: int, size_bytes: int, collectives: int) -> tuple[list[Turn], list[Any]]:
    """What was measured, and a summary of what was chosen."""
    from paceline.lab import Lab

    counts = [25_000_000 if row.ddp else size_bytes // 4] * (row.warm_up + reps)
    warm_up = row.warm_up
    if row.drawn_mb:
        sizes = [int(mb * 250_000) for mb in row.drawn_mb]
        warm_up = len(sizes)
        counts = sizes + random.Random(0).choices(sizes, k=collectives)
    buffer_s = limit_s(size_bytes)
    task = {
        "contenders": row.contenders,
        "late_s": {str(rank): late * buffer_s for rank, late in row.late.items()},
        "counts": counts,
        "warm_up": warm_up,
        "ddp": row.ddp,
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--rank-process", json.dumps(task)]
    env = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    with Lab(hosts=row.ranks) as lab:
        ranks = [rank.popen(command, env=env, stdout=subprocess.PIPE, text=True) for rank in lab.ranks]
        with ThreadPoolExecutor(row.ranks) as readers:  # all at once: a rank with a full pipe stops
            said = list(readers.map(lambda rank: rank.communicate(timeout=900)[0].splitlines(), ranks))
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{row.name}: a rank failed; its error is above")
    lines = [[json.loads(line) for line in text] for text in said]
    turns = []
    for same in zip(*[[line for line in mine if "times" in line] for mine in lines], strict=True):
        exposed_s, chosen = {}, {}
        for name in row.contenders:
            called, ended, bits, late = zip(*[line["times"][name] for line in same], strict=True)
            assert len(set(bits)) == 1, f"{name}: the ranks have different bits"
            exposed_s[name] = max(ended) - max(called)
            chosen[name] = any(late)
        turns.append(Turn(same[0]["count"], exposed_s, chosen))
    return turns, [line for mine in lines for line in mine if "chosen" in line]


def summary(row: Row, turns: list[Turn]) -> str:
    """Turns of one size."""
    subject, *others = row.contenders
    times = {name: [turn.exposed_s[name] for turn in turns] for name in row.contenders}
    best = median(times[subject])
    limit = limit_s(4 * turns[0].count) * row.bound
    against = ", ".join(
        f"{name} {median(times[name]) / best:.3f}x ({min(times[name]) * 1e3:.1f}-{max(times[name]) * 1e3:.1f} ms)"
        for name in others
    )
    return (
        f"{row.name}, {4 * turns[0].count / 1e6:g} MB, {len(turns)} times: {subject} {best * 1e3:.1f} ms "
        f"({min(times[subject]) * 1e3:.1f}-{max(times[subject]) * 1e3:.1f}), {limit / best:.3f} of the limit; "
        f"against {against}"
    )


def sums(row: Row, turns: list[Turn]) -> str:
    """All turns together, and what decisions for a late rank cost where there was none."""
    subject, other = row.contenders
    total, reference = (sum(turn.exposed_s[name] for turn in turns) for name in (subject, other))
    wrong = [turn for turn in turns if turn.chosen[subject]]
    costs = ", ".join(
        f"{4 * turn.count / 1e6:g} MB {turn.exposed_s[subject] / turn.exposed_s[other] - 1:+.1%}" for turn in wrong
    )
    return (
        f"{row.name}, {len(turns)} collectives: {subject} {total:.1f} s, {total / reference:.4f} of {other}; "
        f"{len(wrong)} decisions for a late rank{': ' + costs if wrong else ''}"
    )


def main() -> None:
    """Run the rows named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--mb", type=float, default=64)
    parser.add_argument("--collectives", type=int, default=1000, help="of the row mixed (default: 1000)")
    parser.add_argument("--rank-process", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_process:
        rank_process(options.rank_process)
        return
    if unknown := [name for name in options.rows if name not in ROWS]:
        parser.error(f"there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    for name in options.rows or ROWS:
        row = ROWS[name]
        turns, chosen = run(row, options.reps, int(options.mb * 1e6), options.collectives)
        for count in sorted({turn.count for turn in turns}):
            print(summary(row, [turn for turn in turns if turn.count == count]), flush=True)
        if row.drawn_mb:
            print(sums(row, turns), flush=True)
        for line in chosen:
            for contender, algorithms in line["chosen"].items():
                print(f"    {contender}: {'; '.join(algorithms)} ({line['late_choices']} choices for late ranks)")


if __name__ == "__main__":
    main()
