"""What DataParallel costs where it has nothing to hide: a small convolutional net, in one process, and on two ranks.

    python benchmarks/dear_overhead.py [--steps 10] [--rounds 60]

*alone* is world size 1: the same net and optimizer, called through the wrapper and not. *machinery* is the processor
time of a step of rank 0 of two ranks on Gloo, with a bucket for nearly every layer, beside DDP's. Loops take short
turns; each figure is the median of rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import paceline

PORT = 29517
BUCKET_MB = 0.02


def _net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (3, 32, 32, 32, 32, 32):
        layers += [nn.Conv2d(inputs, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(2048, 10))


def _loop(kind: str) -> Callable[[int], None]:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model: nn.Module = net
    if kind == "ddp":
        model = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    elif kind != "plain":
        model = paceline.DataParallel(net, optimizer, bucket_mb=BUCKET_MB, sharded=kind == "sharded")
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run


def _compare(kinds: list[str], steps: int, rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """The median time of a step of each, in seconds, over rounds in turns."""
    loops = {kind: _loop(kind) for kind in kinds}
    times_s: dict[str, list[float]] = {kind: [] for kind in kinds}
    for run in loops.values():
        run(20)
    for _ in range(rounds):
        for kind, run in loops.items():
            began_s = clock()
            run(steps)
            times_s[kind].append((clock() - began_s) / steps)
    return {kind: statistics.median(found) for kind, found in times_s.items()}


def _compare_alone(steps: int, rounds: int) -> dict[str, float]:
    """One net, so that memory and caches are the same; the wrapper leaves it as it is when it is alone."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    model = paceline.DataParallel(net, optimizer)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    times_s: dict[str, list[float]] = {"plain": [], "gathered": []}
    for turn in range(2 * rounds + 4):
        kind, called = (("plain", net), ("gathered", model))[(turn // 2 + turn) % 2]  # each goes first as often
        began_s = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(called(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if turn >= 4:
            times_s[kind].append((time.perf_counter() - began_s) / steps)
    return {kind: statistics.median(found) for kind, found in times_s.items()}


def _pair(rank: int, steps: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = _compare(["plain", "ddp", "gathered", "sharded"], steps, rounds, time.thread_time)
    if rank == 0:
        text = ", ".join(f"{kind} {seconds * 1e3:.3f} ms" for kind, seconds in found.items())
        print(f"machinery, 2 ranks, processor time of the training thread a step: {text}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="in a turn (default: 10)")
    parser.add_argument("--rounds", type=int, default=60, help="how often loops take turns (default: 60)")
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1)
    os.environ["MASTER_PORT"] = str(PORT + 1)  # the first store outlives its group
    found = _compare_alone(options.steps, options.rounds)
    dist.destroy_process_group()
    share = found["gathered"] / found["plain"] - 1
    plain_ms, wrapped_ms = found["plain"] * 1e3, found["gathered"] * 1e3
    print(f"alone: plain {plain_ms:.3f} ms a step, DataParallel {wrapped_ms:.3f} ms: {share:+.2%}")
    spawn(_pair, (options.steps, options.rounds), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
