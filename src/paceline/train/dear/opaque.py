"""Modules whose insides Python does not see: compiled and scripted ones. Their parameters are awaited when they are
called; so are those of the whole module while it is traced.

A guarded parameter inside a compiled graph would be another type, and compile it anew; a scripted module would not ask;
a trace would note that the guard has called an operation, and not find it there again when it is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo import eval_frame

Use = Callable[[Iterator[nn.Parameter]], None]
_F = TypeVar("_F", bound=Callable[..., Any])

set_compiler: Any = eval_frame.set_eval_frame
"""Sets what compiles the frames that this thread enters, None for nothing; returns what it was."""


def not_compiled(function: _F) -> _F:
    """``torch.compile`` leaves this function as it is, and compiles what it calls.

    As :func:`torch.compiler.disable` with ``recursive=False``, which would import the compiler at once.
    """
    found: Any = function
    frames: Any = eval_frame
    actions = frames._FrameAction
    frames.set_code_exec_strategy(found.__code__, frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT))
    found._torchdynamo_disable = True
    return function


def call(module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module from a frame that is compiled: PyTorch's own modules, like Sequential, are compiled only in one."""
    return module(*inputs, **kwargs)


class Await:
    """A forward pre-hook that awaits a module's parameters. Copies of the module have one that does nothing."""

    def __init__(self, use: Use | None = None, *, traced_only: bool = False) -> None:
        self._use = use
        self._traced_only = traced_only

    def __call__(self, module: nn.Module, _: object) -> None:
        """Await them."""
        if self._use is not None and not (self._traced_only and torch._C._get_tracing_state() is None):
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
        """Find opaque modules in this one, and await all of it when it is traced."""
        self._undo.append(module.register_forward_pre_hook(Await(self._use, traced_only=True)).remove)
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
