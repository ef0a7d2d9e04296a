"""What must hold before and while training, in sentences that say what to do."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.errors import UnsupportedError, UsageError
from paceline.train.dear.partial import ELEMENTWISE, is_torch


def check_sharding(optimizer: Optimizer, elementwise: bool | None) -> None:
    """Whether pieces of a parameter can be updated alone."""
    if elementwise is None:
        elementwise = is_torch(optimizer, ELEMENTWISE)
    if not elementwise:
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not known to treat every element by itself, which sharded=True needs: use "
            "sharded=False, or, if you know that it does, pass elementwise=True"
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
