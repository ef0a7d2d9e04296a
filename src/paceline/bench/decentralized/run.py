"""The controller: starts the ranks, gives them one job after another, watches their losses, and ends each in time."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paceline.bench.contenders import Contender
from paceline.bench.crew import Crew, crews
from paceline.bench.decentralized.board import Board, Curve
from paceline.bench.decentralized.cases import (
    DDP,
    Buckets,
    Contestant,
    Job,
    Scenario,
    Trained,
    bucket_grid,
    num_parameters,
)
from paceline.bench.decentralized.mean import MeanWatch
from paceline.bench.decentralized.results import DecentralizedResults, Setting, Training
from paceline.bench.rank_process.messages import Perform, Performed
from paceline.bench.results import ONE_HOST, Machine
from paceline.bench.training.scaling import lab_s_per_byte
from paceline.errors import ContenderError, UsageError
from paceline.ir.cluster import Cluster

if TYPE_CHECKING:
    from paceline.lab import Lab

PROGRAM = Path(__file__).with_name("rank_program.py")
WIDTH = 313
"""Of the model's layers: on lan8, at its own rates, an all-reduce takes 1.2 times the usual 60 ms."""

WARMUP_STEPS = 5
_AHEAD_STEPS = 4  # workers that keep in step begin and end so many steps after the furthest of them
_POLL_S = 0.1
_FIRST_PORT = 29600
_CURVE_POINTS = 250
_PATIENCE = 1.5  # training ends after so many times the time to the target, if only one loss has reached it
_ALIKE = 1e-4  # of checksums: sums of a million numbers

Seen = Callable[[str, float], None]


@dataclass(frozen=True)
class Plan:
    """A whole run, as asked for."""

    contestants: list[Contestant]
    scenarios: list[Scenario]
    seeds: int
    cluster: Cluster
    in_lab: bool
    compute_s: float = 0.06
    communication: float = 1.2
    stretch: float = 1.0
    jitter: float = 0.05
    batch: int = 32
    learning_rate: float = 0.02
    lr_warmup: int = 20
    momentum: float = 0.9
    target: float = 0.29
    window: int = 160
    steps: int | None = None
    give_up_s: float = 180.0
    timeout_s: float = 60.0
    width: int = WIDTH

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        numbers = {
            "--seeds": self.seeds, "--compute": self.compute_s, "--communication": self.communication,
            "--stretch": self.stretch, "--batch": self.batch, "--lr": self.learning_rate, "--target": self.target,
            "--window": self.window, "--give-up": self.give_up_s, "--width": self.width,
        }  # fmt: skip
        for option, value in numbers.items():
            if not value > 0:
                raise UsageError(f"{option} must be more than 0, not {value}")
        if self.lr_warmup < 0:
            raise UsageError(f"--lr-warmup must be 0 or more, not {self.lr_warmup}")
        for scenario in self.scenarios:
            if scenario.links and not self.in_lab:
                raise UsageError("--slow-links needs a lab, whose links it slows: add --lab lan8")
            scenario.compute_factors(self.num_workers)
            scenario.link_factors(len(self.cluster.hosts))

    @property
    def num_workers(self) -> int:
        """How many workers train."""
        return self.cluster.num_ranks

    @property
    def stretched_s(self) -> float:
        """What a step computes, by the clock."""
        return self.compute_s * self.stretch

    def emulated(self) -> Cluster:
        """Return the cluster with link rates at which an all-reduce takes its share of a step's computation."""
        own_s = 4 * num_parameters(self.width) * lab_s_per_byte(self.cluster)
        factor = own_s / (self.communication * self.stretched_s)
        hosts = tuple(
            replace(
                host,
                up_bytes_per_s=host.up_bytes_per_s * factor,
                down_bytes_per_s=host.down_bytes_per_s * factor,
            )
            for host in self.cluster.hosts
        )
        return replace(self.cluster, hosts=hosts)

    def setting(self) -> Setting:
        """Return the run in the form it is saved in."""
        parameters = num_parameters(self.width)
        links = self.emulated().hosts[0] if self.in_lab else None
        return Setting(
            place=self.cluster.name if self.in_lab else ONE_HOST,
            num_workers=self.num_workers,
            parameters=parameters,
            vector_bytes=4 * parameters,
            compute_s=self.stretched_s,
            jitter=self.jitter,
            all_reduce_s=self.communication * self.stretched_s if links else None,
            up_bytes_per_s=links.up_bytes_per_s if links else None,
            stretch=self.stretch,
            batch=self.batch,
            learning_rate=self.learning_rate,
            lr_warmup=self.lr_warmup,
            momentum=self.momentum,
            target=self.target,
            window=self.window,
            seeds=self.seeds,
            steps=self.steps,
            give_up_s=self.give_up_s,
        )

    def job(self, contestant: Contestant, scenario: Scenario, seed: int, folder: Path, port: int) -> Job:
        """Return what the ranks are told."""
        return Job(
            scheme=contestant.scheme,
            backend=contestant.backend,
            options=contestant.options,
            seed=seed,
            width=self.width,
            compute_s=self.stretched_s,
            compute_factors=scenario.compute_factors(self.num_workers),
            jitter=self.jitter,
            batch=self.batch,
            learning_rate=contestant.learning_rate or self.learning_rate,
            lr_warmup=self.lr_warmup,
            momentum=self.momentum,
            own_pace=contestant.own_pace,
            folder=str(folder),
            port=port,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True)
