"""DistributedDataParallel on Gloo with the straggler hook: the weights of plain DDP, and one decision on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.executors.handles import InThread
from ranks import Member, run_ranks

STEPS = 14
BETWEEN_ORDERS = 1e-5


def _train(me: Member, options: dict[str, Any] | None, group: dist.ProcessGroup | None = None) -> Any:
    """Weights after training, and who was late at each step by the hook's state."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 3))
    model = DistributedDataParallel(net, bucket_cap_mb=0.002, process_group=group)
    state = None
    if options is not None:
        state = paceline.hooks.StragglerState(group, **options)
        model.register_comm_hook(state, paceline.hooks.straggler_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dice = torch.Generator().manual_seed(me.rank)
    late = []
    for _ in range(STEPS):
        inputs, targets = torch.randn(8, 16, generator=dice), torch.randn(8, 3, generator=dice)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        late.append(dict(state.late) if state else {})
    return [weight.detach().numpy().copy() for weight in net.parameters()], late


def _both(me: Member, options: dict[str, Any]) -> Any:
    return _train(me, None)[0], _train(me, options)[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("options", [{}, {"late": 1}, {"late": {1: 0.5}}, {"late": (), "algorithm": "ring"}])
def test_the_weights_are_those_of_plain_ddp(num_ranks: int, options: dict[str, Any]) -> None:
    results = run_ranks(_both, num_ranks, options, backend="gloo")
    for plain, ours in results:
        for one, other, first in zip(plain, ours, results[0][1], strict=True):
            np.testing.assert_allclose(other, one, atol=BETWEEN_ORDERS)
            np.testing.assert_array_equal(other, first)  # all ranks agree bit for bit


def _decide(me: Member) -> Any:
    """Ranks report made-up times: rank 2 comes 0.4 s late in the first 6 steps, then nobody does."""
    calls = 0

    def spent_s(_: InThread) -> float:
        nonlocal calls
        calls += 1
        return 0.5 if me.rank != 2 and calls <= 6 else 0.1

    with mock.patch.object(InThread, "spent_s", spent_s):
        weights, late = _train(me, {"every": 3})
    return weights, late


def test_all_decide_the_same_at_the_same_step() -> None:
    results = run_ranks(_decide, 4, backend="gloo")
    # Steps 1 to 3 are exchanged at step 4 and looked at in step 5, when nobody has been late 4 times; 8 and 11 follow.
    wanted = [{}] * 7 + [{2: 0.362}] * 3 + [{}] * 4
    for weights, late in results:
        assert late == wanted
        for one, first in zip(weights, results[0][0], strict=True):
            np.testing.assert_array_equal(one, first)


def _in_a_group(me: Member) -> Any:
    group = dist.new_group([1, 2, 3])
    if me.rank == 0:
        return None
    return _train(me, {"late": 0}, group)[0]


def test_in_a_group_of_some_ranks() -> None:
    _, first, *others = run_ranks(_in_a_group, 4, backend="gloo")
    for weights in others:
        for one, other in zip(weights, first, strict=True):
            np.testing.assert_array_equal(one, other)


def _refused(_: Member) -> list[str]:
    said = []
    for options in ({"every": 1}, {"late": 5}):
        with pytest.raises(paceline.UsageError) as caught:
            paceline.hooks.StragglerState(**options)
        said.append(str(caught.value))
    return said


def test_wrong_arguments_are_sentences() -> None:
    for every, late in run_ranks(_refused, 2, backend="gloo"):
        assert "every is the number of steps between decisions, 2 or more, not 1" in every
        assert "late names ranks of the group, 0 to 1, and 5 is none" in late
