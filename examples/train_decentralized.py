"""paceline.Decentralized: workers train at their own speeds and average their weights now and then.

torchrun --nproc-per-node 4 examples/train_decentralized.py                          # four workers, equally fast
torchrun --nproc-per-node 4 examples/train_decentralized.py --slow-rank 3 --slow 5x  # nobody waits for the slow one
torchrun --nproc-per-node 4 examples/train_decentralized.py --slow-rank 3 --slow 5x --scheme allreduce   # all wait
paceline lab --scenario lan4 -- python examples/train_decentralized.py               # four emulated hosts (root)

Without a process group, workers come and go. Start the generator, and then as many workers as you like, when you like:

paceline generator --secret-file job.secret --total-steps 2000
python examples/train_decentralized.py --generator 127.0.0.1:29600 --secret-file job.secret
python examples/train_decentralized.py --generator 127.0.0.1:29600 --secret-file job.secret --slow 5x

Every worker prints its steps. The last line is the accuracy of the mean of all workers' weights.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

import paceline

HELD_OUT = 0  # no worker trains on batches of this number


def make_net() -> nn.Module:
    """Return the same weights on every worker."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten()),
        *(nn.Linear(16 * 8 * 8, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4)),
    )


def make_batch(number: int, step: int, size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise with a bright spot in one of four corners. Each worker has a number, and images of its own."""
    dice = torch.Generator().manual_seed(1_000_000 * number + step)
    labels = torch.randint(4, (size,), generator=dice)
    images = torch.randn(size, 1, 32, 32, generator=dice)
    images[torch.arange(size), 0, 8 + 16 * (labels // 2), 8 + 16 * (labels % 2)] += 8.0
    return images, labels


def train(model: paceline.Decentralized, optimizer: torch.optim.Optimizer, number: int, slow: float) -> None:
    """Make steps until all workers together have made enough."""
    while not model.done:
        began_s = time.perf_counter()
        images, labels = make_batch(number, model.statistics.steps)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        time.sleep((slow - 1) * (time.perf_counter() - began_s))  # as a slower machine would
        optimizer.step()


def accuracy(net: nn.Module) -> float:
    """Return the share of images that it reads right, of those that nobody has trained on."""
    images, labels = make_batch(HELD_OUT, 0, size=1000)
    with torch.no_grad():
        return float((net(images).argmax(1) == labels).float().mean())


def times(text: str) -> float:
    """Read ``5x`` or ``5``."""
    factor = float(text.removesuffix("x"))
    if factor < 1:
        raise argparse.ArgumentTypeError("1x is full speed")
    return factor


def main() -> None:
    """Train, and say what this worker has done."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="paceline", help="of the process group (paceline)")
    arguments.add_argument("--scheme", default="ripples", help="who averages what, and when (ripples)")
    arguments.add_argument("--steps", type=int, default=100, help="of a worker on average (100)")
    arguments.add_argument(
        "--slow-rank", type=int, default=-1, help="who is slow (nobody); with --generator, this worker"
    )
    arguments.add_argument("--slow", type=times, default=1.0, help="its steps take so many times as long, like 5x (1x)")
    arguments.add_argument("--generator", metavar="HOST:PORT", help="where paceline generator runs")
    arguments.add_argument("--secret-file", help="the generator's (PACELINE_SECRET_FILE)")
    options = arguments.parse_args()

    torch.set_num_threads(1)
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    if options.generator is not None:
        number, name, slow = 1 + os.getpid(), f"process {os.getpid()}", options.slow
        model = paceline.Decentralized(
            net, optimizer, generator=options.generator, secret_file=options.secret_file
        )  # fmt: skip
        print(f"{name} has joined", flush=True)
    else:
        dist.init_process_group(options.backend)
        rank = dist.get_rank()
        number, name, slow = 1 + rank, f"rank {rank}", options.slow if rank == options.slow_rank else 1.0
        total = options.steps * dist.get_world_size()
        model = paceline.Decentralized(net, optimizer, scheme=options.scheme, total_steps=total)

    began_s = time.perf_counter()
    train(model, optimizer, number, slow)
    elapsed_s, alone = time.perf_counter() - began_s, accuracy(net)
    seen = model.statistics
    print(
        f"{name}: {seen.steps} steps in {elapsed_s:.1f} s, {seen.groups.total()} averages, waited {seen.wait_s:.1f} s, "
        f"accuracy {alone:.3f}",
        flush=True,
    )
    model.finish()
    if options.generator is not None or dist.get_rank() == 0:
        print(f"accuracy of the average: {accuracy(net):.3f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
