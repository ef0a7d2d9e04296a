"""Real training where nobody is late: DataParallel against DDP on Gloo and on Paceline, by the clock and the processor.

    python benchmarks/training.py [--only TEXT] [--rounds 5] [--steps 6] [--json FILE]

The CNN and the transformer of benchmarks/convergence.py, made wider, on two ranks of one host and on the four hosts of
the lab's lan4 (the lab needs root: docs/lab.md). A rank has one thread for its arithmetic. *A step* is zero_grad,
forward, backward and the optimizer's step, by the clock; *processor time* is that of all threads of all ranks.

Every strategy trains in the same processes. All take turns, for some rounds: two steps that are not timed, then
``--steps`` that are, until the last gather of DataParallel is done. A figure is the median of the rounds, with the
least and the most. *Over DataParallel* is the strategy's figure over DataParallel's; more than 1 means that
DataParallel needs less. DDP runs at its default, and with several bucket sizes (``gradient_as_bucket_view=True``), of
which the table has the fastest. DataParallel runs at its defaults; it has found out what to all-reduce early before the
first round.

Every strategy starts from the same weights and sees the same batches. After six steps, before each turn and at the end
its weights are compared with those of DDP on Gloo, and between ranks. Exits with 1 if one is *wrong*.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from convergence import Batch, Cnn, Transformer
from rich.console import Console
from torch import nn
from torch.nn.functional import cross_entropy

from paceline import DataParallel
from paceline.bench.contenders import Contender
from paceline.bench.crew import Crew, crews
from paceline.bench.rank_process.loop import main as serve
from paceline.bench.rank_process.messages import Block, Prepare, Prepared, Ready, Setup, Timed
from paceline.bench.results import ONE_HOST, Machine
from paceline.bench.run import progress
from paceline.bench.training.strategies import CHECKED_STEPS, SETTLING_ITERATIONS
from paceline.lab import Lab, unavailable
from paceline.units import format_duration, format_size

WARM_UP_STEPS = 2
GRID_MB = (0.5, 1.0, 2.0, 25.0)  # the last is one bucket for all: larger ones would be the same
MAX_NORM = 0.1
NUM_BATCHES = 16
BETWEEN_ORDERS, BETWEEN_ORDERS_LATER = 1e-6, 1e-4
"""How far weights may be from DDP's where numbers are added in another order: after six steps, and after a hundred."""

ALONE, DDP, DATA_PARALLEL = "computation alone", "DDP", "DataParallel"


