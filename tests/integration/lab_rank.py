"""What a host of the lab runs in test_engine_in_lab.py: one rank, told by its argument what to do."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

task = sys.argv[1]
dist.init_process_group("paceline", timeout=timedelta(seconds=4 if task == "until-failure" else 60))
rank, size = dist.get_rank(), dist.get_world_size()
if task == "until-failure":
    dist.all_reduce(torch.ones(1000))
    print("working", flush=True)
    while True:
        dist.all_reduce(torch.ones(100_000))
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