class _Task:
    """One training to do."""

    contestant: Contestant
    scenario: Scenario
    seed: int

    @property
    def words(self) -> str:
        return f"{self.contestant.name}, {self.scenario.name}, seed {self.seed}"


def run(plan: Plan, lab: Lab | None, seen: Seen) -> DecentralizedResults:
    """Do all trainings: scenario by scenario and seed by seed, the schemes one after another."""
    machine = Machine.here()
    tasks = [
        _Task(contestant, scenario, seed)
        for scenario in plan.scenarios
        for seed in range(plan.seeds)
        for contestant in plan.contestants
    ]
    trainings: list[Training] = []
    controller = _Controller(plan, lab, seen)
    while len(trainings) < len(tasks):
        begun = False
        try:
            seen(f"starting {plan.num_workers} ranks", len(trainings) / len(tasks))
            contender = Contender("ranks")
            with crews([contender], plan.num_workers, program=PROGRAM, lab=lab, timeout_s=plan.timeout_s) as (crew,):
                for task in tasks[len(trainings) :]:
                    begun = True
                    crew.contender = Contender(task.words)
                    trainings.append(controller.train(crew, task, len(trainings) / len(tasks), 1 / len(tasks)))
        except ContenderError as error:
            if not begun or len(trainings) == len(tasks):
                raise
            task = tasks[len(trainings)]
            trainings.append(Training(task.contestant.name, task.scenario.name, task.seed, failed=str(error)))
    return DecentralizedResults(
        setting=plan.setting(),
        schemes=[one.name for one in plan.contestants],
        scenarios=[one.name for one in plan.scenarios],
        machine=machine,
        slow={one.name: _slowness(one, plan) for one in plan.scenarios},
        probes=controller.probes,
        trainings=trainings,
    )


def _slowness(scenario: Scenario, plan: Plan) -> list[float]:
    """Return how much slower each worker is, by its computation or by its link."""
    links = scenario.link_factors(len(plan.cluster.hosts))
    compute = scenario.compute_factors(plan.num_workers)
    return [own * links[host] for own, host in zip(compute, plan.cluster.host_of, strict=True)]


