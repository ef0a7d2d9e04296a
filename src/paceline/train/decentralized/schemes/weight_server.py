"""Parameter servers: they hold the weights and the optimizer's state, and make steps with gradients that come in.

A message to the server is one vector: gradients, buffers, and what it is for (``STEP`` to ``LEAVE``). The server's
answer is one, too: weights, buffers, and three numbers: how many gradients made the last step, whether training is
over, and a status. Buffers, as BatchNorm's, count only in messages that ask for a mean.

A worker is in one of these phases, by its last message:

    phase       the others' gradients       its answer comes
    TRAINING    wait for it                 when the server's rule allows: see the classes
    PAUSED      do not                      when nobody trains; then it is TRAINING again
    ENDED       do not                      when all have ended
"""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.train.dear.partial import PartialStep
from paceline.train.decentralized.weights import Weights

STEP, AVERAGE, END, LEAVE = range(4)
"""What a message is for: a gradient, a mean for ``average()``, for ``finish()``; LEAVE gets no answer."""

MESSAGE_EXTRA, ANSWER_EXTRA = 1, 3
"""Elements after the weights. An answer's are the number of gradients, done, and the status."""

ALIVE, FAILED = 0, -1
"""A status; above zero it is that worker's number plus one, who is lost."""

TRAINING, PAUSED, ENDED = "training", "paused", "ended"


