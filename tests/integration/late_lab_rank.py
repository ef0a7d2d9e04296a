"""What a host of the lab runs in test_late_in_lab.py: rank 2 is late for some steps, and then in time."""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.backend import arrivals, chosen_algorithms

dist.init_process_group("paceline", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
for step in range(40):
    if rank == 2 and step < 16:
        time.sleep(0.4)
    numbers = torch.arange(1_000_000, dtype=torch.float32) % 1000 + rank
    dist.all_reduce(numbers)
    expected = torch.arange(1_000_000, dtype=torch.float32) % 1000 * size + size * (size - 1) / 2
    assert torch.equal(numbers, expected), step
choices = [one.choice for one in arrivals()]
print(json.dumps({"rank": rank, "chosen": chosen_algorithms(), "choices": choices}), flush=True)
dist.barrier()
dist.destroy_process_group()
