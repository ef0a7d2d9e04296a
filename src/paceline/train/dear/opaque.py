"""Modules whose insides Python does not see: compiled and scripted ones. Their parameters are awaited when they are
called.

A guarded parameter inside a compiled graph would be another type, and compile it anew; a scripted module would not ask.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Use = Callable[[Iterator[nn.Parameter]], None]


class Await:
    """A forward pre-hook that awaits a module's parameters. Copies of the module have one that does nothing."""

    def __init__(self, use: Use | None = None) -> None:
        self._use = use

    def __call__(self, module: nn.Module, _: object) -> None:
        """Await them."""
        if self._use is not None:
            self._use(module.parameters())

    def __deepcopy__(self, _: object) -> Await:
        return Await()

    def __reduce__(self) -> tuple[Any, ...]:
        return Await, ()


class Watched:
    """The opaque modules that were found: their parameters are awaited before each call."""

    def __init__(self, use: Use) -> None:
        self._use = use
        self._undo: list[Callable[[], object]] = []

    def watch(self, module: nn.Module) -> None:
        """Find opaque modules in this one."""
        if "torch._dynamo" in sys.modules:
            from torch._dynamo.eval_frame import OptimizedModule

            compiled: tuple[type, ...] = (OptimizedModule,)
        else:
            compiled = ()
        inside: set[nn.Module] = set()
        for child in module.modules():
            if child in inside:
                continue
            in_place = getattr(child, "_compiled_call_impl", None)
            if isinstance(child, (compiled, torch.jit.ScriptModule)):
                self._undo.append(child.register_forward_pre_hook(Await(self._use)).remove)
            elif in_place is not None:
                self._await_compiled(child, in_place)
            else:
                continue
            inside.update(child.modules())

    def _await_compiled(self, module: nn.Module, call: Callable[..., Any]) -> None:
        if hasattr(call, "_awaits"):
            return

        def awaiting(*args: Any, **kwargs: Any) -> Any:
            self._use(module.parameters())
            return call(*args, **kwargs)

        awaiting._awaits = True  # type: ignore[attr-defined]
        module._compiled_call_impl = awaiting
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", call))

    def close(self) -> None:
        """Leave them as they were found."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
