"""Hours of mixed collectives, all checked: ``make soak``.

SOAK_MINUTES (default 60) says for how long, and SOAK_SEED repeats a run.

Four ranks on one host work through a random plan, by shared memory and by TCP in turn, in new processes each time. All
ranks make the same plan from the seed, which is printed: a failure can be repeated with SOAK_SEED. The plan mixes
collectives, groups, sizes, dtypes, synchronous calls and asynchronous ones, messages, and new groups; each rank is late
now and then. At the end of a turn descriptors and threads must be where they were after its first third, and memory
close to it: within 64 MB, or 256 MB in a run so short that the engine's scratch is still growing to its limit. So only
a run of 12 minutes and more finds a small leak.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from ranks import Member, run_ranks

MINUTES = float(os.environ.get("SOAK_MINUTES", "60"))
SEED = int(os.environ.get("SOAK_SEED", str(time.time_ns() % 1_000_000)))
NUM_RANKS = 4
LONGEST_TURN_S = 600.0
BLOCK = 50  # operations between two looks at the clock, which all ranks take together
MOST_PENDING = 12
SETTLED_S = 120.0  # in measured turns memory stayed level from about 100 s on
MOST_GROWTH_MB = 64
MOST_GROWTH_UNSETTLED_MB = 256  # what the engine's pool of scratch may keep (csrc/engine/scratch.cc)
MEMBERS = ((0, 1, 2, 3), (0, 1), (2, 3), (1, 2, 3), (0, 3))
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
SIZES = (1, 2, 7, 100, 1000, 4096, 30_000, 250_000, 1_000_000, 3_000_000)
OPERATIONS = {
    dist.ReduceOp.SUM: lambda parts: torch.stack(parts).sum(0),
    dist.ReduceOp.MAX: lambda parts: torch.stack(parts).amax(0),
    dist.ReduceOp.MIN: lambda parts: torch.stack(parts).amin(0),
}
Check = Callable[[], bool]


@dataclass(frozen=True)
class Step:
    """One operation of the plan: the same on all members of its group."""

    number: int
    kind: str
    members: tuple[int, ...]
    dtype: torch.dtype
    count: int
    salt: int
    root: int
    asynchronous: bool
    operation: object

    def data(self, rank: int, part: int = 0) -> torch.Tensor:
        """What a rank contributes: small whole numbers, which every dtype adds up exactly."""
        base = torch.arange(self.count, dtype=torch.int32)
        return base.add_(self.salt + 3 * rank + 5 * part).remainder_(7).to(self.dtype)


def _draw(dice: random.Random, number: int) -> Step:
    members = dice.choice(MEMBERS)
    return Step(
        number,
        dice.choice(tuple(KINDS)),
        members,
        dice.choice(DTYPES),
        dice.choices(SIZES, weights=(4, 4, 4, 8, 8, 6, 4, 3, 1, 0.3))[0],
        dice.randrange(7),
        dice.choice(members),
        dice.random() < 0.5,
        dice.choice(tuple(OPERATIONS)),
    )


def _all_reduce(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    data = step.data(rank)
    work = dist.all_reduce(data, step.operation, group=group, async_op=step.asynchronous)
    wanted = OPERATIONS[step.operation]([step.data(member) for member in step.members]).to(step.dtype)
    return work, lambda: torch.equal(data, wanted)


def _reduce(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    data = step.data(rank)
    work = dist.reduce(data, step.root, step.operation, group=group, async_op=step.asynchronous)
    wanted = OPERATIONS[step.operation]([step.data(member) for member in step.members]).to(step.dtype)
    return work, lambda: rank != step.root or torch.equal(data, wanted)


def _broadcast(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    data = step.data(rank)
    work = dist.broadcast(data, step.root, group=group, async_op=step.asynchronous)
    return work, lambda: torch.equal(data, step.data(step.root))


def _all_gather(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    data = torch.zeros(step.count * len(step.members), dtype=step.dtype)
    work = dist.all_gather_single(data, step.data(rank), group=group, async_op=step.asynchronous)
    return work, lambda: torch.equal(data, torch.cat([step.data(member) for member in step.members]))


def _reduce_scatter(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    places = range(len(step.members))
    data = torch.zeros(step.count, dtype=step.dtype)
    parts = torch.cat([step.data(rank, place) for place in places])
    work = dist.reduce_scatter_single(data, parts, step.operation, group=group, async_op=step.asynchronous)
    mine = step.members.index(rank)
    wanted = OPERATIONS[step.operation]([step.data(member, mine) for member in step.members]).to(step.dtype)
    return work, lambda: torch.equal(data, wanted)


def _all_to_all(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    data = torch.zeros(step.count * len(step.members), dtype=step.dtype)
    parts = torch.cat([step.data(rank, place) for place in range(len(step.members))])
    work = dist.all_to_all_single(data, parts, group=group, async_op=step.asynchronous)
    mine = step.members.index(rank)
    return work, lambda: torch.equal(data, torch.cat([step.data(member, mine) for member in step.members]))


def _scatter(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    data = torch.zeros(step.count, dtype=step.dtype)
    places = range(len(step.members))
    parts = [step.data(rank, place) for place in places] if rank == step.root else None
    work = dist.scatter(data, parts, step.root, group=group, async_op=step.asynchronous)
    return work, lambda: torch.equal(data, step.data(step.root, step.members.index(rank)))


def _gather(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    parts = [torch.zeros(step.count, dtype=step.dtype) for _ in step.members] if rank == step.root else None
    work = dist.gather(step.data(rank), parts, step.root, group=group, async_op=step.asynchronous)
    return work, lambda: parts is None or all(map(torch.equal, parts, map(step.data, step.members)))


def _messages(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    """Everybody sends to the next member; both are waited for at once or later."""
    place, size = step.members.index(rank), len(step.members)
    to, source = step.members[(place + 1) % size], step.members[place - 1]
    data = torch.zeros(step.count, dtype=step.dtype)
    received = dist.irecv(data, source, group=group, tag=step.number)
    sent = dist.isend(step.data(rank), to, group=group, tag=step.number)
    assert received is not None
    assert sent is not None
    if not step.asynchronous:
        received.wait()

    def check() -> bool:
        received.wait()
        sent.wait()
        return torch.equal(data, step.data(source))

    return None if not step.asynchronous else received, check


def _barrier(step: Step, _rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    return dist.barrier(group, async_op=step.asynchronous), lambda: True


def _objects(step: Step, rank: int, group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    found: list[object] = [None] * len(step.members)
    dist.all_gather_object(found, (rank, step.number), group=group)
    return None, lambda: found == [(member, step.number) for member in step.members]


def _new_group(step: Step, rank: int, _group: dist.ProcessGroup) -> tuple[dist.Work | None, Check]:
    """A group for one operation. All ranks call new_group, whoever is a member."""
    fresh = dist.new_group(list(step.members))
    if rank not in step.members:
        return None, lambda: True
    work, check = _all_reduce(step, rank, fresh)
    if work is not None:
        work.wait()
    dist.destroy_process_group(fresh)
    return None, check


KINDS: dict[str, Callable[[Step, int, dist.ProcessGroup], tuple[dist.Work | None, Check]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "scatter": _scatter,
    "gather": _gather,
    "messages": _messages,
    "barrier": _barrier,
    "objects": _objects,
    "new_group": _new_group,
}


def _held() -> dict[str, int]:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed does not count
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "MB": int(status["VmRSS"].split()[0]) // 1024,
    }


def _open_connections(members: tuple[int, ...], rank: int, group: dist.ProcessGroup) -> None:
    """Between all members, for collectives and for messages: otherwise they open when they are needed first."""
    dist.all_to_all_single(torch.zeros(len(members)), torch.zeros(len(members)), group=group)
    others = [member for member in members if member != rank]
    works = [dist.irecv(torch.zeros(1), member, group=group) for member in others]
    works += [dist.isend(torch.zeros(1), member, group=group) for member in others]
    for work in works:
        assert work is not None
        work.wait()


def turn(me: Member, seed: int, seconds: float) -> tuple[int, int, dict[str, int], dict[str, int]]:
    """One rank: operations and checked results, and what the process held after a third and at the end."""
    faulthandler.dump_traceback_later(seconds + 60)  # of a rank that hangs
    plan, own = random.Random(seed), random.Random(f"{seed} {me.rank}")
    groups = {members: dist.new_group(list(members)) for members in MEMBERS}
    for members, group in [(MEMBERS[0], dist.group.WORLD), *groups.items()]:
        if me.rank in members:
            _open_connections(members, me.rank, group)
    pending: list[tuple[Step, dist.Work, Check]] = []
    begin, number, done, held = time.monotonic(), 0, 0, None

    def finish(step: Step, work: dist.Work | None, check: Check) -> None:
        if work is not None:
            work.wait()
        assert check(), f"wrong result of {step} on rank {me.rank} (SOAK_SEED={SEED})"

    while True:
        for _ in range(BLOCK):
            number += 1
            step = _draw(plan, number)
            if me.rank not in step.members and step.kind != "new_group":
                continue
            if own.random() < 0.02:
                time.sleep(own.expovariate(1 / 0.02))
            work, check = KINDS[step.kind](step, me.rank, groups[step.members])
            done += 1
            if work is not None and step.asynchronous:
                pending.append((step, work, check))
            else:
                finish(step, None, check)
            while len(pending) > MOST_PENDING or (pending and own.random() < 0.3):
                finish(*pending.pop(own.randrange(len(pending))))
        while pending:
            finish(*pending.pop())
        passed_s = torch.tensor([time.monotonic() - begin], dtype=torch.float64)
        dist.broadcast(passed_s, 0)
        if held is None and passed_s.item() > seconds / 3:
            me.meet("after a third")
            held = _held()
        if passed_s.item() > seconds:
            break
    me.meet("at the end")
    assert held is not None
    return number, done, held, _held()


def main() -> int:
    """Turns, and a line for each and for all; 1 if something was left behind."""
    num_turns = max(2, 2 * round(MINUTES * 60 / LONGEST_TURN_S / 2))
    seconds = MINUTES * 60 / num_turns
    print(f"soak: SOAK_MINUTES={MINUTES:g} SOAK_SEED={SEED}: {num_turns} turns of {seconds:.0f} s", flush=True)
    most_mb = MOST_GROWTH_MB if seconds / 3 >= SETTLED_S else MOST_GROWTH_UNSETTLED_MB
    total, failed = 0, False
    for number in range(num_turns):
        transport = ("auto", "tcp")[number % 2]
        environment = {"PACELINE_TRANSPORT": transport}
        ended = run_ranks(
            turn,
            NUM_RANKS,
            SEED + number,
            seconds,
            timeout_s=seconds + 120,
            environment=environment,
            backend="paceline",
        )
        total += sum(done for _, done, _, _ in ended)
        said = []
        for rank, (_, _, before, after) in enumerate(ended):
            said.append(", ".join(f"{before[what]} to {after[what]} {what}" for what in before))
            grown = {what: after[what] - before[what] for what in before}
            if grown["descriptors"] > 0 or grown["threads"] > 0 or grown["MB"] > most_mb:
                failed = True
                print(f"soak: rank {rank} has grown in turn {number} (PACELINE_TRANSPORT={transport}): {said[-1]}")
        print(f"soak: turn {number}, {transport}: {ended[0][0]} operations; rank 0: {said[0]}", flush=True)
    level = f"descriptors and threads level, memory within {most_mb} MB of a third of each turn"
    verdict = "all results right, but something was left behind" if failed else f"all results right, {level}"
    print(f"soak: {total} operations of {NUM_RANKS} ranks in {MINUTES:g} minutes, seed {SEED}: {verdict}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
