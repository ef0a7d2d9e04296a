"""Accelerate trains with ``paceline.DataParallel``: ``prepare(accelerator, model, optimizer)``."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.train.dear.wrapper import DataParallel


def prepare(accelerator: Any, model: nn.Module, optimizer: Optimizer, *others: Any, **options: Any) -> tuple[Any, ...]:
    """``accelerator.prepare(model, optimizer, *others)`` with ``paceline.DataParallel`` in the place of DDP::

        dist.init_process_group("paceline")
        accelerator = Accelerator(cpu=True)
        model, optimizer, batches = prepare(accelerator, model, optimizer, batches, sharded=True)

    ``options`` are those of DataParallel. ``model.module`` is the module itself.
    """
    if getattr(accelerator.state.dynamo_plugin.backend, "value", "NO") != "NO":
        raise UsageError("Accelerator(dynamo_backend=...) would compile DataParallel: give prepare() a compiled module")
    wrapped: Any = DataParallel(model.to(accelerator.device), optimizer, **options)
    wrapped = accelerator.prepare_model(wrapped, evaluation_mode=True)  # autocast, and no DDP
    wrapped._is_accelerate_prepared = True
    return tuple(accelerator.prepare(wrapped, optimizer, *others))
