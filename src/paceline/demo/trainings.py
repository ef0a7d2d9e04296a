"""One training loop for every strategy, and how each of them is watched while it trains.

A watch knows when collectives were under way and when this rank waited for them. DDP's are seen through a
communication hook that does what DDP does without one; DataParallel and Decentralized keep their own record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

from paceline.demo.data import Digits
from paceline.demo.messages import Flight, Job, Step, Strategy
from paceline.demo.pacing import pace_connections
from paceline.train.dear.wrapper import DataParallel
from paceline.train.decentralized.wrapper import Decentralized

_LEARNING_RATE = 1e-3

Waits = list[tuple[float, float]]


class Watch(Protocol):
    """Sees one rank's collectives."""

    def backward_ended(self) -> None:
        """The call of backward() has returned just now."""

    def news(self) -> tuple[Waits, list[Flight]]:
        """When this rank waited, and the flights that have ended, since the last time somebody asked."""


class DDPWatch:
    """All-reduces of DDP: backward() waits from the launch of the last one, when all gradients are there."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._flights: list[Flight] = []
        self._waits: Waits = []
        self._launched_s = 0.0
        self._num_ranks = dist.get_world_size()
        model.register_comm_hook(None, lambda _, bucket: self._all_reduce(bucket))  # DDP reads no postponed annotations

    def _all_reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        launched_s = self._launched_s = time.perf_counter()
        work = dist.all_reduce(bucket.buffer().div_(self._num_ranks), async_op=True)

        def done(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self._flights.append(Flight("all-reduce", launched_s, time.perf_counter()))
            return future.value()[0]

        return work.get_future().then(done)  # type: ignore[no-any-return]

    def backward_ended(self) -> None:
        """What has passed since the last launch was waiting."""
        self._waits.append((self._launched_s, time.perf_counter()))

    def news(self) -> tuple[Waits, list[Flight]]:
        """Take what there is."""
        waits, self._waits = self._waits, []
        flights, self._flights = self._flights, []
        return waits, flights


class DataParallelWatch:
    """Reduce-scatters and all-gathers, from the wrapper's own record."""

    def __init__(self, model: DataParallel) -> None:
        self._model = model
        self._told: set[int] = set()

    def backward_ended(self) -> None:
        """It returns while collectives are under way; who waits for them is recorded."""

    def news(self) -> tuple[Waits, list[Flight]]:
        """Flights of the last steps that have ended: an all-gather ends in the iteration after its launch."""
        ended = [
            one
            for step in list(self._model.overlap.steps)[-4:]
            for one in step.flights
            if one.done_s is not None and id(one) not in self._told
        ]
        self._told |= {id(one) for one in ended}
        flights, waits = [], []
        for one in ended:
            assert one.done_s is not None
            flights.append(Flight(one.operation, one.launched_s, one.done_s))
            if one.waited_s > 0:
                waits.append((one.done_s - one.waited_s, one.done_s))
        return waits, flights


class DecentralizedWatch:
    """Averages of weights, from the wrapper's own record."""

    def __init__(self, model: Decentralized) -> None:
        self._statistics = model.statistics
        self._waited_s = 0.0
        self._told_s = 0.0  # averages that ended by then

    def backward_ended(self) -> None:
        """It exchanges nothing."""

    def news(self) -> tuple[Waits, list[Flight]]:
        """Take the averages that have ended; a wait is noted as the last part of the step that it was in."""
        now_s, waited_s = time.perf_counter(), self._statistics.wait_s
        waits = [(now_s - (waited_s - self._waited_s), now_s)] if waited_s > self._waited_s else []
        ended = [one for one in list(self._statistics.recent) if one.ended_s > self._told_s]
        self._waited_s = waited_s
        self._told_s = max((one.ended_s for one in ended), default=self._told_s)
        return waits, [Flight(f"average of {one.num_members}", one.began_s, one.ended_s) for one in ended]


def wrap(strategy: Strategy, module: nn.Module, optimizer: Optimizer, job: Job) -> tuple[Any, Watch]:
    """The module made parallel, and who watches it."""
    if strategy is Strategy.DECENTRALIZED:
        decentralized = Decentralized(module, optimizer, total_steps=job.iterations * job.num_ranks)
        return decentralized, DecentralizedWatch(decentralized)
    if strategy is Strategy.DATA_PARALLEL:
        model = DataParallel(module, optimizer)
        return model, DataParallelWatch(model)
    ddp = DistributedDataParallel(module)
    return ddp, DDPWatch(ddp)


def groups_of(model: Any) -> list[Any]:
    """The process groups whose collectives carry gradients."""
    return [model._groups.reduce, model._groups.gather] if isinstance(model, DataParallel) else [model.process_group]


def train(strategy: Strategy, module: nn.Module, digits: Digits, job: Job, say: Callable[[Step], None]) -> Any:
    """Train the module and say what happens in each iteration; returns it as wrapped. ``finish`` comes next."""
    rank, lag_s = dist.get_rank(), job.late_s if dist.get_rank() == job.late_rank else 0.0
    optimizer = Adam(module.parameters(), lr=_LEARNING_RATE)
    model, watch = wrap(strategy, module, optimizer, job)
    dist.barrier()
    for number in _iterations(model, job):
        if job.pace_bytes_per_s:
            # Again in each iteration, because connections are opened when first needed.
            pace_connections(job.pace_bytes_per_s)
        began_s = time.perf_counter()
        images, labels = digits.batch(number, job.batch, rank, job.num_ranks, job.seed)
        time.sleep(lag_s)  # a slow disk, a long document
        loaded_s = time.perf_counter()
        scores = model(images)
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores, labels).backward()  # type: ignore[no-untyped-call]
        watch.backward_ended()
        optimizer.step()
        ended_s = time.perf_counter()
        waits, flights = watch.news()
        correct = int((scores.argmax(1) == labels).sum())
        say(Step(strategy, number, began_s, loaded_s, ended_s, waits, flights, correct, job.batch))
    return model


def finish(model: Any) -> float:
    """End a training: the module gets its final weights. Return how long a decentralised rank has waited for that."""
    if isinstance(model, DataParallel):
        model.synchronize()
    if not isinstance(model, Decentralized):
        return 0.0
    waited_s = model.statistics.wait_s
    model.finish()
    return model.statistics.wait_s - waited_s


def _iterations(model: Any, job: Job) -> Iterator[int]:
    """Number the steps of this rank: those that all make, or those until all ranks together have made enough."""
    if not isinstance(model, Decentralized):
        yield from range(job.iterations)
        return
    for number in count():
        yield number
        if model.done:
            return
