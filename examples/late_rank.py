"""DistributedDataParallel with one rank that is late in every step, as if its data came from a slow disk.

paceline lab --hosts 4 -- python examples/late_rank.py                 # four emulated hosts, 500 Mbit/s each (root)
torchrun --nproc-per-node 4 examples/late_rank.py --megabytes 16       # four processes on this machine

It trains the same model in three ways, and says what a step takes on top of the lateness:

- ``gloo``: DDP as everybody has it;
- ``hook``: the same process group, and ``paceline.hooks.straggler_hook``;
- ``paceline``: DDP on Paceline's own backend.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline

WIDTH = 1024


def batches(steps: int, late_s: float) -> Iterator[torch.Tensor]:
    """A data loader; that of the late rank takes its time."""
    for _ in range(steps):
        time.sleep(late_s)
        yield torch.randn(4, WIDTH)


def step_seconds(model: nn.Module, steps: int, late_s: float) -> list[float]:
    """Train, and time every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = []
    began_s = time.perf_counter()
    for inputs in batches(steps, late_s):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        now_s = time.perf_counter()
        seconds.append(now_s - began_s)
        began_s = now_s
    return seconds


def words(late_s: list[float]) -> str:
    """How late each rank was."""
    return ", ".join(f"rank {rank}: {1e3 * late:.0f} ms" for rank, late in enumerate(late_s))


def main() -> None:
    """Measure each way, and say who was late."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--ways", default="gloo,hook,paceline")
    arguments.add_argument("--megabytes", type=int, default=64, help="gradients of a step (64)")
    arguments.add_argument("--late-rank", type=int, default=-1, help="who is late (the last rank)")
    arguments.add_argument("--late-s", type=float, default=1.5, help="by how many seconds (1.5)")
    arguments.add_argument("--steps", type=int, default=16, help="of which the second half counts (16)")
    options = arguments.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    late_s = options.late_s if rank == options.late_rank % ranks else 0.0
    layers = max(options.megabytes * 10**6 // (4 * WIDTH * WIDTH), 1)
    for way in options.ways.split(","):
        torch.manual_seed(0)
        group = dist.new_group(backend="paceline" if way == "paceline" else "gloo")
        net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        model = DistributedDataParallel(net, process_group=group)
        state = paceline.hooks.StragglerState(group, every=max(options.steps // 4, 2))
        if way == "hook":
            model.register_comm_hook(state, paceline.hooks.straggler_hook)
        seconds = median(step_seconds(model, options.steps, late_s)[options.steps // 2 :])
        if rank == 0:
            exposed_s = seconds - options.late_s
            print(f"{way}: {seconds:.3f} s a step, {exposed_s:.3f} s after the late rank has its data", flush=True)
            if state.lateness_s:
                print(f"  late, by the hook: {words(state.lateness_s)}", flush=True)
            arrivals = getattr(paceline, "arrivals", None)
            if way == "paceline" and arrivals is not None and (seen := arrivals(group)):
                lateness = [median(one.late_s[other] for one in seen) for other in range(ranks)]
                print(f"  late, by the engine: {words(lateness)}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
