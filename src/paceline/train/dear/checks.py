"""What must hold before and while training, in sentences that say what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from paceline.errors import UnsupportedError, UsageError
from paceline.train.dear.groups import Groups
from paceline.train.dear.partial import ELEMENTWISE, is_torch

Named = Sequence[tuple[str, nn.Parameter]]


def check_arguments(module: object, optimizer: object) -> None:
    """Of the constructor."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"DataParallel wraps a torch.nn.Module, not {type(module).__name__}")
    if isinstance(optimizer, (list, tuple)):
        raise UsageError("DataParallel takes one optimizer: put the parameters of all into one, as parameter groups")
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            "DataParallel takes the optimizer of the module's parameters: DataParallel(module, optimizer), "
            f"not {type(optimizer).__name__}"
        )
    if "param_groups" not in vars(optimizer):
        inner = type(getattr(optimizer, "optimizer", None)).__name__
        raise UsageError(
            f"{type(optimizer).__name__} only passes calls on to another optimizer ({inner}): give that one to "
            "DataParallel first, and wrap it afterwards (with Accelerate: paceline.integrations.accelerate.prepare)"
        )


def check_parameters(module: nn.Module, optimizer: Optimizer) -> None:
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
            raise UnsupportedError(f"parameter {name} is a DTensor: DataParallel takes whole parameters")
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


def check_sharding(optimizer: Optimizer, elementwise: bool | None) -> None:
    """Whether pieces of a parameter can be updated alone."""
    if elementwise is None:
        elementwise = is_torch(optimizer, ELEMENTWISE)
    if not elementwise:
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not known to treat every element by itself, which sharded=True needs: use "
            "sharded=False, or, if you know that it does, pass elementwise=True"
        )


def check_alike(module: nn.Module, groups: Groups) -> None:
    """All ranks have the same model."""
    mine = [
        (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad, parameter.stride())
        for name, parameter in module.named_parameters()
    ] + [(name, tuple(buffer.shape), str(buffer.dtype), False, ()) for name, buffer in module.named_buffers()]
    everyone: list[Any] = [None] * groups.num_ranks
    dist.all_gather_object(everyone, mine, group=groups.reduce)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip(everyone[0], theirs, strict=False)
            first = next(((a, b) for a, b in pairs if a != b), (len(everyone[0]), len(theirs)))
            raise UsageError(
                f"rank {rank} has another model than rank 0: {first[1]} where rank 0 has {first[0]}; build the same "
                "on all"
            )


class Watch:
    """Notices when what was wrapped is changed later."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, *, sharded: bool) -> None:
        self._optimizer = optimizer
        self._strides = (
            [(name, one, one.stride()) for name, one in module.named_parameters() if one.requires_grad]
            if sharded  # where pieces of a parameter are stretches of its memory
            else []
        )
        self._expected = [
            (name, parameter, parameter.requires_grad, parameter.dtype, parameter.device, parameter.shape)
            for name, parameter in module.named_parameters()
        ]
        self._places = [
            (f"{prefix}.{name}".lstrip("."), part._parameters, name, parameter)
            for prefix, part in module.named_modules()
            if not isinstance(part, torch.jit.ScriptModule)
            for name, parameter in part._parameters.items()
        ]
        self._num_parameters = [len(group["params"]) for group in optimizer.param_groups]

    def check(self) -> None:
        """Before a step."""
        if [len(group["params"]) for group in self._optimizer.param_groups] != self._num_parameters:
            raise UsageError(
                "the optimizer has other parameters than when it was wrapped: add parameter groups before DataParallel"
            )
        for path, parameters, name, parameter in self._places:
            if parameters.get(name) is not parameter:
                raise UsageError(
                    f"parameter {path} was replaced after it was wrapped, as fully_shard does: change the module "
                    "first, then wrap it once"
                )
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, requires_grad, dtype, device, shape in self._expected:
                if parameter.requires_grad != requires_grad:
                    raise UsageError(
                        f"requires_grad of {name} is {parameter.requires_grad}, and was {requires_grad} when it was "
                        "wrapped: freeze and unfreeze before DataParallel, or wrap anew"
                    )
                if parameter.dtype != dtype or parameter.device != device or parameter.shape != shape:
                    raise UsageError(
                        f"{name} is {parameter.dtype} on {parameter.device}, and was {dtype} on {device} when it was "
                        "wrapped: move and convert the module before DataParallel"
                    )
            for name, parameter, stride in self._strides:
                if parameter.stride() != stride:
                    raise UsageError(
                        f"{name} has strides {parameter.stride()}, and had {stride} when it was wrapped with "
                        "sharded=True: convert the module, as to channels_last, before DataParallel"
                    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
