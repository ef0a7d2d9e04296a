"""One rank: each job is done by a child process, so that nothing of a scheme is left when the next one begins."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from paceline.bench.decentralized.board import SNAPSHOTS_S, Board, save_snapshot
from paceline.bench.decentralized.cases import ALONE, DDP, Buckets, Job, Trained
from paceline.bench.decentralized.task import Model, Teacher, cross_entropy, evaluate, excess_loss
from paceline.bench.rank_process.messages import Prepare, Ready, Setup
from paceline.errors import ContenderError
from paceline.train.decentralized.wrapper import Decentralized

PROBE_WARMUP, PROBE_STEPS = 3, 6
HELD_OUT = 10_000

_PR_SET_PDEATHSIG = 1
_COUNTERS = Path("/proc/self/net/dev")
_LAB_INTERFACE = "eth0"


class TrainingRank:
    """A rank that waits for jobs."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(1)
        self.rank, self.num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.ready = Ready(self.rank, self.num_ranks, {"torch": str(torch.__version__)})
        del setup

    def perform(self, text: str) -> str:
        """Do a job in a child, and return what it reports."""
        reading, writing = os.pipe()
        gc.freeze()
        child = os.fork()
        if child == 0:
            _be_the_child(text, self.rank, self.num_ranks, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            raise ContenderError(f"its process was ended by {signal.Signals(os.WTERMSIG(status)).name}")
        if os.waitstatus_to_exitcode(status) != 0:
            raise ContenderError(answer.decode(errors="replace") or "its process ended without a word")
        return answer.decode()

    def prepare(self, order: Prepare) -> int:
        """Refuse: there is nothing to prepare."""
        raise ContenderError(f"{order.operation!r} is not for a training rank")

    def run(self) -> None:
        """Refuse: jobs come as text."""
        raise ContenderError("a training rank runs no blocks")

    def barrier(self) -> None:
        """Do nothing: ranks meet in their jobs."""

    def close(self) -> None:
        """Do nothing: children have left their groups."""


def _be_the_child(text: str, rank: int, num_ranks: int, writing: int) -> None:
    """Do the job and end the process."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing stays when the rank is killed
        job = msgspec.json.decode(text, type=Job)
        answer = msgspec.json.encode(_Training(job, rank, num_ranks).report())
        code = 0
    except BaseException as error:
        traceback.print_exc()
        answer = f"{type(error).__name__}: {error}".encode()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(answer)
    os._exit(code)


class _Training:
    """One job of one rank."""

    def __init__(self, job: Job, rank: int, num_ranks: int) -> None:
        warnings.filterwarnings("ignore", category=FutureWarning)
        os.environ["MASTER_PORT"] = str(job.port)
        within = timedelta(seconds=job.timeout_s)
        dist.init_process_group(job.backend, rank=rank, world_size=num_ranks, timeout=within)
        self.job, self.rank = job, rank
        self.model = Model(job.width, job.compute_s, job.seed)
        self.teacher = Teacher()
        self.compute_factor = job.compute_factors[rank]
        self.jitter = np.random.default_rng((job.seed, rank))
        self.outside_s = 0.0
        self.saved = 0

    def report(self) -> Trained:
        """Do the job, and leave the group."""
        done = self.probed() if self.job.probe else self.trained()
        dist.barrier()
        dist.destroy_process_group()
        return done

    def step(self, wrapped: nn.Module, optimizer: SGD, number: int, board: Board | None) -> None:
        """Make one training step; its loss goes to the board."""
        began_s = time.monotonic()
        clock = self.model.clock
        clock.factor = self.compute_factor * (1 + self.job.jitter * self.jitter.uniform(-1, 1))
        batch = self.teacher.batch(self.job.batch, self.job.seed, self.rank, number)
        optimizer.zero_grad()
        clock.begin(began_s)
        scores = wrapped(batch.inputs)
        if board is not None:
            board.note_loss(self.rank, time.monotonic(), excess_loss(scores, batch))
        cross_entropy(scores, batch).backward()  # type: ignore[no-untyped-call]
        computed_s = clock.last_s - began_s
        optimizer.step()
        self.outside_s += time.monotonic() - began_s - computed_s

    def wrap(self, optimizer: SGD) -> nn.Module:
        """Return the model as the scheme trains it."""
        job = self.job
        if job.scheme == ALONE:
            return self.model
        if job.scheme in DDP:
            return _ddp(self.model, job.buckets)
        options: dict[str, Any] = dict(job.options)
        return Decentralized(self.model, optimizer, scheme=job.scheme, timeout_s=job.timeout_s, **options)

    def optimizer(self) -> SGD:
        """Return the optimizer of the warm-up, whose steps change nothing."""
        return SGD(self.model.parameters(), lr=0.0, momentum=self.job.momentum)

    def probed(self) -> Trained:
        """Time some steps of DDP with each bucket size."""
        found = []
        for buckets in self.job.probe:
            optimizer = self.optimizer()
            wrapped = _ddp(self.model, buckets)
            times = []
            for number in range(PROBE_WARMUP + PROBE_STEPS):
                began_s = time.monotonic()
                self.step(wrapped, optimizer, number, None)
                times.append(time.monotonic() - began_s)
            found.append(float(np.median(times[PROBE_WARMUP:])))
            del wrapped
        return Trained(probed_s=found)

    def trained(self) -> Trained:
        """Train until the controller says stop."""
        job, folder = self.job, Path(self.job.folder)
        board = Board(folder / "board", dist.get_world_size())
        optimizer = self.optimizer()
        wrapped = self.wrap(optimizer)
        steps = self._warm_up(wrapped, optimizer, board)
        optimizer.state.clear()
        self.outside_s = 0.0
        before = self._counts(wrapped)
        processor_s = time.process_time()
        first, began_s = steps, time.monotonic()
        while not (board.stop and (job.own_pace or steps >= board.stop)) and not getattr(wrapped, "done", False):
            rise = min(1.0, (steps - first + 1) / max(1, job.lr_warmup))
            for group in optimizer.param_groups:
                group["lr"] = job.learning_rate * rise
            self.step(wrapped, optimizer, steps - first, board)
            steps += 1
            self._save(folder, int((time.monotonic() - board.go_s) / SNAPSHOTS_S))
        elapsed_s, processor_s = time.monotonic() - began_s, time.process_time() - processor_s
        after = self._counts(wrapped)
        np.save(folder / f"weights{self.rank}.npy", _weights(self.model))
        finishing_s = time.monotonic()
        if isinstance(wrapped, Decentralized):
            wrapped.finish()
        finishing_s = time.monotonic() - finishing_s
        checksum = float(_weights(self.model).astype(np.float64).sum())
        del wrapped
        dist.barrier()
        loss, accuracy = evaluate(self.model, self.teacher.held_out(HELD_OUT)) if self.rank == 0 else (None, None)
        sent = _difference(after["sent"], before["sent"])
        wait_s = _difference(after["wait_s"], before["wait_s"])
        return Trained(
            elapsed_s=elapsed_s,
            steps=steps - first,
            outside_s=self.outside_s,
            wait_s=wait_s,
            finish_s=finishing_s,
            groups={size: count - before["groups"].get(size, 0) for size, count in after["groups"].items()},
            failed_groups=after["failed"] - before["failed"],
            sent_bytes=None if sent is None else int(sent),
            processor_s=processor_s,
            checksum=checksum,
            loss=loss,
            accuracy=accuracy,
        )

    def _save(self, folder: Path, number: int) -> None:
        """Save the weights after the first step that ends behind a snapshot's time, which may be several."""
        if number > self.saved:
            save_snapshot(_weights(self.model), folder, range(self.saved + 1, number + 1), self.rank)
            self.saved = number

    def _warm_up(self, wrapped: nn.Module, optimizer: SGD, board: Board) -> int:
        """Make steps at learning rate zero until the clock starts; return how many."""
        steps = 0
        while not (board.go and (self.job.own_pace or steps >= board.go)):
            self.step(wrapped, optimizer, steps, None)
            steps += 1
            board.note_warm(self.rank, steps)
        return steps

    def _counts(self, wrapped: nn.Module) -> dict[str, Any]:
        """Return what is counted so far, by this host's interface and by the scheme."""
        sent = _sent_bytes()
        if not isinstance(wrapped, Decentralized):
            return {"sent": sent, "wait_s": None, "groups": {}, "failed": 0}
        seen = wrapped.statistics
        return {
            "sent": seen.bytes_sent if sent is None else sent,
            "wait_s": seen.wait_s,
            "groups": dict(seen.groups),
            "failed": seen.failed_groups,
        }


def _ddp(model: nn.Module, buckets: Buckets | None) -> DistributedDataParallel:
    """Wrap by DDP. The list of the first bucket's size and of all others is what DDP makes of its defaults."""
    caps: Any = None
    if buckets is not None:
        caps = [size / 2**20 for size in (buckets.first, buckets.size) if size]
    return DistributedDataParallel(model, bucket_cap_mb_list=caps, gradient_as_bucket_view=True)


def _weights(model: nn.Module) -> Any:
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before


def _sent_bytes() -> int | None:
    """Return what this host has sent by its link, headers and all; None where it has no link of a lab."""
    for line in _COUNTERS.read_text().splitlines():
        name, colon, counts = line.partition(":")
        if colon and name.strip() == _LAB_INTERFACE and "PACELINE_IFNAME" in os.environ:
            return int(counts.split()[8])
    return None