class _Controller:
    """Gives jobs, and watches them."""

    def __init__(self, plan: Plan, lab: Lab | None, seen: Seen) -> None:
        self.plan, self.lab, self.seen = plan, lab, seen
        self.probes: dict[str, dict[str, float]] = {}
        self._best: dict[tuple[str, str], Buckets] = {}
        self._ports = count(_FIRST_PORT)

    def train(self, crew: Crew, task: _Task, share: float, width: float) -> Training:
        """Have the ranks do one training."""
        with tempfile.TemporaryDirectory(prefix="paceline-") as name, self._links(task.scenario):
            folder = Path(name)
            job = self.plan.job(task.contestant, task.scenario, task.seed, folder, self._port())
            if task.contestant.scheme in DDP:
                job = msgspec.structs.replace(job, buckets=self._best_buckets(crew, task, job, share))
                job = msgspec.structs.replace(job, port=self._port())
            board = Board(folder / "board", self.plan.num_workers, create=True)
            watch = _Watch(
                self.plan,
                task,
                folder,
                board,
                lambda done, words: self.seen(f"{task.words}: {words}", share + width * done),
            )
            with watch.watching():
                reports = _ask(crew, job, self.plan.give_up_s)
            weights = np.stack([np.load(folder / f"weights{rank}.npy") for rank in range(self.plan.num_workers)])
        return _training(self.plan, task, job, watch, reports, weights)

    def _best_buckets(self, crew: Crew, task: _Task, job: Job, share: float) -> Buckets:
        """Return the bucket size with which DDP is fastest; probed once for each backend and kind of links."""
        key = (task.contestant.scheme, task.scenario.name if task.scenario.links else "")
        if key not in self._best:
            self.seen(f"{task.words}: tries bucket sizes", share)
            grid = bucket_grid(4 * num_parameters(job.width))
            fast = [1.0] * self.plan.num_workers
            reports = _ask(crew, msgspec.structs.replace(job, probe=grid, compute_factors=fast), self.plan.give_up_s)
            times = [max(report.probed_s[place] for report in reports) for place in range(len(grid))]
            self.probes[" ".join(filter(None, key))] = {one.of: took for one, took in zip(grid, times, strict=True)}
            self._best[key] = grid[times.index(min(times))]
        return self._best[key]

    def _port(self) -> int:
        """Return a port that no job before has used; on one host, one that is free."""
        if self.lab is not None:
            return next(self._ports)
        from paceline.bench.contenders import free_port

        return free_port(0, None)

    @contextlib.contextmanager
    def _links(self, scenario: Scenario) -> Iterator[None]:
        """Slow the links of a scenario."""
        if self.lab is None or scenario.links is None:
            yield
            return
        before = self.lab.cluster.hosts
        factors = scenario.link_factors(len(before))
        try:
            for number, (host, factor) in enumerate(zip(before, factors, strict=True)):
                if factor != 1.0:
                    self.lab.set_rate(number, up=host.up_bytes_per_s / factor, down=host.down_bytes_per_s / factor)
            yield
        finally:
            for number, host in enumerate(before):
                if factors[number] != 1.0:
                    self.lab.set_rate(number, up=host.up_bytes_per_s, down=host.down_bytes_per_s)


def _ask(crew: Crew, job: Job, expected_s: float) -> list[Trained]:
    order = Perform(msgspec.json.encode(job).decode())
    answers = crew.ask(order, Performed, "training", expected_s=expected_s)
    return [msgspec.json.decode(answer.result, type=Trained) for answer in answers]


