"""What a host of the lab runs in test_multicast_in_lab.py: one rank, told by its argument what to do."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.backend import chosen_algorithms, multicast_counters

task, timeout_s, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("paceline", timeout=timedelta(seconds=timeout_s))
rank, size = dist.get_rank(), dist.get_world_size()


def shard(of: int, length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32) + 1000 * of


def gather(length: int, asynchronous: bool = False) -> tuple[torch.Tensor, dist.Work | None]:
    gathered = torch.zeros(size * length)
    return gathered, dist.all_gather_single(gathered, shard(rank, length), async_op=asynchronous)


def right(gathered: torch.Tensor) -> bool:
    return torch.equal(gathered, torch.cat([shard(of, len(gathered) // size) for of in range(size)]))


def move(length: int) -> None:
    assert right(gather(length)[0])
    for root in (0, size - 1):
        tensor = shard(root, length) if rank == root else torch.zeros(length)
        dist.broadcast(tensor, root)
        assert torch.equal(tensor, shard(root, length))


dist.barrier()
print("working", flush=True)
if task == "until-failure":
    while True:
        move(count)
if task == "gather":  # one all-gather between two lines of the test, so that it can count
    sys.stdin.readline()
    move_one = gather(count)[0]
    dist.barrier()
    print("gathered", flush=True)
    sys.stdin.readline()
    assert right(move_one)
if task == "late":
    time.sleep(2 * (rank == size - 1))
    move(count)
if task == "dropped":  # the test lets no packets through any more
    move(count)
    print("moved", flush=True)
    sys.stdin.readline()
    move(count)
if task == "overlapping":
    group = dist.new_group(list(range(size))[::-1])
    gathered = [gather(count, asynchronous=True) for _ in range(4)]
    other = torch.ones(count) if rank == 0 else torch.zeros(count)
    dist.broadcast(other, 0, group=group)
    assert torch.equal(other, torch.ones(count))
    for tensor, work in gathered:
        assert work is not None
        work.wait()
        assert right(tensor)
if task == "moves":
    for length in (1, 100, 5000, count):
        move(length)
counters = multicast_counters()
if counters is None:
    print("no multicast")
else:
    assert counters["forged"] == counters["malformed"] == 0, counters
    print("repaired" if counters["repaired_bytes"] or counters["rounds_again"] else "nothing repaired")
    assert any("multicast" in line for line in chosen_algorithms()), chosen_algorithms()
dist.destroy_process_group()
print("right", flush=True)