class WeightServer(ABC):
    """Holds the weights, in one vector of float32 (or float64), and its own state of the user's optimizer.

    A step uses the hyper-parameters that the optimizer has on worker 0 at that time. ``submit`` takes a worker's
    message, and ``answer`` waits for the answer to it; each worker has a thread that calls them in turn.
    """

    def __init__(self, weights: Weights, optimizer: Optimizer, num_workers: int, total_steps: int | None) -> None:
        self._num_parameters, self._num_weights = weights.num_parameters, weights.num_weights
        self._total_steps = total_steps
        self._optimizer = optimizer
        self._vector = weights.new(self._num_weights + ANSWER_EXTRA).zero_()
        weights.read(self._vector[: self._num_weights])
        self._shapes = [parameter.shape for parameter in weights.parameters]
        self._own: dict[torch.Tensor, nn.Parameter] = {
            parameter: nn.Parameter(view)
            for parameter, view in zip(weights.parameters, self._split(self._vector), strict=True)
        }
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        for parameter, own in self._own.items():
            if parameter in optimizer.state:
                self._state[own] = _copied(optimizer.state[parameter], own)
        self._partial = PartialStep(optimizer)
        self._changed = threading.Condition()
        self._steps_of_all = 0
        self._done = False
        self._buffers: dict[int, torch.Tensor] = {}
        self._phases: dict[int, str] = dict.fromkeys(range(num_workers), TRAINING)
        self._answered: set[int] = set()
        self.failure: Exception | str | None = None
        """Why no step is made any more."""

    # What workers' threads call.

    def submit(self, worker: int, message: torch.Tensor) -> int:
        """Take a worker's message, and return what it is for. It must stay as it is until the answer is there."""
        kind = int(message[-1])
        with self._changed:
            if self.failure is None:
                try:
                    self._submit(worker, kind, message)
                except Exception as error:
                    self._fail(error, FAILED)
            self._changed.notify_all()
        return kind

    def answer(self, worker: int) -> torch.Tensor:
        """Wait for the answer to a worker's message. It stays as it is until the worker's next message."""
        with self._changed:
            self._changed.wait_for(lambda: worker in self._answered or self.failure is not None)
            self._answered.discard(worker)
            return self.outgoing(worker)

    def lose(self, worker: int, reason: str) -> None:
        """A worker cannot be reached any more."""
        with self._changed:
            if self._phases.pop(worker, ENDED) != ENDED and self.failure is None:
                self.on_lost(worker, reason)
                self._advance()
            self._changed.notify_all()

    def close(self) -> None:
        """End with an error for those who still need the server."""
        with self._changed:
            if self.failure is None:
                self._fail("worker 0 has left the training, and the parameter server with it", FAILED)
            self._changed.notify_all()

    def hand_back_state(self) -> None:
        """Give the state to the user's optimizer, on worker 0."""
        for parameter, own in self._own.items():
            if own in self._state:
                self._optimizer.state[parameter] = _copied(self._state[own], parameter)

    # The rules, under the lock.

    @abstractmethod
    def take(self, worker: int, gradient: torch.Tensor) -> None:
        """A gradient has come in."""

    @abstractmethod
    def allowed(self) -> set[int]:
        """Make the steps that can be made, and return the workers whose gradients can be answered now."""

    @abstractmethod
    def outgoing(self, worker: int) -> torch.Tensor:
        """Return a vector with the answer that does not change until this worker's next message."""

    @abstractmethod
    def on_lost(self, worker: int, reason: str) -> None:
        """A worker was lost."""

    def on_resumed(self) -> None:  # noqa: B027  # most rules remember nothing
        """All workers that have not ended go on after ``average``."""

    @property
    def training(self) -> list[int]:
        """The workers whose next gradient will come."""
        return [worker for worker, phase in sorted(self._phases.items()) if phase == TRAINING]

    def step(self, gradient: torch.Tensor, num_gradients: int) -> None:
        """Make a step of the optimizer with a mean of gradients, which holds anything afterwards."""
        for own, view in zip(self._own.values(), self._split(gradient), strict=True):
            own.grad = view
        groups = [
            [self._own[one] for one in group["params"] if one in self._own] for group in self._optimizer.param_groups
        ]
        with torch.no_grad():
            self._partial.run(self._partial.hyper_parameters(), groups, self._state)
        self._steps_of_all += num_gradients
        self._done = self._total_steps is not None and self._steps_of_all >= self._total_steps
        self._vector[-3] = num_gradients
        self._vector[-2] = self._done

    def fail_for(self, worker: int, reason: str) -> None:
        """End the training because a worker is lost."""
        self._fail(f"worker {worker} is lost: {reason}", worker + 1)

    def _submit(self, worker: int, kind: int, message: torch.Tensor) -> None:
        if kind == LEAVE:
            self._phases.pop(worker, None)
        elif kind == STEP:
            if self._done:
                self._answered.add(worker)
            else:
                self.take(worker, message[: self._num_parameters])
        else:
            self._buffers[worker] = message[self._num_parameters : self._num_weights].clone()
            self._phases[worker] = PAUSED if kind == AVERAGE else ENDED
        self._advance()

    def _advance(self) -> None:
        self._answered |= self.allowed()
        if self.training or not self._phases:
            return
        buffers = [self._buffers[worker] for worker in sorted(self._phases)]
        torch.mean(torch.stack(buffers), 0, out=self._vector[self._num_parameters : self._num_weights])
        paused = [worker for worker, phase in self._phases.items() if phase == PAUSED]
        self._answered.update(paused or self._phases)
        self._phases.update(dict.fromkeys(paused, TRAINING))
        self.on_resumed()

    def _fail(self, reason: Exception | str, status: int) -> None:
        self.failure = reason
        self._vector[-1] = status

    def _split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(vector[: self._num_parameters], [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


class BulkServer(WeightServer):
    """Makes a step when all workers that train have sent their gradients: with the mean of these."""

    def __init__(self, weights: Weights, optimizer: Optimizer, num_workers: int, total_steps: int | None) -> None:
        super().__init__(weights, optimizer, num_workers, total_steps)
        self._waiting: dict[int, torch.Tensor] = {}
        self._sum = weights.new(self._num_parameters)

    def take(self, worker: int, gradient: torch.Tensor) -> None:
        """Keep it for the others'."""
        self._waiting[worker] = gradient

    def allowed(self) -> set[int]:
        """Make a step once all have come; all are answered together."""
        training = self.training
        if not training or self._waiting.keys() != set(training):
            return set()
        self._sum.copy_(self._waiting[training[0]])
        for worker in training[1:]:  # in this order, so that sums have the same bits in every run
            self._sum.add_(self._waiting[worker])
        self._waiting.clear()
        self.step(self._sum.div_(len(training)), len(training))
        return set(training)

    def outgoing(self, worker: int) -> torch.Tensor:  # noqa: ARG002  # the same for all
        """Return the weights themselves: they change when all have sent their next message."""
        return self._vector

    def on_lost(self, worker: int, reason: str) -> None:
        """End the training: all are needed."""
        self._waiting.pop(worker, None)
        self.fail_for(worker, reason)


class BoundedServer(WeightServer):
    """Makes a step with each gradient as it comes; a worker waits while it leads the slowest by too many."""

    def __init__(
        self, weights: Weights, optimizer: Optimizer, num_workers: int, total_steps: int | None, staleness: int
    ) -> None:
        super().__init__(weights, optimizer, num_workers, total_steps)
        self._staleness = staleness
        self._clocks = dict.fromkeys(range(num_workers), 0)
        self._waiting: set[int] = set()
        self._outgoing = {worker: torch.empty_like(self._vector) for worker in range(num_workers)}

    def take(self, worker: int, gradient: torch.Tensor) -> None:
        """Make a step with it."""
        self.step(gradient, 1)
        self._clocks[worker] += 1
        self._waiting.add(worker)

    def allowed(self) -> set[int]:
        """All that do not lead the slowest by too much; everybody once training is over."""
        slowest = min((self._clocks[worker] for worker in self.training), default=0)
        allowed = {
            worker for worker in self._waiting if self._done or self._clocks[worker] - slowest <= self._staleness
        }
        self._waiting -= allowed
        return allowed

    def outgoing(self, worker: int) -> torch.Tensor:
        """Return a copy: the others' gradients change the weights meanwhile."""
        return self._outgoing[worker].copy_(self._vector)

    def on_lost(self, worker: int, reason: str) -> None:  # noqa: ARG002  # nothing depends on it
        """Go on without it."""
        self._waiting.discard(worker)

    def on_resumed(self) -> None:
        """Nobody leads any more."""
        self._clocks = dict.fromkeys(self._clocks, 0)


def _copied(state: dict[str, Any], owner: torch.Tensor) -> dict[str, Any]:
    """Return a copy of a parameter's state; what belongs to its elements gets its type."""
    copied: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            elements = value.is_floating_point() and value.shape == owner.shape and value.dim() > 0
            copied[key] = value.detach().to(owner.dtype if elements else value.dtype, copy=True)
        else:
            copied[key] = copy.deepcopy(value)
    return copied