class _Watch:
    """Sees a training from outside: starts its clock, ends it, and notes how busy the cores were."""

    def __init__(self, plan: Plan, task: _Task, folder: Path, board: Board, seen: Callable[[float, str], None]) -> None:
        self.plan, self.task, self.board, self.seen = plan, task, board, seen
        from paceline.bench.decentralized.task import held_out_loss  # with torch, which other verbs do not need

        self.mean = MeanWatch(folder, plan.num_workers, plan.target, held_out_loss(plan.width))
        self.busy = 0.0
        self._over = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch beside what follows."""
        thread = threading.Thread(target=self._watch, name="paceline-bench-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        board, plan, own_pace = self.board, self.plan, self.task.contestant.own_pace
        while min(board.warm) < WARMUP_STEPS:
            if self._over.wait(_POLL_S):
                return
        board.go = max(board.warm) + _AHEAD_STEPS
        if plan.steps and not own_pace:
            board.stop = board.go + plan.steps
        began_s, processor = time.monotonic(), _processor_times()
        while not self._over.wait(_POLL_S):
            self.mean.look()
            curve = Curve.of(board.losses(), plan.window)
            steps = board.steps
            done, words = self._progress(curve, steps)
            if done >= 1 or time.monotonic() - began_s > plan.give_up_s or self._diverged(curve):
                if not board.stop:
                    board.stop = board.go + max(steps) + _AHEAD_STEPS
                break
            self.seen(done, words)
        busy, total = (after - before for after, before in zip(_processor_times(), processor, strict=True))
        self.busy = busy / total if total else 0.0

    def _progress(self, curve: Curve, steps: list[int]) -> tuple[float, str]:
        """Return the share of the training that is done, and the loss in words."""
        if not len(curve.losses):
            return 0.0, "warm"
        first, last, target = float(curve.losses[0]), float(curve.losses[-1]), self.plan.target
        words = f"loss {last:.3f} after {max(steps)} steps"
        if self.plan.steps is not None:
            return sum(steps) / (self.plan.steps * self.plan.num_workers), words
        own_s, mean_s = curve.reached(target), self.mean.reached_s
        reached = [time_s for time_s in (own_s, mean_s) if time_s is not None]
        known_s = min(curve.times_s[-1], self.mean.known_s)
        if len(reached) == 2 or (reached and known_s > _PATIENCE * min(reached)):
            return 1.0, words
        return min(0.99, max(0.0, (first - last) / (first - target))) if first > target else 0.0, words

    def _diverged(self, curve: Curve) -> bool:
        return bool(len(curve.losses)) and not np.isfinite(curve.losses[-1])


def _training(
    plan: Plan, task: _Task, job: Job, watch: _Watch, reports: list[Trained], weights: np.ndarray
) -> Training:
    """Put together what the ranks and the board say."""
    curve = Curve.of(watch.board.losses(), plan.window)
    mean = weights.mean(axis=0, dtype=np.float64)
    consensus = float(np.sqrt(np.mean([np.sum((one - mean) ** 2) for one in weights])))
    later_s = watch.board.go_s - watch.board.began_s
    target_s = None if watch.mean.reached_s is None else later_s + watch.mean.reached_s
    groups: dict[int, int] = {}
    for report in reports:
        for size, number in report.groups.items():
            groups[size] = groups.get(size, 0) + number
    checksums = [report.checksum for report in reports if report.checksum is not None]
    apart = bool(checksums) and max(checksums) - min(checksums) > _ALIKE * max(1.0, abs(checksums[0]))
    return Training(
        scheme=task.contestant.name,
        scenario=task.scenario.name,
        seed=task.seed,
        target_s=target_s,
        samples=None if target_s is None else plan.batch * watch.board.batches_until(watch.board.began_s + target_s),
        own_target_s=curve.reached(plan.target),
        elapsed_s=max(report.elapsed_s for report in reports),
        steps=[report.steps for report in reports],
        steps_per_s=[report.steps / report.elapsed_s for report in reports],
        outside_s=[report.outside_s for report in reports],
        wait_s=[report.wait_s for report in reports if report.wait_s is not None],
        finish_s=max(report.finish_s for report in reports),
        sent_bytes=[report.sent_bytes for report in reports if report.sent_bytes is not None],
        groups=groups,
        failed_groups=sum(report.failed_groups for report in reports),
        consensus=consensus if np.isfinite(consensus) else None,
        consensus_share=consensus / float(np.linalg.norm(mean)) if np.isfinite(consensus) else None,
        loss=reports[0].loss,
        accuracy=reports[0].accuracy,
        busy=watch.busy,
        processor_s=sum(report.processor_s for report in reports),
        weights_differ=apart and task.contestant.scheme != "alone",
        learning_rate=job.learning_rate,
        buckets=job.buckets.of if job.buckets else "",
        mean_curve=[(round(later_s + time_s, 3), round(loss, 4)) for time_s, loss in watch.mean.curve],
        own_curve=curve.thinned(_CURVE_POINTS),
    )


def _processor_times() -> tuple[int, int]:
    """Return (busy, all) ticks of all cores since the machine was started."""
    ticks = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)
