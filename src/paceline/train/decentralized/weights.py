"""A model's weights and gradients as one vector, and the lock that keeps them whole while they are read."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import UsageError

_NOT_NEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "eta", "step_size")
"""Keys of optimizers' state that holds no negative numbers: their roots divide, or they are step sizes."""

_LEAST_LEFT = 0.25
"""What averages leave of such a number at the least."""


class Weights:
    """What workers average: trained parameters, floating-point buffers and, on request, the optimizer's state.

    The vector has the trained parameters first, in the order of ``module.parameters()``, then the buffers (such as
    BatchNorm's statistics), then the state. Frozen parameters and integer buffers stay as they are.

    Any thread may call ``read``, ``write`` and ``add``. They wait while the optimizer's step is under way
    (``begin_step`` to ``end_step``), so nobody sees half an update. Forward and backward passes only read weights.
    Only the training thread should write, between steps: a backward pass needs the weights of its forward pass.
    A thread that waits gets its turn before the next step begins, however soon that is.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, *, average_state: bool = False) -> None:
        self._optimizer = optimizer
        self._average_state = average_state
        self.parameters = [one for one in module.parameters() if one.requires_grad]
        self._buffers = [one for one in module.buffers() if one.is_floating_point()]
        self._state: list[torch.Tensor] = []
        self._not_negative: list[bool] = []  # by tensor of the state: whether its numbers may not become negative
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # held by who waits for the lock
        self._held: torch.Tensor | None = None
        self.device = self.parameters[0].device
        wide = any(one.dtype == torch.float64 for one in self.parameters)
        self.dtype = torch.float64 if wide else torch.float32
        self.num_parameters = _count(self.parameters)
        self.num_weights = self.num_parameters + _count(self._buffers)

    @property
    def size(self) -> int:
        """Elements of the whole vector, with the optimizer's state if that is averaged."""
        return self.num_weights + _count(self._state)

    def new(self, size: int | None = None) -> torch.Tensor:
        """Return an uninitialised vector of ``size`` elements (default: the whole)."""
        return torch.empty(self.size if size is None else size, dtype=self.dtype, device=self.device)

    # The weights.

    def read(self, into: torch.Tensor) -> None:
        """Copy the weights into a vector, which may be shorter than the whole: then it gets the first part."""
        with self._turn, self._lock, torch.no_grad():
            if self._held is not None:
                into.copy_(self._held[: into.numel()])
            else:
                self._read(into)

    def write(self, vector: torch.Tensor) -> None:
        """Set the weights, or the first part of them, to a vector's."""
        with self._turn, self._lock, torch.no_grad():
            if self._held is not None:
                self._held[: vector.numel()].copy_(vector)
            else:
                self._write(vector)

    def add(self, vector: torch.Tensor) -> None:
        """Add a vector to the weights, or to the first part of them.

        Second moments in the optimizer's state do not become negative: at least a quarter of each number is left.
        """
        with self._turn, self._lock, torch.no_grad():
            if self._held is not None:
                self._held[: vector.numel()].add_(vector)
                return
            tensors, views = self._cut(vector)
            bounded = [one for one, not_negative in zip(self._state, self._not_negative, strict=True) if not_negative]
            floors = [one * _LEAST_LEFT for one in bounded] if bounded and vector.numel() > self.num_weights else []
            torch._foreach_add_(tensors, [_cast(view, one) for view, one in zip(views, tensors, strict=True)])
            if floors:
                torch._foreach_maximum_(bounded, floors)

    def difference(self, mean: torch.Tensor, snapshot: torch.Tensor) -> torch.Tensor:
        """Turn a mean into what ``add`` takes: mean - snapshot. Buffers that are infinite, as masks are, stay so."""
        mean.sub_(snapshot)
        mean[self.num_parameters : self.num_weights].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return mean

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other thread read or write the weights in here."""
        with self._turn, self._lock:
            yield

    def begin_step(self) -> None:
        """The optimizer is about to change the weights."""
        if not self._stepping:  # else the last step ended by an exception
            with self._turn:
                self._lock.acquire()
            self._stepping = True

    def end_step(self) -> None:
        """The optimizer's step has ended, also by an exception. No effect if none was under way."""
        if self._stepping:
            self._stepping = False
            self._lock.release()
            if self._average_state:
                self._find_state()

    _stepping = False

    def show(self, vector: torch.Tensor) -> None:
        """Put other weights into the module until ``restore``; meanwhile others read and change a copy of its own."""
        self.check_own()
        with self._turn, self._lock, torch.no_grad():
            held = self.new()
            self._read(held)
            self._held = held
            self._write(vector)

    def check_own(self) -> None:
        """Raise an error if the module shows other weights than its own."""
        if self._held is not None:
            raise UsageError("averaged() is under way already: leave that one first")

    def restore(self) -> None:
        """Put the module's own weights back."""
        with self._turn, self._lock, torch.no_grad():
            held, self._held = self._held, None
            if held is not None:
                self._write(held)

    # Gradients: of the trained parameters alone. The training thread calls these.

    def read_gradients(self, into: torch.Tensor) -> None:
        """Copy the gradients into a vector of ``num_parameters`` elements. A missing gradient counts as zero."""
        with torch.no_grad():
            for view, parameter in zip(_split(into, self.parameters), self.parameters, strict=True):
                if parameter.grad is None:
                    view.zero_()
                else:
                    view.copy_(parameter.grad)

    def write_gradients(self, vector: torch.Tensor) -> None:
        """Set the gradients to a vector's."""
        with torch.no_grad():
            for view, parameter in zip(_split(vector, self.parameters), self.parameters, strict=True):
                if parameter.grad is None:
                    parameter.grad = view.to(parameter.dtype, copy=True)
                else:
                    parameter.grad.copy_(view)

    def _find_state(self) -> None:
        """Find the tensors of the optimizer's state that belong to elements of parameters, as momentum does.

        After each step: ``optimizer.load_state_dict`` puts others in their place.
        """
        found = [
            (state[key], key in _NOT_NEGATIVE)
            for parameter in self.parameters
            for state in (self._optimizer.state.get(parameter, {}),)
            for key in sorted(state, key=str)
            if isinstance(state[key], torch.Tensor)
            and state[key].is_floating_point()
            and state[key].shape == parameter.shape
            and state[key].dim() > 0
        ]
        with self._turn, self._lock:
            self._state = [tensor for tensor, _ in found]
            self._not_negative = [not_negative for _, not_negative in found]

    def _cut(self, vector: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors that a vector stands for, and its parts of their shapes."""
        tensors: list[torch.Tensor] = []
        left = vector.numel()
        for one in (*self.parameters, *self._buffers, *self._state):
            if left <= 0:
                break
            tensors.append(one.detach())
            left -= one.numel()
        return tensors, _split(vector, tensors)

    def _read(self, into: torch.Tensor) -> None:
        tensors, views = self._cut(into)
        torch._foreach_copy_(views, tensors)

    def _write(self, vector: torch.Tensor) -> None:
        tensors, views = self._cut(vector)
        torch._foreach_copy_(tensors, views)


def _count(tensors: Sequence[torch.Tensor]) -> int:
    return sum(math.prod(one.shape) for one in tensors)


def _split(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(vector, [one.numel() for one in like])
    return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def _cast(view: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return view if view.dtype == one.dtype else view.to(one.dtype)
