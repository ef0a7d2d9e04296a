"""Whose a parameter is: what would train something else than was meant is an error, at the line that does it."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import UsageError

_optimizer_of: Any = WeakIdKeyDictionary()
"""The optimizer, by parameter and by module."""
_wrapper_of: Any = WeakIdKeyDictionary()
"""The name of the wrapper, by parameter and by module."""
_watching = False
_changes = 0
_found_right: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Optimizers that were looked at: after how many changes of ownership, with how many parameters."""


def check_free(module: nn.Module, wrapper: str) -> None:
    """Nobody has this module's parameters, and nobody else reduces their gradients."""
    for part in module.modules():
        if _reduces(part):
            kind = type(part).__name__
            raise UsageError(
                f"{wrapper} around {kind} would reduce gradients twice: wrap the module that {kind} was given"
            )
    for name, parameter in module.named_parameters():
        if _is_owned(parameter):
            raise UsageError(
                f"{name} is in another {_wrapper_of[parameter]} already: close() that one, or wrap a module once"
            )


def own(module: nn.Module, optimizer: Optimizer, wrapper: str) -> None:
    """Make this module's parameters this optimizer's, in a wrapper of this name."""
    global _watching, _changes
    _changes += 1
    for part in (*module.modules(), *module.parameters()):
        _optimizer_of[part] = weakref.ref(optimizer)
        _wrapper_of[part] = wrapper
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_check_step)
        register_module_parameter_registration_hook(_check_parameter)
        register_module_module_registration_hook(_check_module)


def disown(module: nn.Module) -> None:
    """The module is nobody's again."""
    global _changes
    _changes += 1
    for part in (*module.modules(), *module.parameters()):
        _optimizer_of.pop(part, None)
        _wrapper_of.pop(part, None)


def _is_owned(part: object) -> bool:
    owner = _optimizer_of.get(part)
    return owner is not None and owner() is not None


def _reduces(module: object) -> bool:
    """Whether it is one of PyTorch's wrappers, which reduce gradients themselves."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # slow to import
    kinds = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    return isinstance(module, (DistributedDataParallel, *kinds))


def _check_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    now = _changes, sum(len(group["params"]) for group in optimizer.param_groups)
    if _found_right.get(optimizer) == now:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = _optimizer_of.get(parameter)
            if owner is not None and owner() is not None and owner() is not optimizer:
                raise UsageError(
                    f"this optimizer has parameters of a {_wrapper_of[parameter]} made with another optimizer: use one "
                    "optimizer with several parameter groups"
                )
    _found_right[optimizer] = now


def _check_parameter(module: nn.Module, name: str, parameter: object) -> None:
    if module in _optimizer_of and isinstance(parameter, torch.Tensor):
        raise UsageError(
            f"parameter {name!r} is added or replaced in a module that {_wrapper_of[module]} has wrapped: change the "
            "module first, then wrap it (load_state_dict without assign=True keeps the parameters), once: in "
            f"{_wrapper_of[module]} or FSDP"
        )


def _check_module(module: nn.Module, name: str, submodule: object) -> None:
    if not isinstance(submodule, nn.Module):
        return
    if _reduces(module) and any(map(_is_owned, (*submodule.modules(), *submodule.parameters()))):
        kind = type(module).__name__
        raise UsageError(
            f"{kind} around paceline.{_wrapper_around(submodule)} would reduce gradients twice: wrap the module once, "
            f"without {kind} "
            '(in a framework: docs/dear.md, "Under frameworks")'
        )
    if module in _optimizer_of and not _same_parameters(submodule):
        raise UsageError(
            f"module {name!r} with parameters is added to a module that {_wrapper_of[module]} has wrapped: change the "
            "module first, then wrap it"
        )


def _wrapper_around(module: nn.Module) -> str:
    return str(next(_wrapper_of[part] for part in (*module.modules(), *module.parameters()) if part in _wrapper_of))


def _same_parameters(module: nn.Module) -> bool:
    """Whether all are known: a compiled form of a wrapped module."""
    return all(parameter in _optimizer_of for parameter in module.parameters())
