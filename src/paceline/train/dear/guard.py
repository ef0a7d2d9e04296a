"""Nobody reads a parameter whose new value has not arrived: for that long it is of a class that looks first.

While a bucket is under way its parameters are of a subclass of their class, whose ``__torch_function__`` is called
before any operation sees the parameter: as an argument, in a list of arguments, as the object of a method, or for an
attribute like ``data``. So weights cannot be used stale by a module, by a function outside of its module, by
state_dict(), deepcopy, pickle, printing, an optimizer, or a bare ``w.sum()``; and the first use is seen exactly once,
whoever it is. Outside of that time the parameter is of its own class and costs nothing.

The forward() of a ``torch.autograd.Function`` gets the guarded parameter itself, so what it does is seen too.

What C++ does without asking Python is not seen: aliases taken earlier (``w.detach()``, ``w.data``, ``w.numpy()``), a
bare parameter given to a c10d collective, to a function of a C++ extension (also in a ``torch.autograd.Function``), or
as an argument to what ``torch.func`` has transformed; scripted and compiled modules. For the last two see
:mod:`.opaque`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

_GRAD: Any = torch.Tensor.grad
GRAD_GET, GRAD_SET, GRAD_DELETE = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim", "names", "itemsize"),
    *("nbytes", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_meta", "is_mkldnn", "is_xla", "is_mps", "is_xpu"),
    *("retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "name", "_version"),
)
_METHODS = (
    *("size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "is_contiguous", "type"),
    *(
        "is_floating_point",
        "is_complex",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "get_device",
        "__len__",
    ),
    *("requires_grad_", "__hash__", "is_same_size", "is_signed", "retain_grad"),
)
METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _METHODS]
)
"""What can be asked of a parameter without looking at its values. ``type`` with an argument makes a copy, see below."""


class Keeper(Protocol):
    """Who knows what is under way."""

    def about_to_read(self, parameters: list[nn.Parameter]) -> bool:
        """Bring these up to date; whether some of them stay guarded, because only their gradients are away."""

    def read_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What ``parameter.grad`` is."""

    def write_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        """``parameter.grad = gradient``."""


class Guard:
    """Makes and unmakes guarded parameters on behalf of a keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._guarded: dict[type, type] = {}
        self._plain: dict[type, type] = {}

    def raise_on(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on look before they are used."""
        for parameter in parameters:
            guarded = self._guarded.get(type(parameter))
            if guarded is None:
                if type(parameter) in self._plain:
                    continue
                guarded = self._class(type(parameter))
            parameter.__class__ = guarded

    def lower_on(self, parameters: Iterable[nn.Parameter]) -> None:
        """They are up to date: of their own class again."""
        for parameter in parameters:
            plain = self._plain.get(type(parameter))
            if plain is not None:
                parameter.__class__ = plain

    def holds(self, parameter: object) -> bool:
        """Whether it is guarded."""
        return type(parameter) in self._plain

    def _class(self, plain: Any) -> type:
        def intercept(
            _cls: type, func: Callable[..., Any], _types: object, args: Any = (), kwargs: Any = None
        ) -> object:
            return self._intercept(func, args, kwargs or {})

        def duplicate(parameter: nn.Parameter, memo: dict[int, Any]) -> object:
            self._keeper.about_to_read([parameter])
            self.lower_on([parameter])
            return copy.deepcopy(parameter, memo)

        def reduced(parameter: nn.Parameter, protocol: Any) -> object:
            self._keeper.about_to_read([parameter])
            with torch._C.DisableTorchFunctionSubclass():
                return cast(object, plain.__reduce_ex__(parameter, protocol))

        members = {"__torch_function__": classmethod(intercept), "__deepcopy__": duplicate, "__reduce_ex__": reduced}
        guarded = type(f"Guarded{plain.__name__}", (plain,), members)
        self._guarded[plain], self._plain[guarded] = guarded, plain
        fast_types: list[type] = getattr(torch_optimizer, "_foreach_supported_types", [])
        if plain in fast_types:
            fast_types.append(guarded)  # an update happens while others still look: it is as fast as any
        return guarded

    def _intercept(self, func: Callable[..., Any], args: Any, kwargs: Any) -> object:
        if func == GRAD_GET:
            return self._keeper.read_gradient(args[0])
        if func in (GRAD_SET, GRAD_DELETE) and self.holds(args[0]):
            self._keeper.write_gradient(args[0], args[1] if len(args) > 1 else None)
            return None
        harmless = func in METADATA and not (func is torch.Tensor.type and len(args) + len(kwargs) > 1)
        if not harmless and not self._keeper.about_to_read(self._found(args, kwargs)):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _found(self, args: Any, kwargs: Any) -> list[nn.Parameter]:
        """Guarded parameters among arguments, however deep in containers."""
        found, waiting = [], [*args, *kwargs.values()]
        for one in waiting:
            if type(one) in self._plain:
                found.append(one)
            elif isinstance(one, (list, tuple)):
                waiting.extend(one)
            elif isinstance(one, dict):
                waiting.extend(one.values())
        return found
