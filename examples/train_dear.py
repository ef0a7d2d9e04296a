"""paceline.DataParallel beside DistributedDataParallel, from the same seeds: two lines differ, the losses do not.

torchrun --nproc-per-node 2 examples/train_dear.py
torchrun --nproc-per-node 2 examples/train_dear.py --sharded             # 1/P of the optimizer's state a rank
paceline lab --scenario lan4 -- python examples/train_dear.py            # four emulated hosts, 1 Gbit/s each (root)
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten()),
        *(nn.Linear(16 * 8 * 8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)),
    )


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a bright spot in one of four corners; every rank sees other images."""
    dice = torch.Generator().manual_seed(1000 * step + rank)
    labels = torch.randint(4, (32,), generator=dice)
    images = torch.randn(32, 1, 32, 32, generator=dice)
    images[torch.arange(32), 0, 8 + 16 * (labels // 2), 8 + 16 * (labels % 2)] += 8.0
    return images, labels


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> tuple[list[float], float]:
    """The loop of any training script. Returns the mean losses of every tenth step, and the time of a step."""
    rank, losses = dist.get_rank(), []
    began_s = time.perf_counter()
    for step in range(steps):
        images, labels = _batch(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    step_s = (time.perf_counter() - began_s) / steps
    means = torch.stack(losses[::10])
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist(), step_s


def main() -> None:
    """Train both and print their losses side by side."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="paceline")
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--sharded", action="store_true")
    options = arguments.parse_args()
    dist.init_process_group(options.backend)

    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    reference = DistributedDataParallel(net)
    theirs, their_step_s = _train(reference, optimizer, options.steps)

    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = paceline.DataParallel(net, optimizer, sharded=options.sharded, bucket_mb=1)
    ours, our_step_s = _train(model, optimizer, options.steps)

    pairs = zip(reference.module.parameters(), model.module.parameters(), strict=True)
    apart = max((one - other).abs().max().item() for one, other in pairs)
    if dist.get_rank() == 0:
        print("step   DDP     DataParallel")
        for number, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            print(f"{10 * number:4}   {one:.4f}  {other:.4f}")
        print(f"{their_step_s * 1e3:.1f} ms a step with DDP, {our_step_s * 1e3:.1f} ms with DataParallel")
        print(f"largest difference of a weight: {apart:.1e}")
        print(model.overlap.steps[-3].line())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
