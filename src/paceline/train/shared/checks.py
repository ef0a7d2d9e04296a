"""What must hold of a module and its optimizer before a wrapper takes them, in sentences that say what to do."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.errors import UnsupportedError, UsageError


def check_arguments(module: object, optimizer: object, wrapper: str, instead: str = "") -> None:
    """Check the types of what a wrapper is given; ``instead`` says what to do about an optimizer that is none."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"{wrapper} wraps a torch.nn.Module, not {type(module).__name__}")
    if isinstance(optimizer, (list, tuple)):
        raise UsageError(f"{wrapper} takes one optimizer: put the parameters of all into one, as parameter groups")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"{wrapper} takes the optimizer of the module's parameters: {wrapper}(module, optimizer), "
            f"not {type(optimizer).__name__}"
        )
    if "param_groups" not in vars(optimizer):
        inner = type(getattr(optimizer, "optimizer", None)).__name__
        raise UsageError(
            f"{type(optimizer).__name__} only passes calls on to another optimizer ({inner}): give that one to "
            f"{wrapper} first, and wrap it afterwards{instead}"
        )


def check_parameters(module: nn.Module, optimizer: Optimizer, wrapper: str) -> None:
    """The module's parameters that are trained and the optimizer's are the same, and such that can be sent."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if theirs - names.keys():
        raise UsageError(
            f"{len(theirs - names.keys())} of the optimizer's parameters are not the module's: make the optimizer with "
            "module.parameters(), after any change to the module and before wrapping it"
        )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise UsageError(f"parameter {name} is not initialised: run the lazy module once before wrapping it")
        if isinstance(parameter, DTensor):
            raise UnsupportedError(f"parameter {name} is a DTensor: {wrapper} takes whole parameters")
        if parameter.requires_grad and id(parameter) not in theirs:
            raise UsageError(
                f"parameter {name} requires a gradient and is not in the optimizer: add it to the optimizer, or set "
                "its requires_grad to False"
            )
        if parameter.requires_grad and not _is_dense(parameter):
            raise UnsupportedError(
                f"parameter {name} has strides {parameter.stride()} with gaps or overlaps: make it contiguous"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise UsageError("no parameter of the module requires a gradient: there is nothing to train")
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) is True and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise UnsupportedError(f"module {name} makes sparse gradients: use sparse=False")


def check_alike(module: nn.Module, group: Any) -> None:
    """All ranks have the same model."""
    mine = _shapes(module)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip(everyone[0], theirs, strict=False)
            first = next(((a, b) for a, b in pairs if a != b), (len(everyone[0]), len(theirs)))
            raise UsageError(
                f"rank {rank} has another model than rank 0: {first[1]} where rank 0 has {first[0]}; build the same "
                "on all"
            )


def fingerprint(module: nn.Module) -> str:
    """Return a few words that differ for models that differ in size, names or types."""
    parameters = list(module.parameters())
    digest = hashlib.sha256(repr(_shapes(module)).encode()).hexdigest()[:16]
    return f"{len(parameters)} parameters, {sum(one.numel() for one in parameters)} elements, digest {digest}"


def _shapes(module: nn.Module) -> list[Any]:
    return [
        (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad, parameter.stride())
        for name, parameter in module.named_parameters()
    ] + [(name, tuple(buffer.shape), str(buffer.dtype), False, ()) for name, buffer in module.named_buffers()]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
