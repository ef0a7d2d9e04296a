"""What a host of the lab runs in test_decentralized_faults.py: one worker, until its program's input ends."""

from __future__ import annotations

import json
import select
import sys
import time

import torch
import torch.distributed as dist

import paceline

dist.init_process_group("paceline")
torch.manual_seed(0)
module = torch.nn.Linear(400, 400)
optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
model = paceline.Decentralized(
    module, optimizer, lease_s=3.0, patience_s=1.0, longest_average_s=4.0, timeout_s=60.0, group_size=2
)
said = False
while not select.select([sys.stdin], [], [], 0)[0]:
    optimizer.zero_grad()
    model(torch.randn(4, 400)).square().mean().backward()
    optimizer.step()
    time.sleep(0.002)
    if not said and model.statistics.groups.total() >= 3:
        said = True
        print("working", flush=True)
counted = model.statistics.groups.total()
model.finish()
weights = torch.cat([one.detach().flatten() for one in module.parameters()])
print(json.dumps({"groups": counted, "sum": weights.double().sum().item(), "norm": weights.double().norm().item()}))
