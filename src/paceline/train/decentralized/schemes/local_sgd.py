"""Local SGD and DiLoCo: workers make some steps on their own, then all synchronise."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from paceline.errors import StepError, UsageError
from paceline.train.decentralized.schemes.scheme import Worker
from paceline.train.decentralized.schemes.synchronous import Synchronous


class LocalSGD(Synchronous):
    """After each ``local_steps`` steps of its own, every worker takes the mean of all workers' weights.

    A step sends 2 (n - 1) / n of the weights over ``local_steps``. Buffers, as BatchNorm's, are averaged with the
    weights. A worker that waits in ``finish`` or ``average`` counts in the next mean if it has made steps since the
    last one; it takes each mean, so it keeps up with the others. With ``total_steps`` the last period is shorter.
    """

    def __init__(self, worker: Worker, local_steps: int = 8) -> None:
        super().__init__(worker)
        if local_steps < 1:
            raise UsageError(f"local_steps is {local_steps}: a worker makes 1 step or more between two averages")
        self._local_steps = local_steps
        self._made = 0
        """Steps since the last average."""
        self._num_moved = 0
        """How many workers had made steps since the last average, when all met last."""
        self._period = self._next_period(self.num_workers)

    def after_step(self) -> None:
        """Average if that was the last step of this period."""
        self._made += 1
        if self._made >= self._period:
            self._meet(training=True)

    def answer(self) -> bool:
        """Take part in the others' next average."""
        return self._meet(training=False)

    @property
    def is_current(self) -> bool:
        """Whether this worker has made steps since the last average, or nobody has."""
        return self._made > 0 or self._num_moved == 0

    def take(self, mean: torch.Tensor) -> None:
        """Set the weights, after all have averaged theirs."""
        self.weights.write(mean[: self.weights.size])

    def _meet(self, training: bool) -> bool:
        """Average if anybody trains, and return whether."""
        begin = time.perf_counter()
        moved = self._made > 0
        told = torch.zeros(2 + self.num_workers, dtype=torch.float64, device=self.weights.device)
        told[0], told[1] = training, self._made
        told[2 + self.mesh.worker] = self.weights.size if moved else 0
        self.add_up(told)
        num_training, steps, *sizes = (int(number) for number in told.tolist())
        self._num_moved = sum(size > 0 for size in sizes)
        if not num_training:
            return False
        vector = self._own_vector(sizes)
        self.add_up(vector)
        self.take(vector.div_(self._num_moved))
        self.count_steps(steps)
        self._made = self._num_moved = 0
        self._period = self._next_period(num_training)
        vector_bytes = vector.numel() * vector.element_size()
        self.statistics.count_average(self.num_workers, vector_bytes, time.perf_counter() - begin)
        return True

    def _own_vector(self, sizes: list[int]) -> torch.Tensor:
        """Return this worker's weights, or zeros if it has made no steps: then it may lack the optimizer's state."""
        size = max(sizes)
        for worker, theirs in enumerate(sizes):
            if theirs not in (0, size):
                raise StepError(
                    f"worker {worker} averages {theirs} elements and others {size}: some of its parameters have had no "
                    "gradient yet, so the optimizer has no state for them; set average_state=False"
                )
        vector = self.weights.new(size)
        if self._made:
            self.weights.read(vector)
        else:
            vector.zero_()
        return vector

    def _next_period(self, num_training: int) -> int:
        left = self.steps_left
        return self._local_steps if not left else min(self._local_steps, -(-left // num_training))


class DiLoCo(LocalSGD):
    """After each ``local_steps`` steps the mean change of all workers' weights is a gradient of an outer optimizer.

    That is SGD with Nesterov momentum on the weights that all had after the last synchronisation (Douillard et al.,
    "DiLoCo", 2023). The inner optimizer is the user's; its state stays local. Buffers are averaged. What is
    sent and who counts is as with ``LocalSGD``. ``finish`` and ``average`` take the mean of the weights as they stand,
    without an outer step. Each worker holds the outer momentum, the same on all.
    """

    def __init__(
        self, worker: Worker, local_steps: int = 64, outer_lr: float = 0.7, outer_momentum: float = 0.9
    ) -> None:
        super().__init__(worker, local_steps)
        if not outer_lr > 0:
            raise UsageError(f"outer_lr is {outer_lr}: it must be above 0")
        if not 0 <= outer_momentum < 1:
            raise UsageError(f"outer_momentum is {outer_momentum}: it must be 0 or more and below 1")
        self._outer_lr, self._outer_momentum = outer_lr, outer_momentum
        self._synchronised = self.weights.new(self.weights.num_parameters)
        self.weights.read(self._synchronised)
        dist.broadcast(self._synchronised, group=self.group_mesh.group, group_src=0)  # they differ without init_sync
        self._momentum = torch.zeros_like(self._synchronised)

    def take(self, mean: torch.Tensor) -> None:
        """Make an outer step from the last synchronised weights."""
        parameters = mean[: self.weights.num_parameters]
        gradient = self._synchronised - parameters
        self._momentum.mul_(self._outer_momentum).add_(gradient)
        gradient.add_(self._momentum, alpha=self._outer_momentum)
        self._synchronised.sub_(gradient, alpha=self._outer_lr)
        parameters.copy_(self._synchronised)
        super().take(mean)
