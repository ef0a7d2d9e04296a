"""What a host of the lab runs in test_engine_in_lab.py: one rank, told by its argument what to do."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.observe import links

task = sys.argv[1]
backend = "gloo" if task == "groups" else "paceline"  # a group of all hosts would know all links
dist.init_process_group(backend, timeout=timedelta(seconds=4 if task == "until-failure" else 60))
rank, size = dist.get_rank(), dist.get_world_size()
if task == "until-failure":
    dist.all_reduce(torch.ones(1000))
    print("working", flush=True)
    while True:
        dist.all_reduce(torch.ones(100_000))
if task == "groups":
    measure, measured = links.measure, []
    links.measure = lambda *arguments: measured.append(0) or measure(*arguments)
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
