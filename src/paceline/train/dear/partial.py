"""Steps of the user's optimizer on some of its parameters, with the hyper-parameters of an earlier moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

_PER_PARAMETER = (
    *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    *("Adafactor", "Muon"),
)
ELEMENTWISE = frozenset(_PER_PARAMETER[:-2])
"""Optimizers of torch.optim that treat every element by itself, so that any part of a tensor can be updated alone."""

PER_PARAMETER = frozenset(_PER_PARAMETER)
"""Optimizers of torch.optim that treat every parameter by itself, so that buckets can be updated one by one."""


def is_torch(optimizer: Optimizer, names: frozenset[str]) -> bool:
    """Whether the optimizer is exactly one of these of PyTorch's own; a subclass may do anything."""
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ in names


class PartialStep:
    """Lends the optimizer other groups (and state) for the time of a step; its hooks are not run."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        step: Any = type(optimizer).step
        self._step = step.__wrapped__ if getattr(step, "hooked", False) else step

    def hyper_parameters(self) -> list[dict[str, Any]]:
        """Of each group, as they are now: a scheduler may change them before they are used."""
        return [
            {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def run(
        self,
        hyper_parameters: Sequence[dict[str, Any]],
        parameters: Sequence[Sequence[torch.Tensor]],
        state: Any = None,
    ) -> None:
        """One step on these parameters, given by group; ``state`` takes the place of the optimizer's own."""
        groups = [
            {**hyper, "params": list(some)} for hyper, some in zip(hyper_parameters, parameters, strict=True) if some
        ]
        if not groups:
            return
        optimizer = self._optimizer
        own_groups, own_state = optimizer.param_groups, optimizer.state
        optimizer.param_groups = groups
        if state is not None:
            optimizer.state = state
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = own_groups, own_state
