"""The user's optimizer while a wrapper has it: updates and zero_grad() are the wrapper's, and its state is read and
written through the pipeline. In the end it is given back as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from types import MethodType
from typing import Any, Optional

from torch.optim import Optimizer

from paceline.train.dear.optimizer_state import WatchedState, raw_state
from paceline.train.dear.pipeline import Pipeline
from paceline.train.dear.sharded import ShardedUpdate

Closure = Optional[Callable[[], Any]]  # noqa: UP045


class _Hidden(list[Any]):
    """The groups of an optimizer whose update happens elsewhere: there to be read, but nothing to go through."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def step_elsewhere(optimizer: Optimizer, step: Callable[..., Any], closure: Closure, update: Callable[[], None]) -> Any:
    """Run a step of an optimizer with its hooks, and with what was put around it, but ``update`` for its arithmetic."""
    groups, depth = optimizer.param_groups, 0

    def update_once() -> None:
        if optimizer.param_groups is groups:
            update()
            optimizer.param_groups = _Hidden(groups)

    def before(_: Optimizer, args: Any, kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            update_once()
            return None

        def and_update() -> Any:
            loss = closure()
            update_once()
            return loss

        return (args[0], and_update), {}

    def after(*_: object) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            optimizer.param_groups = groups

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    all_after: Any = optimizer._optimizer_step_post_hooks
    all_after.move_to_end(hooks[1].id, last=False)  # the user's see all groups
    try:
        return step() if closure is None else step(closure)
    finally:
        optimizer.param_groups = groups
        for hook in hooks:
            hook.remove()


class TakeOver:
    """Takes an optimizer over for a pipeline, and gives it back.

    ``steps`` and ``zeroes`` take the place of its methods; the first is also given the optimizer's step as it was
    found, with whatever a profiler or a framework has put around it. ``more`` is what else the optimizer has meanwhile.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pipe: Pipeline,
        steps: Callable[[Callable[..., Any], Closure], Any],
        zeroes: Callable[[bool], None],
        more: Mapping[str, Any],
    ) -> None:
        self._optimizer = optimizer
        self._pipe = pipe
        self._before = dict(vars(optimizer))
        self._given_back = False
        taken, step_found = any(True for _ in optimizer.state), optimizer.step

        def step(optimizer: Optimizer, closure: Closure = None) -> Any:
            """Perform a single optimization step; updates happen as communication ends."""
            if self._given_back:  # called by what was put around it meanwhile
                return step_found(closure)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # for learning-rate schedulers
            return steps(step_found, closure)

        def zero_grad(_: Optimizer, set_to_none: bool = True) -> None:
            """Reset the gradients of all parameters."""
            zeroes(set_to_none)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # it says itself that it was called
        self._ours = {
            "step": MethodType(step, optimizer),
            "zero_grad": MethodType(zero_grad, optimizer),
            "_step_supports_amp_scaling": False,  # a scaler unscales before step()
            **more,
        }
        vars(optimizer).update(self._ours)
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
            vars(optimizer)["state"] = WatchedState(optimizer.state, self._pipe.before_reading_state)

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
        self._given_back = True
        for name, ours in self._ours.items():
            if vars(optimizer).get(name) is not ours:
                continue  # somebody's patch of ours
            del vars(optimizer)[name]
            if name in self._before:
                vars(optimizer)[name] = self._before[name]
        optimizer.state = raw_state(optimizer.state)
