"""Small collectives beside large transfers: how much later they end.

    python benchmarks/beside.py [ROW ...] [--reps 200] [--backends paceline,gloo]

======== ============================================================================================== ==============
row      what is timed                                                                                  goal
======== ============================================================================================== ==============
host     4 KB all-reduce of one group, while another group of the same 4 ranks averages 64 MB again     3 times alone
         and again; one host
lan4     the same between four hosts of the lab with 1 Gbit/s                                           3 times alone
queues   the same with PACELINE_CONGESTION=bbr, which keeps the queues at the ports short               3 times alone
decision 4 bytes from all ranks to rank 0 and back, as a decision on late ranks travels, while rank 0   20 ms later
         sends 1 GB to rank 1 (isend); eight hosts of the lab with 500 Mbit/s
======== ============================================================================================== ==============

*alone* and *beside* are medians over repetitions, each as long as on its slowest rank; quartiles are in brackets. Ranks
meet at a barrier before each repetition, which is not timed. *large* is the median time of one large all-reduce
meanwhile, and *large alone* without the small ones. The lab needs root (docs/lab.md). Exits with 1 if Paceline misses
a goal, or one of the rows was not measured with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.bench.contenders import free_port
from paceline.lab import Lab, unavailable
from paceline.units import format_duration

SMALL_BYTES, LARGE_BYTES, MESSAGE_BYTES = 4_000, 64_000_000, 1_000_000_000
TIMES_ALONE, LATER_S = 3.0, 0.020
LONGEST_S = 300.0


@dataclass(frozen=True)
class Row:
    """Where it runs, and what is done by each rank."""

    what: str
    num_ranks: int
    lab: str | None
    run: Callable[[int], dict[str, list[float]]]
    backends: tuple[str, ...] = ("paceline", "gloo")
    variables: tuple[str, ...] = ()


def beside_all_reduces(reps: int) -> dict[str, list[float]]:
    """Each rank's times of small all-reduces alone and beside large ones, and of those."""
    import torch
    import torch.distributed as dist

    small_group, large_group = dist.new_group(), dist.new_group()
    small, large = torch.zeros(SMALL_BYTES // 4), torch.zeros(LARGE_BYTES // 4)
    can_average = dist.get_backend() != "gloo"
    operation = dist.ReduceOp.AVG if can_average else dist.ReduceOp.SUM
    stopping = threading.Event()
    large_s: dict[str, list[float]] = {"large_alone": [], "large": []}

    def keep_reducing(name: str, times: int | None) -> None:
        """Until all ranks have heard that one wants to stop: what it wants travels with the data."""
        while True:
            large[-1] = float(stopping.is_set() or len(large_s[name]) + 1 == times)
            began_s = time.perf_counter()
            dist.all_reduce(large, operation, group=large_group)
            large_s[name].append(time.perf_counter() - began_s)
            if large[-1] > 0:
                return

    def reduce() -> None:
        dist.all_reduce(small, group=small_group)

    def meet() -> None:
        dist.barrier(group=small_group)

    keep_reducing("large_alone", 3 if in_lab() else 40)
    alone_s = timed(reduce, meet, reps)
    thread = threading.Thread(target=keep_reducing, args=("large", None))
    thread.start()
    beside_s = timed(reduce, meet, reps)
    stopping.set()
    thread.join()
    return {"alone": alone_s, "beside": beside_s, **large_s}


def beside_a_message(reps: int) -> dict[str, list[float]]:
    """Each rank's times of a round trip by rank 0, alone and while rank 0 sends a large message."""
    import torch
    import torch.distributed as dist

    import paceline

    star = paceline.Options(algorithm="reduce:direct,broadcast:direct")
    rounds = dist.new_group(pg_options=star)
    word, rank = torch.zeros(1), dist.get_rank()

    def decide() -> None:
        dist.reduce(word, 0, group=rounds)
        dist.broadcast(word, 0, group=rounds)

    def meet() -> None:
        dist.barrier(group=rounds)

    alone_s = timed(decide, meet, reps)
    message = torch.zeros(MESSAGE_BYTES // 4) if rank < 2 else torch.zeros(0)
    dist.barrier()
    began_s = time.perf_counter()
    work = dist.isend(message, 1) if rank == 0 else dist.irecv(message, 0) if rank == 1 else None
    time.sleep(0.5)  # it fills every queue on its way
    beside_s = timed(decide, meet, reps)
    if work is not None and work.is_completed():
        raise RuntimeError("the message was there before the last round trip: take fewer --reps")
    if work is not None:
        work.wait()
    return {"alone": alone_s, "beside": beside_s, "large": [time.perf_counter() - began_s] if rank < 2 else [0.0]}


def in_lab() -> bool:
    """Whether this rank runs on a host of a lab."""
    return os.environ.get("MASTER_ADDR") != "127.0.0.1"


def timed(run: Callable[[], object], meet: Callable[[], object], reps: int) -> list[float]:
    """Seconds of each call on this rank."""
    found = []
    for turn in range(reps + 5):
        meet()
        began_s = time.perf_counter()
        run()
        if turn >= 5:
            found.append(time.perf_counter() - began_s)
    return found


ROWS = {
    "host": Row("4 KB all-reduce beside 64 MB, 4 ranks on one host", 4, None, beside_all_reduces),
    "lan4": Row("4 KB all-reduce beside 64 MB, lan4", 4, "lan4", beside_all_reduces),
    "queues": Row(
        "4 KB all-reduce beside 64 MB, lan4, bbr",
        4,
        "lan4",
        beside_all_reduces,
        ("paceline",),
        ("PACELINE_CONGESTION=bbr",),
    ),
    "decision": Row("round trip by rank 0 beside a 1 GB isend, lan8", 8, "lan8", beside_a_message, ("paceline",)),
}


def rank_main(name: str, backend: str, reps: int, report: Path) -> None:
    """One rank: rank 0 writes the times, each as long as on the slowest rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    found = ROWS[name].run(reps)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        slowest = {what: np.max([one[what] for one in everyone], axis=0).tolist() for what in found}
        report.write_text(json.dumps(slowest))
    dist.barrier()
    dist.destroy_process_group()


def measure(name: str, backend: str, reps: int) -> dict[str, list[float]]:
    """Start the ranks of a row, and return what rank 0 reports."""
    row = ROWS[name]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = ["env", *row.variables, sys.executable, __file__, "--rank", name, backend, str(reps), str(report)]
        if row.lab:
            with Lab.preset(row.lab) as lab:
                code = lab.run(command, timeout_s=LONGEST_S)
        else:
            code = _run_here(command, row.num_ranks)
        if code != 0:
            raise SystemExit(f"{row.what}, {backend}: the ranks ended with code {code}")
        times: dict[str, list[float]] = json.loads(report.read_text())
        return times


def _run_here(command: list[str], num_ranks: int) -> int:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port(0, None)), "WORLD_SIZE": str(num_ranks)}
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"})
        for rank in range(num_ranks)
    ]
    try:
        return max(process.wait(LONGEST_S) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _median(times_s: list[float]) -> float:
    return float(np.median(times_s))


def _words(times_s: list[float]) -> str:
    lower, median, upper = np.percentile(times_s, [25, 50, 75]).tolist()
    return f"{format_duration(median)} ({format_duration(lower)} - {format_duration(upper)})"


def main() -> int:
    """Measure the rows asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=f"of {', '.join(ROWS)} (default: all)")
    parser.add_argument("--reps", type=int, default=200, help="how often each small collective is timed (default: 200)")
    parser.add_argument("--backends", default="paceline,gloo", help="with commas (default: paceline,gloo)")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.rows if name not in ROWS]
    if unknown:
        parser.error(f"there is no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what")
    table.add_column("backend")
    for column in ("alone", "beside", "ratio", "later", "large", "large alone", "goal", "reached"):
        table.add_column(column, justify="right", no_wrap=True)
    missed = reached_goals = 0
    for name in dict.fromkeys(arguments.rows):
        row = ROWS[name]
        if row.lab and unavailable():
            print(f"left out: {row.what}: {unavailable()}")
            continue
        for backend in arguments.backends.split(","):
            if backend not in row.backends:
                continue
            times = measure(name, backend, arguments.reps)
            alone_s, beside_s = _median(times["alone"]), _median(times["beside"])
            if name == "decision":
                goal, reached = f"{format_duration(LATER_S)} later", beside_s - alone_s <= LATER_S
            else:
                goal, reached = f"{TIMES_ALONE:g}x", beside_s <= TIMES_ALONE * alone_s
            missed += backend == "paceline" and not reached
            reached_goals += backend == "paceline" and reached
            large = [_words(times[what]) if what in times else "" for what in ("large", "large_alone")]
            figures = [f"{beside_s / alone_s:.3g}x", format_duration(max(beside_s - alone_s, 0.0)), *large]
            words = [_words(times["alone"]), _words(times["beside"]), *figures, goal, "yes" if reached else "no"]
            table.add_row(row.what, backend, *words)
    Console(highlight=False, width=max(Console().width, 230)).print(table)
    print(f"{len(ROWS)} goals: {missed} missed, {len(ROWS) - missed - reached_goals} not measured")
    return int(reached_goals < len(ROWS))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
        sys.exit(0)
    sys.exit(main())
