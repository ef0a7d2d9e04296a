"""DistributedDataParallel on Paceline: the only line that differs from any other DDP script is the backend's name.

torchrun --nproc-per-node 2 examples/train_ddp.py
paceline lab --scenario lan4 -- python examples/train_ddp.py        # four emulated hosts, 1 Gbit/s each (root)
torchrun --nproc-per-node 2 examples/train_ddp.py --backend gloo    # to compare
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Learn to tell noise with a bright spot on the left from noise with one on the right."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="paceline")
    arguments.add_argument("--steps", type=int, default=100)
    options = arguments.parse_args()

    dist.init_process_group(options.backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(16 * 8 * 8, 512),
            nn.ReLU(),
            nn.Linear(512, 2),
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)  # every rank sees other images
    began_s = time.perf_counter()
    for _ in range(options.steps):
        labels = torch.randint(2, (32,))
        images = torch.randn(32, 1, 32, 32)
        columns = 8 + 16 * labels
        images[torch.arange(32), 0, 16, columns] += 6.0
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    step_ms = (time.perf_counter() - began_s) / options.steps * 1e3
    accuracy = (model(images).argmax(1) == labels).float().mean()
    dist.all_reduce(accuracy)
    if rank == 0:
        ranks = dist.get_world_size()
        print(f"{options.backend}, {ranks} ranks: {step_ms:.1f} ms a step, accuracy {accuracy.item() / ranks:.2f}")
        if options.backend == "paceline":
            from paceline.backend import chosen_algorithms

            print("algorithms: " + "; ".join(chosen_algorithms()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
