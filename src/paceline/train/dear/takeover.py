"""The user's optimizer while a wrapper has it: step() and zero_grad() are the wrapper's, and its state is read and
written through the pipeline. In the end it is given back as it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import Any, Optional

from torch.optim import Optimizer

from paceline.train.dear.optimizer_state import WatchedState
from paceline.train.dear.pipeline import Pipeline
from paceline.train.dear.sharded import ShardedUpdate

Closure = Optional[Callable[[], Any]]  # noqa: UP045
_OURS = ("step", "zero_grad", "_step_supports_amp_scaling")


class TakeOver:
    """Takes an optimizer over for a pipeline, and gives it back.

    ``steps`` and ``zeroes`` take the place of its methods; the first is also given the optimizer's own step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pipe: Pipeline,
        steps: Callable[[Callable[..., Any], Closure], Any],
        zeroes: Callable[[bool], None],
    ) -> None:
        self._optimizer = optimizer
        self._pipe = pipe
        self._before = {name: vars(optimizer)[name] for name in _OURS if name in vars(optimizer)}
        taken, whole_step = any(True for _ in optimizer.state), optimizer.step

        def step(optimizer: Optimizer, closure: Closure = None) -> Any:
            """Perform a single optimization step; updates happen as communication ends."""
            optimizer._opt_called = True  # type: ignore[attr-defined]  # for learning-rate schedulers
            return steps(whole_step, closure)

        def zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            """Reset the gradients of all parameters."""
            zeroes(set_to_none)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # it says itself that it was called
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = MethodType(zero_grad, optimizer)  # type: ignore[method-assign]
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # a scaler unscales before step()
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: pipe.synchronize()),
            optimizer.register_load_state_dict_pre_hook(lambda _, __: pipe.synchronize()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._state_loaded()),
        ]
        if isinstance(pipe.update, ShardedUpdate):
            self._hooks.append(optimizer.register_state_dict_post_hook(self._consolidate))
        if taken or not isinstance(pipe.update, ShardedUpdate):
            self._state_loaded()

    def _state_loaded(self) -> None:
        """The optimizer has a new state: keep this rank's part of it, or watch it."""
        update, optimizer = self._pipe.update, self._optimizer
        if isinstance(update, ShardedUpdate):
            by_index = enumerate(self._pipe.parameters)
            update.scatter({index: optimizer.state[one] for index, one in by_index if one in optimizer.state})
        else:
            optimizer.state = WatchedState(optimizer.state, self._pipe.before_reading_state)

    def _consolidate(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        update = self._pipe.update
        if not isinstance(update, ShardedUpdate):
            return state_dict
        index_of = {id(parameter): index for index, parameter in enumerate(self._pipe.parameters)}
        whole = update.consolidated()
        ordered = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        packed = {
            number: index_of[id(parameter)] for number, parameter in enumerate(ordered) if id(parameter) in index_of
        }
        state_dict["state"] = {number: whole[index] for number, index in packed.items() if index in whole}
        return state_dict

    def collect(self) -> None:
        """Put the whole state on every rank; all must ask. Nothing may be under way."""
        update, optimizer = self._pipe.update, self._optimizer
        if isinstance(update, ShardedUpdate):
            whole = update.consolidated()
            optimizer.state.update({self._pipe.parameters[index]: entries for index, entries in whole.items()})

    def give_back(self) -> None:
        """The optimizer's methods are its own again, and its state a plain dictionary; no communication."""
        optimizer = self._optimizer
        for hook in self._hooks:
            hook.remove()
        for name in _OURS:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(self._before)
        optimizer.state = defaultdict(dict, dict.items(optimizer.state))
