"""What each rank runs in test_lab_ranks.py: it all-reduces, says what it shares memory with, and may die."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.backend import chosen_algorithms

victim = int(sys.argv[1]) if len(sys.argv) > 1 else None
dist.init_process_group("paceline")
rank, size = dist.get_rank(), dist.get_world_size()
for count in (1, 1000, 1_000_003):
    numbers = torch.arange(count, dtype=torch.float64) + rank
    dist.all_reduce(numbers)
    assert torch.equal(numbers, torch.arange(count, dtype=torch.float64) * size + size * (size - 1) / 2)
if victim is None:
    shared = sorted(set(re.findall(r" (\d+) +/memfd:paceline", Path("/proc/self/maps").read_text())))
    print(json.dumps({"rank": rank, "shared": shared, "algorithms": chosen_algorithms()}), flush=True)
    dist.barrier()  # who leaves lets go of what it shares
    dist.destroy_process_group()
else:
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(100_000))
