"""Loops that are legal with DDP and unusual: each ends with DDP's weights, in all modes, or gets a clear error.

Two ranks add in one order, so every bit agrees.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dear_models import MODES, apart, batch, build, deciding, loss_of, weights
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.errors import UsageError
from paceline.train.dear.bucket import Phase
from paceline.train.dear.replicated import ReplicatedUpdate
from paceline.train.dear.sharded import ShardedUpdate
from ranks import Member, run_ranks

Optimizer = torch.optim.Optimizer


def _step(model: Any, optimizer: Optimizer, me: Member, step: int, called: Any = None) -> None:
    loss = loss_of(model if called is None else called, "mlp", step, me.rank)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _is_ours(model: nn.Module) -> bool:
    return isinstance(model, paceline.DataParallel)


def _pending(model: Any) -> list[bool]:
    return [bucket.phase is Phase.PENDING for bucket in model._pipe.buckets]


def readers_beside_the_loop(model: Any, optimizer: Optimizer, me: Member) -> None:
    """After each step two threads read every parameter at the same time, and a third saves a checkpoint."""
    start = threading.Barrier(3)

    def read(look: Callable[[], object]) -> object:
        start.wait(30)
        return look()

    looks = [lambda: [float(one.detach().sum()) for one in model.module.parameters()]] * 2
    looks.append(lambda: (model.state_dict(), optimizer.state_dict()))
    for step in range(12):
        _step(model, optimizer, me, step)
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(read, look) for look in looks]:
                done.result(30)


def checkpoints_beside_the_loop(model: Any, optimizer: Optimizer, me: Member) -> None:
    """A thread reads all the time while the loop goes on; gathered, it reads the optimizer's state, too."""
    end, errors = threading.Event(), []

    def keep_reading() -> None:
        try:
            while not end.is_set():
                for parameter in model.module.parameters():
                    parameter.detach().clone()
                if not _is_ours(model) or not model._pipe.sharded:  # sharded, all ranks must ask
                    optimizer.state_dict()
        except BaseException as error:
            errors.append(error)

    reader = threading.Thread(target=keep_reading)
    reader.start()
    try:
        for step in range(25):
            _step(model, optimizer, me, step)
    finally:
        end.set()
        reader.join(30)
    assert not errors


def patched_after(model: Any, optimizer: Optimizer, me: Member) -> None:
    """A profiler patches step() of the instance, and a scheduler does it again."""
    calls = []
    found = optimizer.step

    def step(_: Optimizer, closure: Any = None) -> Any:
        calls.append("step")
        return found(closure)

    with patch.object(optimizer, "step", MethodType(step, optimizer)):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for number in range(6):
            _step(model, optimizer, me, number)
            scheduler.step()
    assert len(calls) == 6


def hooked(model: Any, optimizer: Optimizer, me: Member) -> None:
    """Hooks of step() see every group, before and after, and may change hyper-parameters."""
    seen: list[int] = []

    def before(one: Optimizer, *_: object) -> None:
        one.param_groups[0]["lr"] *= 0.9
        seen.extend(len(group["params"]) for group in one.param_groups)

    def after(one: Optimizer, *_: object) -> None:
        seen.extend(-len(group["params"]) for group in one.param_groups)

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    for step in range(5):
        _step(model, optimizer, me, step)
    for hook in hooks:
        hook.remove()
    assert seen == [6, -6] * 5


def training_mode_in_every_step(model: Any, optimizer: Optimizer, me: Member) -> None:
    """As most loops do; it does not wait for anything."""
    for step in range(6):
        before = _pending(model) if _is_ours(model) else []
        model.train()
        assert not _is_ours(model) or _pending(model) == before
        assert step < 2 or not _is_ours(model) or any(before)
        _step(model, optimizer, me, step)


def traced(model: Any, optimizer: Optimizer, me: Member) -> None:
    """A trace has the module and nothing of the update that is made meanwhile."""
    inputs, _ = batch("mlp", 0, me.rank)
    for step in range(4):
        _step(model, optimizer, me, step)
        assert step < 2 or not _is_ours(model) or any(_pending(model))
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            trace = torch.jit.trace(model.module, inputs)
        kinds = {node.kind() for node in trace.inlined_graph.nodes()}
        assert kinds <= {"prim::GetAttr", "aten::linear", "aten::tanh"}, kinds
        assert torch.equal(trace(inputs), model.module(inputs))


def compiled(model: Any, optimizer: Optimizer, me: Member) -> None:
    """``torch.compile`` of the wrapper; every second step adds up two batches."""
    called = torch.compile(model, backend="aot_eager")
    for step in range(6):
        _step(model, optimizer, me, step, called)
        if step % 2:
            optimizer.zero_grad()
            for part in range(2):
                with model.no_sync() if part == 0 else ExitStack():
                    loss_of(called, "mlp", 100 * step + part, me.rank).backward()
            optimizer.step()


def channels_last(model: Any, optimizer: Optimizer, me: Member) -> None:
    """The module's memory format changes between two steps."""
    for step in range(6):
        if step == 3:
            model.module.to(memory_format=torch.channels_last)
        loss = loss_of(model, "cnn", step, me.rank)
        optimizer.zero_grad()
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # DDP: "this may impair performance"
            loss.backward()
        optimizer.step()


def column_major(model: Any, optimizer: Optimizer, me: Member) -> None:
    """A weight is laid out in columns between two steps, as code for a faster kernel may do."""
    for step in range(6):
        if step == 3:
            if _is_ours(model):
                model.synchronize()
            weight = getattr(model, "module", model)[0].weight
            weight.data = weight.data.t().contiguous().t()
        _step(model, optimizer, me, step)


