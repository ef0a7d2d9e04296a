"""The life of one rank: wait for orders without using the processor, do them, answer.

A thread of its own reads the orders. So the process notices at once that the controller is gone, also in the middle
of a collective that will never end, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import msgspec

from .messages import (
    Answer,
    Block,
    Failed,
    Hello,
    Order,
    Pause,
    Perform,
    Performed,
    Ping,
    Pong,
    Prepare,
    Prepared,
    Ready,
    Setup,
    Stop,
    Timed,
)

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_RUNS_AHEAD = ("broadcast",)
"""Here a rank can be done long before the others: a barrier between iterations, not timed, keeps them together."""


class Workload(Protocol):
    """One rank of a contender, seen by the loop."""

    ready: Ready

    def prepare(self, order: Prepare) -> int:
        """Make buffers, run once on real data, and return how many elements are wrong."""

    def run(self) -> object:
        """One iteration, finished when it returns."""

    def barrier(self) -> object:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the group."""


@runtime_checkable
class Performer(Protocol):
    """A rank that does jobs of its own program."""

    def perform(self, job: str) -> str:
        """Do a job, and return what came out."""


def join(setup: Setup) -> Workload:
    """The rank of a collective benchmark."""
    if setup.backend == "mpi":
        from .mpi_rank import MpiRank

        return MpiRank(setup)
    from .torch_rank import TorchRank

    return TorchRank(setup)


def main(arguments: list[str], join: Callable[[Setup], Workload] = join) -> None:
    """Serve the controller that listens at ``arguments[0]``; ``arguments[1]`` is the rank, or -1."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(arguments[0])
    server = _Server(line)
    threading.Thread(target=server.read, daemon=True).start()
    rank = int(arguments[1])
    server.answer(Hello(rank if rank >= 0 else _launched_rank()))
    try:
        server.serve(join)
    except Exception as error:
        words = " ".join(str(error).split())
        server.answer(Failed(f"{type(error).__name__}: {words}"[:600]))
        while not isinstance(server.orders.get(), Stop):  # who is heard of no more has died, and that would say more
            pass
        os._exit(1)


class _Server:
    """The orders that wait, and how far the block at hand is."""

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.answering = threading.Lock()
        self.orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self.durations_ns: list[int] = []
        self.settle = False

    def answer(self, message: Answer) -> None:
        with self.answering, contextlib.suppress(OSError):  # if the controller is gone, the reading thread ends us
            self.line.sendall(msgspec.json.encode(message) + b"\n")

    def read(self) -> None:
        decoder = msgspec.json.Decoder(Order)
        with contextlib.suppress(OSError), self.line.makefile("rb") as lines:
            for text in lines:
                order = decoder.decode(text)
                if isinstance(order, Ping):
                    self.answer(Pong(len(self.durations_ns)))
                else:
                    self.orders.put(order)
        os._exit(1)

    def serve(self, join: Callable[[Setup], Workload]) -> None:
        workload: Workload | None = None
        while not isinstance(order := self.orders.get(), Stop):
            if isinstance(order, Setup):
                os.environ.update(order.environment)
                workload = join(order)
                self.answer(workload.ready)
            elif workload is None:
                raise RuntimeError("orders must begin with a setup")
            elif isinstance(order, Prepare):
                self.settle = order.operation in _RUNS_AHEAD
                self.answer(Prepared(workload.prepare(order)))
            elif isinstance(order, Block):
                self.answer(self.timed(workload, order))
            elif isinstance(order, Perform):
                if not isinstance(workload, Performer):
                    raise RuntimeError("this program has no jobs")
                self.answer(Performed(workload.perform(order.job)))
        if workload is not None:
            workload.close()

    def timed(self, workload: Workload, block: Block) -> Timed:
        if block.late_ns is not None or block.pause is not None:
            return self.timed_from_barriers(workload, block)
        run, barrier, settle, clock = workload.run, workload.barrier, self.settle, time.perf_counter_ns
        durations = self.durations_ns = []
        gc.disable()
        for _ in range(block.warmup):
            run()
        barrier()
        processor_begin = time.process_time_ns()
        begin = clock()
        for _ in range(block.iterations):
            if settle:
                barrier()
            start = clock()
            run()
            durations.append(clock() - start)
        loop = sum(durations) if settle else clock() - begin
        processor = time.process_time_ns() - processor_begin
        gc.enable()
        return Timed(durations, loop, processor_ns=processor)

    def timed_from_barriers(self, workload: Workload, block: Block) -> Timed:
        run, barrier, clock = workload.run, workload.barrier, time.monotonic_ns
        late_s = (block.late_ns or {}).get(workload.ready.rank, 0) * 1e-9
        pause = _pause(block.pause)
        durations = self.durations_ns = []
        begins = []
        gc.disable()
        for turn in range(block.warmup + block.iterations):
            if turn == block.warmup:
                processor_began = time.process_time_ns()
                loop_began = clock()
            barrier()
            pause()
            if late_s > 0:
                time.sleep(late_s)
            begin = clock()
            run()
            if turn >= block.warmup:
                durations.append(clock() - begin)
                begins.append(begin)
        loop = clock() - loop_began
        processor = time.process_time_ns() - processor_began
        gc.enable()
        return Timed(durations, loop, begins, processor)


def _pause(pause: Pause | None) -> Callable[[], None]:
    """What all ranks do before each call."""
    if pause is None:
        return lambda: None
    seconds = pause.seconds
    if pause.kind == "sleep":
        return lambda: time.sleep(seconds)

    import numpy as np

    matrix = np.full((64, 64), 0.5, dtype=np.float32)
    product = np.empty_like(matrix)

    def compute() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            np.matmul(matrix, matrix, out=product)

    return compute


def _launched_rank() -> int:
    return next((int(os.environ[name]) for name in _RANK_VARIABLES if name in os.environ), -1)
