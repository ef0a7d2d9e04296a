"""Iteration time of DDP training, the subject against Gloo: two ranks on one host, in one interleaved run.

    python benchmarks/ddp.py [--backend paceline] [--only TEXT] [--seconds 3] [--json FILE]

A small convolutional net with a head that can be made large, from communication that computation hides to
communication that nothing hides. *alone* is the same iteration without communication, in the same run; *exposed* is
what communication adds to it. Every case first checks that all ranks hold the same parameters after a step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from paceline.bench.contenders import Contender
from paceline.bench.crew import crews
from paceline.bench.figures import Ratio, Summary
from paceline.bench.measure import Effort, interleave
from paceline.bench.rank_process.loop import main as serve
from paceline.bench.rank_process.messages import Prepare, Ready, Setup
from paceline.bench.results import Machine
from paceline.bench.run import progress
from paceline.units import format_duration, format_size

ALONE = "BENCHMARK_ALONE"
"""Ranks with this variable do not communicate: the third contender."""


@dataclass(frozen=True)
class Case:
    """A net and how DDP cuts its gradients: channels, side of the images, batch, units of the head, bucket size."""

    name: str
    channels: int
    side: int
    batch: int
    head: int
    bucket_mb: float = 25.0

    @property
    def features(self) -> int:
        """What the convolutions hand to the head."""
        return self.channels * (self.side // 4) ** 2

    @property
    def gradient_bytes(self) -> int:
        """What all-reduce moves in an iteration."""
        convolutions = sum((inputs * 9 + 1) * self.channels for inputs in (3, *[self.channels] * 3))
        return 4 * (convolutions + (self.features + 1) * self.head + (self.head + 1) * 10)


CASES = [
    Case("hidden: much computation", channels=32, side=32, batch=16, head=64),
    Case("balanced", channels=32, side=32, batch=8, head=512),
    Case("shown: little computation", channels=16, side=32, batch=2, head=4096, bucket_mb=4.0),
    Case("shown: the same in one bucket", channels=16, side=32, batch=2, head=4096, bucket_mb=1000.0),
    Case("small messages: a bucket a layer", channels=16, side=16, batch=2, head=64, bucket_mb=0.001),
]


class TrainingRank:
    """One rank that trains: an iteration is forward, backward and a step."""

    def __init__(self, setup: Setup) -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group(setup.backend)
        self.torch: Any = torch
        self.dist = dist
        self.ready = Ready(dist.get_rank(), dist.get_world_size(), {"torch": str(torch.__version__)})
        self.barrier = dist.barrier
        self.model: Any = None

    def prepare(self, order: Prepare) -> int:
        """Build the net of a case, take a step, and count the parameters that differ from rank 0's."""
        nn, case = self.torch.nn, next(case for case in CASES if case.name == order.operation)
        self.torch.manual_seed(0)
        layers: list[Any] = []
        for inputs in (3, case.channels, case.channels, case.channels):
            layers += [nn.Conv2d(inputs, case.channels, 3, padding=1), nn.ReLU()]
        layers += [
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(case.features, case.head),
            nn.ReLU(),
            nn.Linear(case.head, 10),
        ]
        net = nn.Sequential(*layers)
        self.model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=case.bucket_mb)
        self.optimizer = self.torch.optim.SGD(net.parameters(), lr=0.01)
        self.torch.manual_seed(1 + self.ready.rank)
        self.images = self.torch.randn(case.batch, 3, case.side, case.side)
        self.labels = self.torch.randint(0, 10, (case.batch,))
        self.alone = False
        for _ in range(3):  # DDP orders its buckets anew after the first iteration
            self.run()
        self.alone = ALONE in os.environ
        wrong = 0
        for parameter in net.parameters():
            first = parameter.detach().clone()
            self.dist.broadcast(first, 0)
            wrong += int((first != parameter).sum())
        return wrong

    def run(self) -> None:
        """One iteration."""
        self.optimizer.zero_grad()
        with self.model.no_sync() if self.alone else contextlib.nullcontext():
            self.torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()

    def close(self) -> None:
        """Leave the group."""
        self.model = None  # its hooks must not outlive the group
        self.dist.destroy_process_group()


class Result(msgspec.Struct, frozen=True):
    """One case: times of both, of the computation alone, and theirs over ours."""

    case: str
    gradient_bytes: int
    ours: Summary
    theirs: Summary
    alone: Summary
    ratio: Ratio
    wrong: int


def measure(cases: list[Case], backend: str, effort: Effort) -> list[Result]:
    """Run the cases, the contenders in turns."""
    results = []
    contenders = [Contender(backend), Contender("gloo"), Contender(backend, {ALONE: "1"})]
    with progress(Console(stderr=True)) as seen, crews(contenders, 2, program=Path(__file__).resolve()) as started:
        for case in cases:
            ours, theirs, alone = interleave(started, Prepare(case.name, 0, "float32"), effort, seen)
            ratio = theirs.over(ours)
            wrong = ours.wrong + theirs.wrong + alone.wrong
            times = (ours.summary(), theirs.summary(), alone.summary())
            results.append(Result(case.name, case.gradient_bytes, *times, ratio, wrong))
    return results


def table(results: list[Result], backend: str) -> Table:
    """One line a case."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    found.add_column("case")
    found.add_column("gradients", justify="right", no_wrap=True)
    for name in (
        backend,
        "25-75%",
        "gloo",
        "25-75%",
        "alone",
        "exposed",
        "gloo's",
        f"gloo / {backend} (rounds)",
        "#wrong",
    ):
        found.add_column(name, justify="right", no_wrap=True)
    for one in results:
        exposed = [format_duration(max(time.median_s - one.alone.median_s, 0.0)) for time in (one.ours, one.theirs)]
        ratio = f"{one.ratio.of_medians:.2f}x ({one.ratio.least:.2f}-{one.ratio.most:.2f})"
        alone = format_duration(one.alone.median_s)
        size = format_size(one.gradient_bytes)
        found.add_row(one.case, size, *_times(one.ours), *_times(one.theirs), alone, *exposed, ratio, str(one.wrong))
    return found


def _times(time: Summary) -> list[str]:
    spread = f"{format_duration(time.lower_quartile_s)} - {format_duration(time.upper_quartile_s)}"
    return [format_duration(time.median_s), spread]


def main() -> int:
    """Measure the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this text, like 'shown'")
    parser.add_argument("--backend", default="paceline", help="the subject (default: paceline)")
    parser.add_argument("--seconds", type=float, default=3.0, help="for a contender and case (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="how often contenders take turns (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the figures")
    arguments = parser.parse_args()
    machine = Machine.here()
    cases = [case for case in CASES if arguments.only in case.name]
    if not cases:
        parser.error(f"no case has {arguments.only!r} in its name; there are: " + "; ".join(one.name for one in CASES))
    results = measure(cases, arguments.backend, Effort(arguments.seconds, None, arguments.rounds))
    out = Console(highlight=False, width=max(Console().width, 180))
    out.print(table(results, arguments.backend))
    out.print(
        f"\n2 ranks, {machine.cores} cores ({machine.processor}), Linux {machine.kernel}, Python {machine.python}"
    )
    out.print(f"{machine.date}: {machine.command}")
    if arguments.json:
        saved = {"machine": machine, "backend": arguments.backend, "results": results}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(saved)) + b"\n")
    return int(any(one.wrong for one in results))


if __name__ == "__main__":
    if len(sys.argv) == 3 and Path(sys.argv[1]).is_socket():
        serve(sys.argv[1:], TrainingRank)
    else:
        sys.exit(main())
