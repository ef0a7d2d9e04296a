"""All-reduce: synchronous data parallel training, as DistributedDataParallel does it, without overlap."""

from __future__ import annotations

import time

import torch

from paceline.errors import UsageError
from paceline.train.dear.partial import PartialStep
from paceline.train.decentralized.schemes.scheme import Worker
from paceline.train.decentralized.schemes.synchronous import Synchronous


class AllReduce(Synchronous):
    """All workers average their gradients before each step, so they have the same weights.

    A step sends 2 (n - 1) / n of the gradients: one vector, after the backward pass. The mean is that of the workers
    that train. One that waits in ``finish`` or ``average`` meanwhile makes the same steps with the mean of the others'
    gradients, so it keeps their weights and their state of the optimizer (not their schedulers).

    Buffers, as BatchNorm's, are each worker's own until ``finish``. A missing gradient counts as zero.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._vector = self.weights.new(self.weights.num_parameters + 1)
        self._trained_last = True
        self._reduced = False

    def before_step(self) -> None:
        """Make the gradients the mean of all that train."""
        self.weights.read_gradients(self._gradients)
        self._reduce(training=True)
        self.weights.write_gradients(self._gradients)
        self._reduced = True

    def after_step(self) -> None:
        """The gradients were those of all."""
        if not self._reduced:
            raise UsageError(
                'scheme "allreduce" averages gradients before the step: call optimizer.step() without a closure'
            )
        self._reduced = False

    def answer(self) -> bool:
        """Make the others' next step."""
        self._gradients.zero_()
        num_training = self._reduce(training=False)
        if num_training:
            self._follow()
        return num_training > 0

    @property
    def is_current(self) -> bool:
        """Whether this worker made the last step itself."""
        return self._trained_last

    @property
    def _gradients(self) -> torch.Tensor:
        return self._vector[:-1]

    def _reduce(self, training: bool) -> int:
        """Average the gradients of all that train, and return how many did."""
        begin = time.perf_counter()
        self._vector[-1] = training
        self.add_up(self._vector)
        num_training = int(self._vector[-1])
        if num_training:
            self._gradients.div_(num_training)
            self._trained_last = training
            vector_bytes = self._vector.numel() * self._vector.element_size()
            self.statistics.count_average(self.num_workers, vector_bytes, time.perf_counter() - begin)
        self.count_steps(num_training)
        return num_training

    def _follow(self) -> None:
        """Make the optimizer's step with the others' gradients; this worker's own stay as they are."""
        weights, optimizer = self.weights, self.worker.optimizer
        own = [parameter.grad for parameter in weights.parameters]
        for parameter in weights.parameters:
            parameter.grad = None
        weights.write_gradients(self._gradients)
        step = PartialStep(optimizer)
        weights.begin_step()
        try:
            with torch.no_grad():
                step.run(step.hyper_parameters(), [group["params"] for group in optimizer.param_groups])
        finally:
            weights.end_step()
            for parameter, gradient in zip(weights.parameters, own, strict=True):
                parameter.grad = gradient
