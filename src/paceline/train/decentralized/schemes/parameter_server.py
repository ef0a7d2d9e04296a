"""Parameter servers as schemes: worker 0 serves the weights beside its own training."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import MessageError, UsageError
from paceline.train.decentralized.mesh import new_group
from paceline.train.decentralized.schemes.scheme import Scheme, Worker
from paceline.train.decentralized.schemes.synchronous import group_mesh
from paceline.train.decentralized.schemes.weight_server import (
    ALIVE,
    ANSWER_EXTRA,
    AVERAGE,
    END,
    LEAVE,
    MESSAGE_EXTRA,
    STEP,
    BoundedServer,
    BulkServer,
    WeightServer,
)

_SERVER, _CLIENT = 0, 1
"""Ranks in the group that the server has with each worker."""

_log = logging.getLogger("paceline")


_TELLING_S = 5.0
"""So long worker 0 waits with its own error, until the others have heard who is lost."""


class Served(Scheme):
    """A worker of a parameter server. Subclasses name the server.

    Before each step of the optimizer a worker sends its gradients, and after it takes the server's weights. So what
    the optimizer itself does to the weights meanwhile is overwritten.

    The optimizer's state that counts is the server's. It begins as a copy of the state on worker 0, and goes back
    there in ``finish``; the state of the other workers' optimizers means nothing. Hyper-parameters are those of worker
    0's optimizer. Missing gradients count as zeros. ``average_state`` has no effect.

    The server has a group and a thread for each other worker, so it receives from some and sends to others at once,
    and the loss of a worker breaks that group alone. A step sends the gradients and receives the weights, on worker 0
    times n - 1, the other way round.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        mesh = group_mesh(worker.mesh)
        self._group: Any = None
        self._server: WeightServer | None = None
        self._threads: list[threading.Thread] = []
        self._message = self.weights.new(self.weights.num_weights + MESSAGE_EXTRA).zero_()
        self._answer = self.weights.new(self.weights.num_weights + ANSWER_EXTRA)
        self._under_way: list[Any] = []
        self._asked_at: float | None = None
        self._ended = False
        self._sent_lock = threading.Lock()
        within = timedelta(seconds=worker.timeout_s)
        ranks = dist.get_process_group_ranks(mesh.parent)
        self._groups = [new_group(mesh.parent, [ranks[0], other], "parameter server", within) for other in ranks[1:]]
        if mesh.worker == 0:
            self._server = self.make_server()
            for number in range(1, mesh.num_workers):
                thread = threading.Thread(target=self._serve, args=(number, self._groups[number - 1]), daemon=True)
                thread.name = f"parameter server of worker {number}"
                thread.start()
                self._threads.append(thread)
        else:
            self._group = self._groups[mesh.worker - 1]

    @abstractmethod
    def make_server(self) -> WeightServer:
        """Return the server, on worker 0."""

    # Training.

    def before_step(self) -> None:
        """Send the gradients."""
        if self._asked_at is not None:  # the last step ended by an exception
            self._receive()
        self.weights.read_gradients(self._message[: self.weights.num_parameters])
        self._send(STEP)

    def after_step(self) -> None:
        """Take the server's weights."""
        if self._asked_at is None:
            raise UsageError(
                "a parameter server takes gradients before the step: call optimizer.step() without a closure"
            )
        begin = self._asked_at
        answer = self._receive()
        self.weights.write(answer[: self.weights.num_parameters])
        if (num_gradients := int(answer[-3])) > 1:
            self.statistics.groups[num_gradients] += 1
        self.statistics.average_s += perf_counter() - begin
        if answer[-2]:
            self.done.set()

    def average(self) -> torch.Tensor:
        """Return the server's weights and the mean of all buffers, as soon as nobody trains."""
        return self._ask(AVERAGE)

    def finish(self) -> None:
        """Wait until all have ended, and take the server's weights and the mean of all buffers."""
        self.weights.write(self._ask(END))
        self._ended = True
        for thread in self._threads:
            thread.join(self.worker.timeout_s)
        if self._server is not None:
            self._server.hand_back_state()

    def close(self) -> None:
        """Leave: the others go on, unless this is worker 0."""
        if self._server is not None and not self._ended:
            self._server.close()
        if self._group is not None and not self._ended:
            with suppress(MessageError):
                if self._asked_at is not None:
                    self._receive()
                self._send(LEAVE)
                self._wait()
        for number, group in enumerate(self._groups):
            still_needed = bool(self._threads) and self._threads[number].is_alive()  # its worker has yet to be told
            if group is not None and not still_needed:
                dist.destroy_process_group(group)

    def _ask(self, kind: int) -> torch.Tensor:
        if self._asked_at is not None:
            self._receive()
        self.weights.read(self._message[: self.weights.num_weights])
        self._send(kind)
        return self._receive()[: self.weights.num_weights].clone()

    def _send(self, kind: int) -> None:
        self._message[-1] = kind
        self._asked_at = perf_counter()
        if self._server is not None:
            self._server.submit(0, self._message)
            return
        with self._telling():
            self._under_way.append(dist.isend(self._message, group=self._group, group_dst=_SERVER))
            if kind != LEAVE:
                self._under_way.append(dist.irecv(self._answer, group=self._group, group_src=_SERVER))
        self._count_sent(self._message)

    def _receive(self) -> torch.Tensor:
        with self.waiting():
            answer = self._server.answer(0) if self._server is not None else self._answer
            self._wait()
        self._asked_at = None
        if self._server is not None and self._server.failure is not None:
            self._let_others_hear()
            failure = self._server.failure
            raise MessageError(f"the parameter server has ended: {failure}") from (
                failure if isinstance(failure, Exception) else None
            )
        status = int(answer[-1])
        self._ended = status != ALIVE
        if status > ALIVE:
            raise MessageError(f"the parameter server has ended: worker {status - 1} is lost, and all are needed")
        if status < ALIVE:
            raise MessageError("the parameter server beside worker 0 has ended, by an error or close(): look there")
        return answer

    def _let_others_hear(self) -> None:
        """Give the server's threads a moment to tell the others, before worker 0's process may end."""
        end = perf_counter() + _TELLING_S
        for thread in self._threads:
            thread.join(max(0.0, end - perf_counter()))

    def _wait(self) -> None:
        with self._telling():
            while self._under_way:
                self._under_way.pop(0).wait()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Say of an error of the process group what it means."""
        try:
            yield
        except RuntimeError as error:
            self._asked_at = None
            self._ended = True
            self._under_way.clear()
            raise MessageError(f"the parameter server beside worker 0 cannot be reached: {error}") from error

    # The server's threads, on worker 0.

    def _serve(self, worker: int, group: Any) -> None:
        server = self._server
        assert server is not None
        inbox = torch.empty_like(self._message)
        try:
            coming: Any = dist.irecv(inbox, group=group, group_src=_CLIENT)
            while True:
                coming.wait()
                kind = server.submit(worker, inbox)
                if kind == LEAVE:
                    break
                answer = server.answer(worker)
                over = kind == END or int(answer[-1]) != ALIVE
                if not over:
                    coming = dist.irecv(inbox, group=group, group_src=_CLIENT)
                leaving: Any = dist.isend(answer, group=group, group_dst=_CLIENT)
                leaving.wait()
                self._count_sent(answer)
                if over:
                    break
        except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed here
            _log.warning("parameter server: worker %d is lost: %s", worker, error)
            server.lose(worker, str(error))

    def _count_sent(self, vector: torch.Tensor) -> None:
        with self._sent_lock:
            self.statistics.bytes_sent += vector.numel() * vector.element_size()


class ParameterServer(Served):
    """All workers' gradients of a step make one step of the server's: with their mean, when all have come.

    It waits only for workers that train. The loss of one is an error on all. See ``Served`` for what lives where.
    """

    def make_server(self) -> WeightServer:
        """Return a server that waits for all."""
        return BulkServer(
            self.weights, self.worker.optimizer, group_mesh(self.mesh).num_workers, self.worker.total_steps
        )


class AsyncParameterServer(Served):
    """Each gradient makes a step of the server's when it comes.

    A worker that has made ``staleness`` steps more than the slowest waits for it (stale synchronous parallel). The
    others go on when a worker is lost, except worker 0. See ``Served`` for what lives where.
    """

    def __init__(self, worker: Worker, staleness: int = 4) -> None:
        if staleness < 0:
            raise UsageError(f"staleness is {staleness}: a worker may lead the slowest by 0 steps or more")
        self._staleness = staleness
        super().__init__(worker)

    def make_server(self) -> WeightServer:
        """Return a server that waits for nobody, within bounds."""
        num_workers = group_mesh(self.mesh).num_workers
        return BoundedServer(self.weights, self.worker.optimizer, num_workers, self.worker.total_steps, self._staleness)