@dataclass(frozen=True)
class Model:
    """A model of benchmarks/convergence.py at a size where a step takes tens of milliseconds."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


WIDER = {
    "CNN": Model(
        lambda: Cnn(80, more=3),
        Cnn.batch,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    ),
    "transformer": Model(
        lambda: Transformer(256),
        lambda dice: Transformer.batch(dice, 24),
        # Where a gradient is nothing but rounding, as that of a key's bias, a small epsilon would make steps of it.
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-5, eps=1e-4),
    ),
}


@dataclass(frozen=True)
class Place:
    """Where ranks run."""

    name: str
    num_ranks: int
    lab: str | None = None


PLACES = [Place(f"{ONE_HOST}, 2 ranks", 2), Place("lan4, 4 ranks", 4, "lan4")]


@dataclass(frozen=True)
class Strategy:
    """A way to train. ``clip`` is whose clip_grad_norm_ is called before step(): nobody's, torch's or the model's."""

    wrapper: str
    backend: str
    bucket_mb: float | None = None
    clip: str = ""

    @property
    def name(self) -> str:
        """As in the table: ``DDP on Gloo, buckets of 5 MB``."""
        where = f" on {self.backend.capitalize()}" if self.wrapper == DDP else ""
        buckets = f", buckets of {self.bucket_mb:g} MB" if self.bucket_mb else ""
        clipped = {"": "", "torch": ", torch's clip_grad_norm_", "model": ", model.clip_grad_norm_"}[self.clip]
        return f"{self.wrapper}{where}{buckets}{clipped}"

    @property
    def learns(self) -> bool:
        """Whether its weights are those of a training on all ranks."""
        return self.wrapper != ALONE

    def wrap(self, net: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> nn.Module:
        """The net as it is trained."""
        if self.wrapper == ALONE:
            return net
        if self.wrapper == DATA_PARALLEL:
            return DataParallel(net, optimizer, group)
        if self.bucket_mb is None:
            return nn.parallel.DistributedDataParallel(net, process_group=group)
        return nn.parallel.DistributedDataParallel(
            net, process_group=group, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True
        )


STRATEGIES = {
    strategy.name: strategy
    for strategy in [
        *(Strategy(DDP, backend, bucket_mb) for backend in ("gloo", "paceline") for bucket_mb in (None, *GRID_MB)),
        Strategy(DATA_PARALLEL, "paceline"),
        Strategy(ALONE, "gloo"),
        Strategy(DDP, "gloo", clip="torch"),
        Strategy(DDP, "paceline", clip="torch"),
        Strategy(DATA_PARALLEL, "paceline", clip="model"),
        Strategy(DATA_PARALLEL, "paceline", clip="torch"),
    ]
}
"""In this order, so that DDP on Gloo is the first, with clipping and without: the others are compared with it."""


class Training:
    """One strategy's model, optimizer and place in its data."""

    def __init__(self, model: Model, strategy: Strategy, rank: int, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        net = model.make()
        self.strategy = strategy
        self.optimizer = model.optimizer(net.parameters())
        self.model = strategy.wrap(net, self.optimizer, group)
        dice = torch.Generator().manual_seed(1000 + rank)
        self.batches = [model.batch(dice) for _ in range(NUM_BATCHES)]
        self.taken = 0

    def take(self, steps: int) -> None:
        """Train, until nothing of it is under way."""
        for _ in range(steps):
            inputs, targets = self.batches[self.taken % NUM_BATCHES]
            self.taken += 1
            self.optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(self.model(inputs), targets))
            if self.strategy.clip == "model":
                assert isinstance(self.model, DataParallel)
                self.model.clip_grad_norm_(MAX_NORM)
            elif self.strategy.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()
        if isinstance(self.model, DataParallel):
            self.model.synchronize()

    def weights(self) -> torch.Tensor:
        """All of them, one after the other."""
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def close(self) -> None:
        """Leave what was made for it."""
        if isinstance(self.model, DataParallel):
            self.model.close()


class TrainingRank:
    """A rank that has a model for each strategy, and trains the one whose turn it is."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(setup.backend)
        world = dist.group.WORLD
        assert world is not None
        self.groups = {"gloo": world, "paceline": dist.new_group(backend="paceline")}
        self.ready = Ready(dist.get_rank(), dist.get_world_size(), {"torch": str(torch.__version__)})
        self.barrier = dist.barrier
        self.model = ""
        self.trainings: dict[str, Training] = {}
        self.references: dict[bool, torch.Tensor] = {}

    def prepare(self, order: Prepare) -> int:
        """Make the turn of a model and a strategy ready, ``count`` steps long; returns how many weights are wrong."""
        model, _, name = order.operation.partition(": ")
        if model != self.model:
            self.leave()
            self.model = model
        if name not in self.trainings:
            strategy = STRATEGIES[name]
            group = self.groups[strategy.backend]
            self.trainings[name] = Training(WIDER[model], strategy, self.ready.rank, group)
            self.trainings[name].take(CHECKED_STEPS)
            wrong = self.wrong_weights(self.trainings[name], BETWEEN_ORDERS)
            self.trainings[name].take(SETTLING_ITERATIONS)
            return wrong
        self.turn, self.steps = self.trainings[name], order.count
        wrong = self.wrong_weights(self.turn, BETWEEN_ORDERS_LATER)
        if order.count:
            self.turn.take(WARM_UP_STEPS)
        return wrong

    def wrong_weights(self, training: Training, between_orders: float) -> int:
        """How many are not those of DDP on Gloo after as many steps, or not those of rank 0."""
        if not training.strategy.learns:
            return 0
        mine, clipped = training.weights(), bool(training.strategy.clip)
        if training.strategy.name == next(name for name, one in STRATEGIES.items() if bool(one.clip) == clipped):
            self.references[clipped] = mine
        first = mine.clone()
        dist.broadcast(first, 0)
        one_order = self.ready.num_ranks == 2 and not clipped  # a norm is added in another order
        near = (mine - self.references[clipped]).abs() <= (0.0 if one_order else between_orders)
        return int((~near | (mine != first)).sum())  # what is not a number is near nothing

    def run(self) -> None:
        """A turn."""
        self.turn.take(self.steps)

    def leave(self) -> None:
        """Drop all models; their hooks must not outlive the groups."""
        for training in self.trainings.values():
            training.close()
        self.trainings, self.references = {}, {}

    def close(self) -> None:
        """Leave the groups."""
        self.leave()
        del self.turn
        dist.destroy_process_group()


class Result(msgspec.Struct, frozen=True):
    """Seconds a step of one strategy in one case, of each round: by the clock, and of the processors for all ranks."""

    place: str
    model: str
    gradient_bytes: int
    strategy: str
    step_s: list[float]
    processor_s: list[float]
    wrong: int


def measure(
    place: Place, model: str, crew: Crew, rounds: int, steps: int, seen: Callable[[str, float], None]
) -> list[Result]:
    """One model at one place: all strategies in turns."""
    step_s: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    processor_s: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    wrong = dict.fromkeys(STRATEGIES, 0)

    def ready(name: str, num_steps: int) -> None:
        prepared = crew.ask(Prepare(f"{model}: {name}", num_steps, "float32"), Prepared, f"{model}: {name}")
        wrong[name] = max(wrong[name], *(one.wrong for one in prepared))

    for turn in range(rounds + 2):  # one to settle, and one to compare the weights at the end
        for index, name in enumerate(STRATEGIES):
            seen(f"{place.name}, {model}: {name}", (turn + index / len(STRATEGIES)) / (rounds + 2))
            measured = 0 < turn <= rounds
            ready(name, steps if measured else 0)
            if measured:
                timed = crew.ask(Block(0, 1), Timed, f"{model}: {name}")
                step_s[name].append(max(one.loop_ns for one in timed) * 1e-9 / steps)
                processor_s[name].append(sum(one.processor_ns for one in timed) * 1e-9 / steps)
    gradient_bytes = 4 * sum(parameter.numel() for parameter in WIDER[model].make().parameters())
    return [
        Result(place.name, model, gradient_bytes, name, step_s[name], processor_s[name], wrong[name])
        for name in STRATEGIES
    ]


def table(results: list[Result]) -> list[str]:
    """The lines of one case: each backend's fastest bucket size stands for all that were tried."""
    shown = []
    for one in results:
        strategy = STRATEGIES[one.strategy]
        tried = [
            other
            for other in results
            if STRATEGIES[other.strategy].bucket_mb and STRATEGIES[other.strategy].backend == strategy.backend
        ]
        if one not in tried or one is min(tried, key=lambda other: median(other.step_s)):
            shown.append(one)
    lines = []
    for one in shown:
        subject = next(other for other in results if _is_subject(other) and _clips(other) == _clips(one))
        cells = [f"{one.place}, {one.model}", format_size(one.gradient_bytes), one.strategy]
        for ours, theirs in ((one.step_s, subject.step_s), (one.processor_s, subject.processor_s)):
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            cells.append(
                f"{format_duration(median(ours))} ({format_duration(min(ours))} - {format_duration(max(ours))})"
            )
            over = f"{median(ours) / median(theirs):.2f}x ({min(ratios):.2f} - {max(ratios):.2f})"
            cells.append("" if one is subject else over)
        lines.append(f"| {' | '.join(cells)} | {one.wrong} |")
    return lines


def _is_subject(result: Result) -> bool:
    return STRATEGIES[result.strategy].wrapper == DATA_PARALLEL


def _clips(result: Result) -> bool:
    return bool(STRATEGIES[result.strategy].clip)


COLUMNS = (
    "case",
    "gradients",
    "strategy",
    "a step",
    "over DataParallel",
    "processor time",
    "over DataParallel",
    "wrong",
)
HEADER = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]


