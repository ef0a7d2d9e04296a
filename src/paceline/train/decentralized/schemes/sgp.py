"""Stochastic Gradient Push (Assran et al. 2019, arXiv 1811.10792): PushSum over a directed exponential graph."""

from __future__ import annotations

import queue
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from paceline.errors import MessageError
from paceline.train.decentralized.mesh import twin
from paceline.train.decentralized.schemes.progress import Progress
from paceline.train.decentralized.schemes.scheme import Scheme, Worker
from paceline.train.decentralized.schemes.synchronous import group_mesh

_TAG = 2
_CLOSE_S = 5.0
"""How long ``close`` waits for messages under way, before and after it leaves the group."""


class SGP(Scheme):
    """Each worker sends half of its weights to one other after each step, and adds what another has sent it.

    In round r the receiver is at distance 2**(r mod log n), in the ring of all workers. A worker has x, the sum of what
    it kept and got, and a number w, which is halved, sent and added in the same way. Forward passes use x / w, which
    tends to the mean; the optimizer's step is applied to x. The sums of x and of w over workers and messages are
    preserved, w's is the number of workers.

    With ``overlap=True`` (OSGP with a delay of one step) messages travel during the next forward and backward pass, and
    are added before the next step of the optimizer. With ``overlap=False`` the worker waits for them after each step.

    Each round waits for one other worker, so speeds are tied over some rounds: the slowest worker sets the pace in the
    long run. A worker that has finished makes rounds without steps until all have finished. The loss of a worker
    ends the training with an error.
    """

    def __init__(self, worker: Worker, overlap: bool = True) -> None:
        super().__init__(worker)
        mesh = group_mesh(self.mesh)
        self._overlap = overlap
        self._num_workers = mesh.num_workers
        self._num_distances = (mesh.num_workers - 1).bit_length()
        self._group = twin(mesh.parent, "messages of SGP")
        self._push_weight = 1.0  # w
        self._biased = False  # the module holds x, not x / w
        self._num_rounds = 0
        self._sent, self._received, self._vector = (self.weights.new(0) for _ in range(3))
        # Guarded by the condition.
        self._under_way = False
        self._pushed: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._to_add = False
        self._progress = Progress(self, count_rounds=True)
        self._condition = self._progress.condition
        self._thread = threading.Thread(target=self._exchange, name="paceline SGP", daemon=True)
        self._thread.start()
        self._progress.start()

    def before_step(self) -> None:
        """Add what was received, and let the optimizer change x."""
        self._bias()

    def after_step(self) -> None:
        """Send half of x and w, and show x / w to the module."""
        self._bias()
        self._push()

    def finish(self) -> None:
        """Make rounds without steps until all have finished, then take the mean of all."""
        mean = self.average(last=True)
        self._push_weight = 1.0
        self.weights.write(mean)

    def average(self, *, last: bool = False) -> torch.Tensor:
        """Return the mean of all workers' x, whose messages have all been added."""
        self._progress.meet(last=last, rounds=self._num_rounds, serve=self._follow)
        self._bias()
        self._unbias()
        vector = self.weights.new(self.weights.num_weights)
        self.weights.read(vector)
        vector.mul_(self._push_weight)
        with self.waiting():
            dist.all_reduce(vector, group=group_mesh(self.mesh).group)
        return vector.div_(self._num_workers)

    def close(self) -> None:
        """End the messages."""
        self._pushed.put(None)
        self._progress.close()
        if not self._progress.failure:
            self._thread.join(_CLOSE_S)
        dist.destroy_process_group(self._group)
        self._thread.join(_CLOSE_S)

    def _follow(self) -> None:
        """Make the rounds that others have begun."""
        while self._num_rounds < self._progress.front:
            self._bias()
            self._push()

    def _bias(self) -> None:
        """Put x into the module: x / w times w, and what was received."""
        if self._under_way or self._to_add:
            self._progress.wait_for(lambda: not self._under_way, "another worker's half")
        if self._biased or (self._push_weight == 1.0 and not self._to_add):
            self._biased = True
            return
        vector = self._resized(self._received.numel() - 1 if self._to_add else self.weights.size)
        self.weights.read(vector)
        vector.mul_(self._push_weight)
        if self._to_add:
            vector.add_(self._received[:-1])
            self._push_weight += float(self._received[-1])
            self._to_add = False
        self.weights.write(vector)
        self._biased = True

    def _unbias(self) -> None:
        """Put x / w into the module."""
        if self._biased and self._push_weight != 1.0:
            vector = self._resized(self.weights.size)
            self.weights.read(vector)
            self.weights.write(vector.div_(self._push_weight))
        self._biased = False

    def _push(self) -> None:
        """Begin a round."""
        self._num_rounds += 1
        self._progress.report(self.statistics.steps, self._num_rounds)
        if self._num_workers == 1:
            return
        size = self.weights.size
        vector = self._resized(size)
        self.weights.read(vector)
        if self._sent.numel() != size + 1:
            self._sent, self._received = self.weights.new(size + 1), self.weights.new(size + 1)
        torch.mul(vector, 0.5, out=self._sent[:-1])
        self._sent[-1] = self._push_weight / 2
        self._unbias()
        self._push_weight /= 2  # and x is halved with it
        with self._condition:
            self._under_way = self._to_add = True
        self._pushed.put(1 << (self._num_rounds - 1) % self._num_distances)
        if not self._overlap:
            self._bias()
            self._unbias()

    def _resized(self, size: int) -> torch.Tensor:
        if self._vector.numel() != size:
            self._vector = self.weights.new(size)
        return self._vector

    def _exchange(self) -> None:
        """Send and receive, on a thread."""
        me, within = self.mesh.worker, timedelta(seconds=self.worker.timeout_s)
        while (distance := self._pushed.get()) is not None:
            receiver, sender = (me + distance) % self._num_workers, (me - distance) % self._num_workers
            begin = time.perf_counter()
            try:
                works = [
                    dist.isend(self._sent, group=self._group, group_dst=receiver, tag=_TAG),
                    dist.irecv(self._received, group=self._group, group_src=sender, tag=_TAG),
                ]
                for work in works:
                    if work is not None:
                        work.wait(within)
            except (RuntimeError, MessageError) as error:
                self._progress.fail(f"exchange with ranks {sender} and {receiver}: {error}")
                continue
            sent_bytes = self._sent.numel() * self._sent.element_size()
            self.statistics.groups[2] += 1
            self.statistics.bytes_sent += sent_bytes
            self.statistics.average_s += time.perf_counter() - begin
            with self._condition:
                self._under_way = False
                self._condition.notify_all()
