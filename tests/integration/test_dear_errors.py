"""An error in the forward or backward pass of one rank, while the others go on: what each is told, and that all can go
on from the same weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dear_models import (
    OPTIMIZERS,
    apart,
    batch,
    build,
    ddp,
    dear,
    deciding,
    fit,
    loss_of,
    was_all_reduced,
    weights,
)

import paceline
from paceline.errors import StepError
from ranks import BACKEND, Member, run_ranks

UNLUCKY = 1
STEPS = 6


def _stumble(_: torch.Tensor) -> None:
    raise KeyError("stumble")


def _alike(model: torch.nn.Module) -> bool:
    """Whether all ranks have the same weights."""
    same = True
    for mine in weights(model).values():
        first = mine.clone()
        dist.broadcast(first, 0)
        same = same and torch.equal(mine, first)
    return same


def in_backward(me: Member, mode: str) -> list[str]:
    """One rank stumbles when a part of its gradients has left; all skip that step, as a DDP that never tried it."""
    with deciding(mode):
        return _in_backward(me, mode)


def _in_backward(me: Member, mode: str) -> list[str]:
    reference, theirs = ddp("mlp")
    model, ours = dear("mlp", sharded=mode == "sharded")
    said = []
    for step in range(STEPS):
        try:
            ours.zero_grad()
            inputs, targets = batch("mlp", step, me.rank)
            hidden = model.module[:2](inputs)
            if step == 3 and me.rank == UNLUCKY:
                hidden.register_hook(_stumble)
            torch.nn.functional.cross_entropy(model.module[2:](hidden), targets).backward()
            ours.step()
        except (KeyError, StepError) as error:
            assert step == 3
            assert model._pipe.back.under_way == (me.rank == UNLUCKY)
            said.append(f"{type(error).__name__}: {error}")
    for step in (0, 1, 2, 4, 5):
        fit(reference, theirs, "mlp", me, 1, step)
    assert apart(weights(reference), weights(model)) <= (0.0 if me.world_size == 2 else 1e-5)
    assert _alike(model)
    assert mode != "restless" or was_all_reduced(model)
    return said


@pytest.mark.parametrize(
    ("num_ranks", "mode", "backend"),
    [
        (2, "gathered", BACKEND),
        (3, "restless", BACKEND),
        (3, "sharded", BACKEND),
        (2, "sharded", "gloo"),
        (3, "gathered", "gloo"),
    ],
)
def test_an_error_in_one_backward_is_a_step_that_nobody_makes(num_ranks: int, mode: str, backend: str) -> None:
    for rank, said in enumerate(run_ranks(in_backward, num_ranks, mode, backend=backend)):
        (sentence,) = said
        if rank == UNLUCKY:
            assert sentence == "KeyError: 'stumble'"
        else:
            assert sentence.startswith("StepError: no rank has made step 4, as rank 1 dropped its gradients")


def in_forward(me: Member, sharded: bool, early: bool) -> int:
    """One rank stumbles before gradients have left, and takes its next batch for the same step."""
    net = build("cnn")  # with buffers that are broadcast in each forward pass
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    model = paceline.DataParallel(net, optimizer, sharded=sharded, bucket_mb=0.002)
    done = errors = 0
    while done < STEPS:
        optimizer.zero_grad()
        try:
            inputs, targets = batch("cnn", done + errors, me.rank)
            unlucky = me.rank == UNLUCKY and done == 3 and not errors
            outputs = model(inputs[:, :, :4] if unlucky and early else inputs)
            if unlucky:
                outputs.register_hook(_stumble)
            torch.nn.functional.cross_entropy(outputs, targets).backward()
        except (RuntimeError, KeyError):
            errors += 1
            continue
        optimizer.step()
        done += 1
    model.synchronize()
    parameters = torch.nn.ParameterList(net.parameters())
    assert _alike(parameters)
    return errors


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_an_error_before_gradients_leave_concerns_nobody_else(sharded: bool, early: bool) -> None:
    assert run_ranks(in_forward, 3, sharded, early) == [0, 1, 0]


def between(me: Member, mode: str) -> str:
    """One rank stumbles after gradients were read, so exchanged: the others make a step that it does not."""
    with deciding(mode):
        return _between(me)


def _between(me: Member) -> str:
    model, optimizer = dear("mlp")
    fit(model, optimizer, "mlp", me, 3)
    optimizer.zero_grad()
    loss_of(model, "mlp", 3, me.rank).backward()
    assert all(parameter.grad is not None for parameter in model.module.parameters())
    if me.rank != UNLUCKY:
        optimizer.step()
    with pytest.raises(StepError) as caught:
        fit(model, optimizer, "mlp", me, 1, 4)
    model.close()
    model = paceline.DataParallel(model.module, optimizer, bucket_mb=0.002)
    fit(model, optimizer, "mlp", me, 2, 5)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["gathered", "restless"])
def test_a_step_that_one_rank_left_out_is_found_at_the_next(mode: str) -> None:
    for said in run_ranks(between, 3, mode):
        assert said.startswith("rank 1 has made 3 steps and rank 0 4: ")
