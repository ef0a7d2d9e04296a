"""Eager-SGD, majority (Li et al. 2020, PPoPP): gradients are added up as soon as half of the workers have theirs."""

from __future__ import annotations

import queue
import threading
import time

import torch

from paceline.errors import MessageError, UsageError
from paceline.train.decentralized.schemes.progress import FIRST_KIND, Progress
from paceline.train.decentralized.schemes.scheme import Scheme, Worker
from paceline.train.decentralized.schemes.synchronous import average_all, group_mesh

_ARRIVED = FIRST_KIND  # to worker 0
_ROUND = FIRST_KIND + 1  # of worker 0 to all: the round
_FLUSH = 1 << 40
_CLOSE_S = 5.0
"""How long ``close`` waits for a round under way to end, after it has given it up."""


class Eager(Scheme):
    """Gradients are averaged in rounds, which begin when half of the workers have a new gradient.

    Worker 0 counts the arrivals and begins the rounds, one after the other. In a round each worker's background thread
    contributes the gradients that no round has had yet: their sum, or zeros. So a late gradient goes into the next
    round, and none is lost. The mean is over all workers.

    A step of the optimizer takes the sum of the means of all rounds since the last step. A worker that finds no new
    mean waits for the next; a late one finds some, and does not wait. (In the paper a late worker takes the newest
    only, and workers drift apart until they average their weights; here all apply the same means, so with plain SGD
    their weights are alike but for rounds under way.)

    A worker that has finished applies the other workers' means by steps of its optimizer, which ``statistics.steps``
    does not count. Buffers, such as BatchNorm's, are each worker's own until ``finish``. An optimizer with a closure
    is not possible.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        mesh = group_mesh(self.mesh)
        self._everyone = list(range(mesh.num_workers))
        self._fresh, self._unsent, self._ready, self._in_round = (
            self.weights.new(self.weights.num_parameters).zero_() for _ in range(4)
        )
        self._contributed = False
        self._catching_up = False
        # Guarded by the condition.
        self._num_ready = 0  # rounds whose means are in _ready
        self._unfinished = 0  # rounds announced that have not ended here
        self._rounds: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._number = 0  # of the round under way
        self._arrived: set[int] = set()  # on worker 0
        self._num_rounds = 0  # on worker 0
        self._progress = Progress(self, receive=self._receive, books_changed=self._begin_round)
        self._condition = self._progress.condition
        self._thread = threading.Thread(target=self._run_rounds, name="paceline eager-SGD", daemon=True)
        self._thread.start()
        self._progress.start()

    def before_step(self) -> None:
        """Give this worker's gradient to the next round, and take the means of those that have ended."""
        if self._catching_up:
            return
        self._progress.check()
        self.weights.read_gradients(self._fresh)
        with self._condition:
            self._unsent.add_(self._fresh)
        self._progress.send(0, _ARRIVED)
        self._progress.wait_for(lambda: self._num_ready > 0, "half of the workers' gradients")
        self._take()
        self._contributed = True

    def after_step(self) -> None:
        """Count the step."""
        if self._catching_up:
            return
        if not self._contributed:
            raise UsageError(
                'scheme "eager" averages gradients before the step: call optimizer.step() without a closure'
            )
        self._contributed = False
        self._progress.report(self.statistics.steps)

    def finish(self) -> None:
        """Follow the others until all have finished, add up the gradients that are left, then average the weights."""
        self._progress.meet(last=True, serve=self._catch_up)
        self._progress.wait_for(lambda: self._unfinished == 0, "the last rounds of gradients")
        with self.waiting():
            self._reduce(_FLUSH)
        self._progress.check()
        self._catch_up()
        self.weights.write(average_all(self))

    def average(self) -> torch.Tensor:
        """Return the mean of all workers' weights."""
        self._progress.meet(last=False)
        return average_all(self)

    def close(self) -> None:
        """End the rounds."""
        self._rounds.put(None)
        with self._condition:
            under_way = self._unfinished > 0
        if under_way:
            self.mesh.give_up(self._number, f"rank {self.mesh.worker} has left the training")
        self._thread.join(_CLOSE_S)
        self._progress.close()

    def _take(self) -> None:
        with self._condition:
            self.weights.write_gradients(self._ready)
            self._ready.zero_()
            self._num_ready = 0

    def _catch_up(self) -> None:
        """Apply the means that others have waited for."""
        if self._num_ready == 0:
            return
        self._take()
        self._catching_up = True
        try:
            self.worker.optimizer.step()
            self.statistics.steps -= 1
        finally:
            self._catching_up = False

    # Rounds.

    def _receive(self, peer: int, kind: int, number: int, _: int) -> None:
        """Take a message; the condition is held."""
        if kind == _ARRIVED:
            self._arrived.add(peer)
            self._begin_round()
        else:
            self._unfinished += 1
            self._rounds.put(number)

    def _begin_round(self) -> None:
        """On worker 0, with the condition held: begin a round if none is under way here and half have arrived."""
        training = len(self._progress.training())
        enough = len(self._arrived) >= (training + 1) // 2
        if training == 0 or not enough or self._unfinished > 0 or self._progress.over:
            return
        self._arrived.clear()
        self._num_rounds += 1
        for worker in reversed(self._progress.live):
            self._progress.send(worker, _ROUND, self._num_rounds)

    def _run_rounds(self) -> None:
        while (number := self._rounds.get()) is not None:
            self._reduce(number)
            with self._condition:
                self._unfinished -= 1
                self._condition.notify_all()
                if self.mesh.worker == 0:
                    self._begin_round()

    def _reduce(self, number: int) -> None:
        """Add up, among all, what no round has had."""
        with self._condition:
            self._number = number
            self._unsent, self._in_round = self._in_round, self._unsent
            self._unsent.zero_()
        begin = time.perf_counter()
        try:
            self.mesh.reduce(self._in_round, self._everyone, number, timeout_s=self.worker.timeout_s)
        except (RuntimeError, MessageError) as error:
            self._progress.fail(str(error))
            return
        vector_bytes = self._in_round.numel() * self._in_round.element_size()
        self.statistics.count_average(len(self._everyone), vector_bytes, time.perf_counter() - begin)
        with self._condition:
            self._ready.add_(self._in_round)
            self._num_ready += 1
