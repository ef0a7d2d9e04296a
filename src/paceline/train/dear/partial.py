"""Steps of the user's optimizer on some of its parameters, with the hyper-parameters of an earlier moment."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.train.dear.optimizer_state import raw_state

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


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class PartialStep:
    """Steps of a double of the optimizer, with other groups (and state); hooks are not run.

    The user's optimizer keeps its groups, as another thread may be reading them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        step: Any = type(optimizer).step
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        if is_torch(optimizer, PER_PARAMETER) and not optimizer.defaults.get("differentiable"):
            step = getattr(step, "__wrapped__", step)  # gradients are not recorded anyhow
        self._step = step

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
        state = raw_state(optimizer.state if state is None else state)
        lent = {**vars(optimizer), "param_groups": groups, "state": state}
        lent.update({key: OrderedDict() for key in _HOOKS})  # a subclass that calls super().step() would run them
        double = object.__new__(type(optimizer))
        vars(double).update(lent)
        self._step(double)
        for name, value in vars(double).items():
            if value is not lent.get(name):  # an optimizer may keep something in itself, like a count of its steps
                vars(optimizer)[name] = value
