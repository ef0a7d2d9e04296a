"""AD-PSGD (Lian et al. 2018, arXiv 1710.06952): pairs of workers average beside their steps, and nobody waits."""

from __future__ import annotations

import queue
import random
import threading
import time

import torch

from paceline.errors import MessageError
from paceline.train.decentralized.schemes.pending import PendingChange
from paceline.train.decentralized.schemes.progress import FIRST_KIND, Progress
from paceline.train.decentralized.schemes.scheme import Scheme, Worker
from paceline.train.decentralized.schemes.synchronous import group_mesh

_ASK = FIRST_KIND  # number of the exchange, elements
_ANSWER = FIRST_KIND + 1  # the same, perhaps with fewer elements
_FINAL = 1 << 60
_CLOSE_S = 5.0
"""How long ``close`` waits for an exchange under way, before it gives it up."""


class ADPSGD(Scheme):
    """After each step a worker of an even number averages its weights with a random one of an odd number.

    Both become the mean of the two, in one exchange that sends the whole vector each way. It runs on background threads
    beside the next steps: the gradients are those of somewhat older weights, as in the paper. A worker of an odd number
    answers at any time, one at a time, also while it computes. As only one side begins exchanges, there is no deadlock.

    If an exchange takes longer than a step, the next one follows at once: there are fewer exchanges than steps. With
    ``wait=True`` the worker waits instead, so that there is one for each step, as in the paper's Algorithm 1.

    A worker that dies is left alone; the others go on, unless it is worker 0, which counts the steps.
    """

    def __init__(self, worker: Worker, wait: bool = False) -> None:
        super().__init__(worker)
        mesh = group_mesh(self.mesh)
        self._wait = wait
        self._me = mesh.worker
        self._active = self._me % 2 == 0
        self._partners = [one for one in range(mesh.num_workers) if one % 2 != self._me % 2]
        self._random = random.Random(self._me)
        self._pending = PendingChange(self.weights)
        self._buffers = (self.weights.new(0), self.weights.new(0))
        # Guarded by the condition.
        self._wanted = False  # a step has ended since the last exchange began
        self._exchanging = False
        self._answer = (0, 0)
        self._asked: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._unserved = 0
        self._progress = Progress(self, peers=self._partners, receive=self._receive, lost=self._lose)
        self._condition = self._progress.condition
        run = self._begin_exchanges if self._active else self._serve_exchanges
        self._thread = threading.Thread(target=run, name="paceline AD-PSGD", daemon=True)
        self._thread.start()
        self._progress.start()

    def after_step(self) -> None:
        """Take in what exchanges have brought, and begin the next one."""
        self._progress.report(self.statistics.steps)
        if self._wait:
            self._await_exchange()
        self._pending.apply()
        if self._active:
            with self._condition:
                self._wanted = True
                self._condition.notify_all()

    def finish(self) -> None:
        """Answer the others until all have finished, then take the mean of those alive."""
        mean = self._mean(last=True)
        self._pending.apply()
        self.weights.write(mean)

    def average(self) -> torch.Tensor:
        """Return the mean of all live workers' weights."""
        return self._mean(last=False)

    _num_means = 0

    def _mean(self, *, last: bool) -> torch.Tensor:
        self._await_exchange()
        live = self._progress.meet(last=last)
        self._progress.wait_for(lambda: self._unserved == 0, "an exchange with another worker")
        vector = self.weights.new(self.weights.num_weights)
        self._pending.read(vector)
        self._num_means += 1
        with self.waiting():
            self.mesh.reduce(vector, live, _FINAL + self._num_means, timeout_s=self.worker.timeout_s)
        return vector

    def _await_exchange(self) -> None:
        self._progress.wait_for(lambda: not self._wanted and not self._exchanging, "an exchange with another worker")

    def close(self) -> None:
        """End the exchanges and the threads."""
        self._asked.put(None)
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            self.mesh.give_up(self._number, f"rank {self._me} has left the training")
            self._thread.join(_CLOSE_S)
        self._progress.close()

    _closing = False
    _number = 0  # of the exchange under way

    # Messages; called with the condition held.

    def _receive(self, peer: int, kind: int, number: int, size: int) -> None:
        if kind == _ASK:
            self._unserved += 1
            self._asked.put((peer, number, size))
        elif kind == _ANSWER:
            self._answer = (number, size)

    def _lose(self, worker: int) -> None:
        if worker in self._partners:
            self._partners.remove(worker)

    # Exchanges, on a thread of their own.

    def _begin_exchanges(self) -> None:
        number = self._me << 36
        while True:
            number += 1
            with self._condition:
                self._condition.wait_for(lambda: self._wanted or self._closing)
                self._wanted = False
                if self._closing:
                    return
                if not self._partners:
                    self._condition.notify_all()
                    continue
                self._exchanging = True
                partner = self._random.choice(self._partners)
            self._progress.send(partner, _ASK, number, self.weights.size)
            with self._condition:
                self._condition.wait_for(
                    lambda: self._answer[0] == number or partner not in self._partners or self._closing,  # noqa: B023
                    self.worker.timeout_s,
                )
                answer, size = self._answer
            if answer == number:
                self._exchange(partner, number, size)
            elif not self._closing:
                self._fail_with(partner)
            with self._condition:
                self._exchanging = False
                self._condition.notify_all()

    def _serve_exchanges(self) -> None:
        while (asked := self._asked.get()) is not None:
            partner, number, size = asked
            size = min(size, self.weights.size)  # it may have the optimizer's state already, and this worker not
            self._progress.send(partner, _ANSWER, number, size)
            self._exchange(partner, number, size)
            with self._condition:
                self._unserved -= 1
                self._condition.notify_all()

    def _exchange(self, partner: int, number: int, size: int) -> None:
        """Both workers' weights become their mean."""
        if self._buffers[0].numel() != size:
            self._buffers = (self.weights.new(size), self.weights.new(size))
        snapshot, mean = self._buffers
        self._number = number
        begin = time.perf_counter()
        self._pending.read(snapshot)
        mean.copy_(snapshot)
        try:
            self.mesh.reduce(mean, (self._me, partner), number, timeout_s=self.worker.timeout_s)
        except (RuntimeError, MessageError):
            self._fail_with(partner)
            return
        self._pending.replace(snapshot, mean)
        self.statistics.count_average(2, mean.numel() * mean.element_size(), time.perf_counter() - begin)

    def _fail_with(self, partner: int) -> None:
        self.statistics.failed_groups += 1
        with self._condition:
            if self._active and partner in self._partners:
                self._partners.remove(partner)
