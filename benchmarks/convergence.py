"""Real training, nothing replayed: loss curves of DDP and of DataParallel in both modes, same seeds, in one picture.

    python benchmarks/convergence.py [--model both] [--ranks 2] [--steps 200] [--plot FILE] [--json FILE]

The CNN tells apart generated images: ten patterns under noise. The transformer continues generated sentences of a
language with ten words, in which the next word follows from the two before it. Each way starts from the same weights
and sees the same batches. *apart* is the largest difference of a weight from DDP's, over DDP's largest weight.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import cross_entropy

from paceline import DataParallel
from paceline.bench.results import Machine
from paceline.draw.canvas import check_picture_path, new_figure, save_figure

WAYS = ("ddp", "dear", "dear-sharded")
CLASSES = 10
BATCH = 16
WORDS = 16
TIMEOUT_S = 600.0

Batch = tuple[torch.Tensor, torch.Tensor]


class Cnn(nn.Sequential):
    """Two convolutions, ``more`` of the second one's width, two matrices."""

    def __init__(self, width: int = 8, more: int = 0) -> None:
        convolutions = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        for inputs in (width, *[2 * width] * more):
            convolutions += [nn.Conv2d(inputs, 2 * width, 3, padding=1), nn.ReLU()]
        head = (nn.Flatten(), nn.Linear(2 * width * 16, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        super().__init__(*convolutions, nn.MaxPool2d(2), *head)

    @staticmethod
    def batch(dice: torch.Generator, size: int = BATCH) -> Batch:
        """Noisy images of the classes' patterns."""
        patterns = torch.randn(CLASSES, 1, 16, 16, generator=torch.Generator().manual_seed(7))
        labels = torch.randint(0, CLASSES, (size,), generator=dice)
        return patterns[labels] + 1.5 * torch.randn(size, 1, 16, 16, generator=dice), labels


class Transformer(nn.Module):
    """Two layers of attention on sentences of a small language."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(CLASSES, width)
        self.positions = nn.Parameter(torch.randn(WORDS - 1, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, sentences: torch.Tensor) -> torch.Tensor:
        """A guess at the next word, at every place."""
        mask = nn.Transformer.generate_square_subsequent_mask(WORDS - 1)
        found = self.layers(self.words(sentences) + self.positions, mask=mask, is_causal=True)
        return torch.as_tensor(self.out(found)).transpose(1, 2)

    @staticmethod
    def batch(dice: torch.Generator, size: int = BATCH) -> Batch:
        """Sentences: a word is the sum of the two before it, modulo ten."""
        sentences = torch.randint(0, CLASSES, (size, WORDS), generator=dice)
        for place in range(2, WORDS):
            sentences[:, place] = (sentences[:, place - 1] + sentences[:, place - 2]) % CLASSES
        return sentences[:, :-1], sentences[:, 1:]


MODELS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "cnn": (Cnn, lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)),
    "transformer": (Transformer, lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)),
}


def train(model_name: str, way: str, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses (the mean over ranks) and final weights."""
    make, optimizer_of = MODELS[model_name]
    torch.manual_seed(0)
    inner = make()
    optimizer = optimizer_of(inner.parameters())
    if way == "ddp":
        model: nn.Module = nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.02)
    else:
        model = DataParallel(inner, optimizer, sharded=way == "dear-sharded", bucket_mb=0.02)
    dice = torch.Generator().manual_seed(1000 + dist.get_rank())
    losses = []
    for _ in range(steps):
        inputs, targets = make.batch(dice)
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    everyone = torch.stack(losses)
    dist.all_reduce(everyone)
    weights = [value.clone() for value in model.state_dict().values()]
    return (everyone / dist.get_world_size()).tolist(), weights


def run_rank(rank: int, ranks: int, port: int, models: list[str], steps: int, path: str) -> None:
    """Train all models in all ways; rank 0 writes down what came out."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("paceline", rank=rank, world_size=ranks)
    found: dict[str, dict[str, Any]] = {}
    for name in models:
        reference: list[torch.Tensor] = []
        for way in WAYS:
            losses, weights = train(name, way, steps)
            reference = reference or weights
            apart = max(float((one - other).abs().max()) for one, other in zip(weights, reference, strict=True))
            largest = max(float(one.abs().max()) for one in reference)
            found.setdefault(name, {})[way] = {"losses": losses, "apart": apart / largest}
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure(models: list[str], ranks: int, steps: int, path: Path) -> dict[str, Any]:
    """Start the ranks, wait for them, and read what they found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    started: Any = start_processes(run_rank, (ranks, port, models, steps, str(path)), nprocs=ranks, join=False)  # type: ignore[no-untyped-call]
    deadline_s = time.monotonic() + TIMEOUT_S
    while not started.join(1.0):
        if time.monotonic() > deadline_s:
            for process in started.processes:
                process.kill()
            raise TimeoutError(f"training did not end in {TIMEOUT_S:.0f} s")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def draw(found: dict[str, Any], path: Path) -> None:
    """A part of the picture for each model, a curve for each way."""
    figure = new_figure(6 * len(found), 4.2)
    styles = {"ddp": ("-", 3.5), "dear": ("--", 2.0), "dear-sharded": (":", 1.5)}
    for number, (name, ways) in enumerate(found.items(), 1):
        axes = figure.add_subplot(1, len(found), number)
        for way, values in ways.items():
            style, width = styles[way]
            axes.plot(values["losses"], style, lw=width, label=way)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss, mean over ranks")
        axes.legend(frameon=False)
    save_figure(figure, path)


def main() -> int:
    """Train, print a table, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS, "both"], default="both")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this host (default: 2)")
    parser.add_argument("--steps", type=int, default=200, help="default: 200")
    parser.add_argument("--plot", type=Path, default=Path("convergence.png"), help="default: convergence.png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save all losses")
    arguments = parser.parse_args()
    check_picture_path(arguments.plot)
    models = list(MODELS) if arguments.model == "both" else [arguments.model]
    machine = Machine.here()
    scratch = arguments.json or arguments.plot.with_suffix(".json")
    found = measure(models, arguments.ranks, arguments.steps, scratch)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("model", "way", "first loss", "last loss", "apart from DDP"):
        table.add_column(column, no_wrap=True)
    for name, ways in found.items():
        for way, values in ways.items():
            losses = values["losses"]
            table.add_row(name, way, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", f"{values['apart']:.2e}")
    out = Console(highlight=False)
    out.print(table)
    out.print(f"\n{arguments.ranks} ranks, {arguments.steps} steps, float32; {machine.date}: {machine.command}")
    draw(found, arguments.plot)
    out.print(f"drew {arguments.plot}, saved {scratch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