def accumulation_with_buffers(model: Any, optimizer: Optimizer, me: Member) -> None:
    """Running statistics, on every rank, as with DDP: rank 0's before the first batch of a step."""
    for step in range(6):
        optimizer.zero_grad()
        for part in range(3):
            with model.no_sync() if part < 2 else ExitStack():
                loss_of(model, "cnn", 10 * step + part, me.rank).backward()
        optimizer.step()


LOOPS = [
    *(readers_beside_the_loop, checkpoints_beside_the_loop, patched_after, hooked, training_mode_in_every_step),
    *(traced, compiled, accumulation_with_buffers),
]


def _sgd(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def _average_gradients(net: nn.Module, num_ranks: int) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            mean = parameter.grad.contiguous()
            dist.all_reduce(mean)
            parameter.grad.copy_(mean / num_ranks)


def _weights_of(loop: Callable[..., None], me: Member, mode: str) -> dict[str, torch.Tensor]:
    """What a loop ends with: in one of our modes, with DDP, or with gradients averaged by hand."""
    net = build("cnn" if loop in (channels_last, accumulation_with_buffers) else "mlp")
    optimizer = _sgd(net)
    if mode == "ddp":
        model: nn.Module = DistributedDataParallel(net)
        loop(model, optimizer, me)
    elif mode == "averaged":
        model = net
        optimizer.register_step_pre_hook(lambda *_: _average_gradients(net, me.world_size))
        loop(model, optimizer, me)
    else:
        with deciding(mode):
            model = paceline.DataParallel(net, optimizer, sharded=mode == "sharded", bucket_mb=0.002)
            loop(model, optimizer, me)
    return weights(model)


def odd_loop(me: Member, number: int) -> dict[str, float]:
    torch.manual_seed(0)
    reference = _weights_of(LOOPS[number], me, "ddp")
    return {mode: apart(reference, _weights_of(LOOPS[number], me, mode)) for mode in MODES}


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=[loop.__name__ for loop in LOOPS])
def test_odd_loops_end_with_the_weights_of_ddp(number: int) -> None:
    for found in run_ranks(odd_loop, 2, number, timeout_s=100):
        assert set(found.values()) == {0.0}, found


def updates_counted(me: Member, sharded: bool) -> int:
    """Two threads read one pending parameter while the update of its bucket takes long: how often was it updated?"""
    net = build("mlp")
    model = paceline.DataParallel(net, _sgd(net), sharded=sharded, bucket_mb=0.002)
    optimizer = model.optimizer
    for step in range(3):
        _step(model, optimizer, me, step)
    bucket = model._pipe.buckets[0]
    assert bucket.phase is Phase.PENDING
    updates = 0
    kind = ShardedUpdate if sharded else ReplicatedUpdate
    arrived = kind.arrived

    def slow(self: Any, buckets: Any) -> None:
        nonlocal updates
        updates += sum(one is bucket for one in buckets)
        threading.Event().wait(0.2)  # the other thread has time to look
        arrived(self, buckets)

    with patch.object(kind, "arrived", slow), ThreadPoolExecutor(2) as pool:
        seen = list(pool.map(lambda parameter: parameter.detach().clone(), [bucket.parameters[0]] * 2))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], bucket.parameters[0])
    return updates


@pytest.mark.parametrize("sharded", [False, True])
def test_two_readers_of_a_pending_parameter_update_it_once(sharded: bool) -> None:
    assert run_ranks(updates_counted, 2, sharded) == [1, 1]


def patched_before(me: Member) -> list[float]:
    """Whatever was put around step() before the optimizer was wrapped is called, and is there again after close()."""

    def run(wrap: Callable[[nn.Module, Optimizer], nn.Module]) -> tuple[dict[str, torch.Tensor], int]:
        net = build("mlp")
        optimizer = _sgd(net)
        calls, found = [], optimizer.step

        def step(closure: Any = None) -> Any:
            calls.append("step")
            return found(closure)

        optimizer.step = step  # type: ignore[method-assign]
        model = wrap(net, optimizer)
        for number in range(5):
            _step(model, optimizer, me, number)
        if _is_ours(model):
            model.close()  # type: ignore[attr-defined]
            assert optimizer.step is step
        return weights(net), len(calls)

    reference, calls = run(lambda net, _: DistributedDataParallel(net))
    assert calls == 5
    found = []
    for sharded in (False, True):
        trained, calls = run(lambda net, made, s=sharded: paceline.DataParallel(net, made, sharded=s, bucket_mb=0.002))
        assert calls == 5
        found.append(apart(reference, trained))
    return found


def test_what_was_put_around_step_before_wrapping_is_called() -> None:
    assert run_ranks(patched_before, 2) == [[0.0, 0.0]] * 2


STRIDES = {channels_last: "ddp", column_major: "averaged"}
"""What other strides are compared with: DDP of torch 2.13 mixes up the elements of a weight laid out in columns."""


def strides(me: Member, number: int) -> float:
    loop, reference = list(STRIDES.items())[number]
    with pytest.raises(UsageError, match=r"0.weight has strides .*: convert the module, as to channels_last, before"):
        _weights_of(loop, me, "sharded")
    return apart(_weights_of(loop, me, reference), _weights_of(loop, me, "gathered"))


@pytest.mark.parametrize("number", range(len(STRIDES)), ids=[loop.__name__ for loop in STRIDES])
def test_other_strides_train_as_they_should_or_are_refused(number: int) -> None:
    assert run_ranks(strides, 2, number) == [0.0, 0.0]
