"""FSDP2 on Paceline, for hosts that send more slowly than they receive: weights are gathered by multicast.

torchrun --nproc-per-node 2 examples/fsdp_multicast.py

Eight emulated hosts with 100 Mbit/s up and 500 down (root), with multicast, without it, and on Gloo:

export PACELINE_ALGORITHM=allgather:multicast
paceline lab --scenario uplink8 -- python examples/fsdp_multicast.py
PACELINE_MULTICAST=off paceline lab --scenario uplink8 -- python examples/fsdp_multicast.py
paceline lab --scenario uplink8 -- python examples/fsdp_multicast.py --backend gloo

A rank keeps 1/n of the weights. A step gathers the weights of each layer twice, for the forward and the backward pass,
and reduce-scatters its gradients. So two thirds of the traffic are all-gathers. With multicast a rank sends its part of
the weights once, not n - 1 times. Where there is no multicast, the same script runs without it.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WARM_UP_STEPS = 2  # before the clock runs: connections are opened and algorithms chosen


class Reader(nn.Module):
    """A small transformer that says whether the first symbol of a sequence comes again."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.answer = nn.Linear(width, 2)

    def forward(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return the scores of no and yes."""
        hidden = self.symbols(sequences)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.answer(hidden[:, 0])  # type: ignore[no-any-return]


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences of which half have their first symbol again somewhere, and which do."""
    labels = torch.randint(2, (size,))
    sequences = torch.randint(1, 64, (size, 12))
    sequences[:, 0] = torch.where(labels == 1, sequences[:, 7], 0)
    return sequences, labels


def main() -> None:
    """Train, and say how long a step took and which algorithms ran."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="paceline", help="of the process group (paceline)")
    arguments.add_argument("--steps", type=int, default=10, help="that are timed (10)")
    arguments.add_argument("--width", type=int, default=384, help="of the hidden layers (384)")
    arguments.add_argument("--depth", type=int, default=4, help="how many layers (4)")
    options = arguments.parse_args()

    dist.init_process_group(options.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Reader(options.width, options.depth)
    megabytes = sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 1e6
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    torch.manual_seed(1 + rank)  # every rank sees other sequences
    losses = []
    for step in range(WARM_UP_STEPS + options.steps):
        if step == WARM_UP_STEPS:
            dist.barrier()
            began_s = time.perf_counter()
        sequences, labels = make_batch(16)
        loss = nn.functional.cross_entropy(model(sequences), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    dist.barrier()
    step_ms = (time.perf_counter() - began_s) / options.steps * 1e3

    mean = torch.stack(losses)
    dist.all_reduce(mean)
    mean /= ranks
    if rank == 0:
        print(f"{options.backend}, {ranks} ranks, {megabytes:.1f} MB of weights: {step_ms:.1f} ms a step")
        print(f"loss: {mean[0].item():.4f} at first, {mean[-3:].mean().item():.4f} in the last three steps")
        if options.backend == "paceline":
            from paceline.backend import chosen_algorithms

            print("algorithms: " + "; ".join(chosen_algorithms()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