def main() -> int:
    """Measure the cases asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this text, like 'lan4' or 'CNN'")
    parser.add_argument("--rounds", type=int, default=5, help="how often strategies take turns (default: 5)")
    parser.add_argument("--steps", type=int, default=6, help="timed in a turn (default: 6)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the figures of all rounds and bucket sizes")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps are at least 1")
    asked = {place: [name for name in WIDER if arguments.only in f"{place.name}, {name}"] for place in PLACES}
    if not any(asked.values()):
        names = "; ".join(f"{place.name}, {name}" for place in PLACES for name in WIDER)
        parser.error(f"no case has {arguments.only!r} in its name; there are: {names}")
    machine = Machine.here()
    results: list[Result] = []
    for place, models in asked.items():
        if not models:
            continue
        if place.lab and (reason := unavailable()):
            print(f"left out: {place.name}: {reason}")
            continue
        with ExitStack() as stack:
            lab = stack.enter_context(Lab.preset(place.lab)) if place.lab else None
            seen = stack.enter_context(progress(Console(stderr=True)))
            contender = Contender("training", backend="gloo")
            (crew,) = stack.enter_context(
                crews([contender], place.num_ranks, program=Path(__file__).resolve(), lab=lab)
            )
            for model in models:
                case = measure(place, model, crew, arguments.rounds, arguments.steps, seen)
                print("\n".join([*([] if results else HEADER), *table(case)]), flush=True)
                results += case
    print(f"\n{machine.cores} cores ({machine.processor}), Linux {machine.kernel}, Python {machine.python}")
    print(f"{machine.date}: {machine.command}")
    if arguments.json:
        saved = {"machine": machine, "results": results}
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(saved)) + b"\n")
    return int(not results or any(one.wrong for one in results))


if __name__ == "__main__":
    if len(sys.argv) == 3 and Path(sys.argv[1]).is_socket():
        serve(sys.argv[1:], TrainingRank)
    else:
        sys.exit(main())
