"""What a host of the lab runs in test_engine_in_lab.py: one rank, told by its argument what to do."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.observe import links

task, timeout_s = sys.argv[1], float(sys.argv[2])
backend = "gloo" if task == "groups" else "paceline"  # a group of all hosts would know all links
dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
rank, size = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(1000))
print("working", flush=True)
if task == "until-failure":
    while True:
        for count in (100, 100_000, 1_000_000):
            dist.all_reduce(torch.ones(count))
            dist.broadcast(torch.ones(count), 0)
            dist.all_gather_single(torch.zeros(count * size), torch.ones(count))
if task == "idle-until-failure":
    time.sleep(8 * (rank != 0))  # only rank 0 waits for the others, and sends nothing
    dist.recv(torch.zeros(1), size - 1)
if task == "late":  # the last rank is late, while the others send it more than it keeps: it reads no more
    time.sleep(10 * (rank == size - 1))
    numbers = [torch.full((5_000_000,), float(rank)) for _ in range(6)]
    for work in [dist.all_reduce(part, async_op=True) for part in numbers]:
        work.wait()
    assert all(bool((part == size * (size - 1) / 2).all()) for part in numbers)
if task == "groups":
    measure, measured = links.measure, []
    links.measure = lambda *where, **what: measured.append(0) or measure(*where, **what)
    for ranks in ([0, 1], [1, 0], [1, 2], [2, 1], [0, 1, 2], [0, 2], [0, 1, 2], [1, 2]):
        before = len(measured)
        group = dist.new_group(ranks, backend="paceline")
        if rank in ranks:
            dist.barrier(group)
        counts = torch.tensor([float(len(measured) - before)])
        dist.all_reduce(counts)
        assert counts.item() in (0, len(ranks)), (ranks, counts)
        if counts.item():
            print("measured", ranks, flush=True)
for count in (1, 1000, 1_000_003):
    numbers = torch.arange(count, dtype=torch.float64) + rank
    dist.all_reduce(numbers)
    assert torch.equal(numbers, torch.arange(count, dtype=torch.float64) * size + size * (size - 1) / 2)
    received = torch.zeros(count)
    requests = [dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)]
    requests.append(dist.irecv(received, (rank - 1) % size))
    for request in requests:
        request.wait()
    assert torch.equal(received, torch.full((count,), float((rank - 1) % size)))
dist.destroy_process_group()
print("right")
