"""close() gives module and optimizer back, so that they can be used alone or wrapped anew, in any mode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from dear_models import OPTIMIZERS, apart, build, ddp, fit, loss_of, weights

import paceline
from paceline.errors import UsageError
from ranks import Member, run_ranks


def closes(me: Member, modes: list[bool]) -> None:
    """Train in one mode after another, with one optimizer, beside DDP; two ranks agree with it in every bit."""
    reference, theirs = ddp("mlp", "adam")
    net = build("mlp")
    ours = OPTIMIZERS["adam"](net.parameters())
    own = {name: vars(ours).get(name) for name in ("step", "zero_grad")}
    num_groups = len(dist.distributed_c10d._world.pg_map)
    for turn, sharded in enumerate(modes):
        model = paceline.DataParallel(net, ours, sharded=sharded, bucket_mb=0.002)
        with pytest.raises(UsageError, match=r"close\(\) that one"):
            paceline.DataParallel(net, OPTIMIZERS["sgd"](net.parameters()))
        fit(reference, theirs, "mlp", me, 3, 3 * turn)
        fit(model, ours, "mlp", me, 3, 3 * turn)
        if turn % 2:
            loss_of(model, "mlp", 99, me.rank).backward()  # gradients that nobody uses
        model.close()
        model.close()
        with pytest.raises(UsageError, match="is closed"):
            loss_of(model, "mlp", 0, me.rank)
        assert {name: vars(ours).get(name) for name in own} == own
        assert len(dist.distributed_c10d._world.pg_map) == num_groups
        assert all(type(parameter) is torch.nn.Parameter for parameter in net.parameters())
        assert apart(weights(reference), weights(net)) == 0
        _same_state(theirs, ours)
    fit(net, ours, "mlp", me, 1)
    assert all(parameter.grad is not None for parameter in net.parameters())
    net.add_module("more", torch.nn.Linear(2, 2))


def _same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    theirs, ours = one.state_dict()["state"], other.state_dict()["state"]
    assert theirs.keys() == ours.keys()
    for number, entries in theirs.items():
        assert entries.keys() == ours[number].keys()
        assert all(torch.equal(value, ours[number][key]) for key, value in entries.items())


@pytest.mark.parametrize("modes", [[False, True, False], [True, True]])
def test_a_closed_wrapper_gives_back_what_it_had(modes: list[bool]) -> None:
    run_ranks(closes, 2, modes)


def alone(_: Member) -> None:
    net = build("mlp")
    for _turn in range(2):
        model = paceline.DataParallel(net, OPTIMIZERS["sgd"](net.parameters()))
        loss_of(model, "mlp", 0, 0).backward()
        model.close()


def test_alone_too() -> None:
    run_ranks(alone, 1)
