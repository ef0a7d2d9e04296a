"""Schemes of paceline.Decentralized without rounds of all workers: adpsgd, wagma, eager, sgp."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import nn

from effort import thorough
from paceline.errors import UsageError
from paceline.train.decentralized.schemes.wagma import butterfly_groups, default_group_size
from paceline.train.decentralized.wrapper import Decentralized
from ranks import Member, Ranks, run_ranks

SCHEMES = ["adpsgd", "eager", "sgp", "wagma"]
SIZE = 6


def _regression(me: Member, num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of one linear function, other inputs on each rank."""
    rng = torch.Generator().manual_seed(100 + me.rank)
    truth = torch.arange(SIZE, dtype=torch.float32).view(SIZE, 1) / SIZE
    inputs = [torch.randn(16, SIZE, generator=rng) for _ in range(num)]
    return [(one, one @ truth) for one in inputs]


def _loss(module: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    with torch.no_grad():
        return sum(float(nn.functional.mse_loss(module(inputs), targets)) for inputs, targets in batches) / len(batches)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def _weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def _constant(rank: int) -> nn.Module:
    """A module whose weights are all the rank's number."""
    module = nn.Linear(SIZE, 1)
    with torch.no_grad():
        for one in module.parameters():
            one.fill_(float(rank))
    return module


def _trains(me: Member, scheme: str, options: dict[str, Any]) -> tuple[float, list[float], int, int]:
    module = nn.Sequential(nn.Linear(SIZE, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
    model = Decentralized(module, optimizer, scheme=scheme, timeout_s=60.0, **options)
    num_steps = 60 + 15 * me.rank
    for number, batch in enumerate(_regression(me, num_steps)):
        if number % 3 == 0:
            time.sleep(0.004 * me.rank)
        _step(model, optimizer, batch)
    if me.rank == 1:
        time.sleep(0.2)
    with model.averaged():
        shown = _weights(module)
    model.finish()
    assert not model.done
    assert model.statistics.steps == num_steps
    assert shown.isfinite().all()
    return (
        _loss(module, _regression(me, 5)),
        _weights(module).tolist(),
        sum(model.statistics.groups.values()),
        (model.statistics.bytes_sent),
    )


@pytest.mark.parametrize("num_workers", thorough([1, 3, 4, 5], [1, 4]))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_trains_with_uneven_steps_and_speeds(scheme: str, num_workers: int) -> None:
    _check_training(run_ranks(_trains, num_workers, scheme, {}))


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("adpsgd", {"wait": True}),
        ("adpsgd", {"average_state": True}),
        ("sgp", {"overlap": False}),
        ("sgp", {"average_state": True}),
        ("wagma", {"group_size": 4, "tau": 7, "average_state": True}),
    ],
)
def test_trains_with_options(scheme: str, options: dict[str, Any]) -> None:
    _check_training(run_ranks(_trains, 4, scheme, options))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_trains_on_gloo(scheme: str) -> None:
    _check_training(run_ranks(_trains, 3, scheme, {}, backend="gloo"))


def _check_training(outcomes: list[Any]) -> None:
    several = len(outcomes) > 1
    for loss, weights, averages, bytes_sent in outcomes:
        assert loss < 0.1
        assert weights == pytest.approx(outcomes[0][1], abs=1e-6)
        assert bytes_sent > 0 if several else bytes_sent == 0
        assert averages > 0 or not several


def _contracts(me: Member, scheme: str, options: dict[str, Any], num_steps: int) -> tuple[list[float], list[float]]:
    """Train with learning rate 0, so that only averages change the weights; return them before and after finish.

    On the way, at another step on each rank, all look at the mean.
    """
    module = _constant(me.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model = Decentralized(module, optimizer, scheme=scheme, init_sync=False, timeout_s=60.0, **options)
    for batch in _regression(me, num_steps + me.rank):
        _step(model, optimizer, batch)
        time.sleep(0.002)
        if model.statistics.steps == 10 + 2 * me.rank:
            with model.averaged():
                assert _weights(module).tolist() == pytest.approx([(me.world_size - 1) / 2] * (SIZE + 1), abs=1e-4)
    before = _weights(module).tolist()
    model.finish()
    return before, _weights(module).tolist()


@pytest.mark.parametrize("num_workers", thorough([2, 3, 5], [3]))
@pytest.mark.parametrize(
    ("scheme", "options"),
    [("adpsgd", {}), ("adpsgd", {"wait": True}), ("sgp", {}), ("sgp", {"overlap": False})],
)
def test_averages_preserve_the_sum_and_contract(scheme: str, options: dict[str, Any], num_workers: int) -> None:
    outcomes = run_ranks(_contracts, num_workers, scheme, options, 60)
    mean = (num_workers - 1) / 2
    for before, after in outcomes:
        assert after == pytest.approx([mean] * (SIZE + 1), abs=1e-4)
        assert before == pytest.approx([mean] * (SIZE + 1), abs=0.45)


def _adds_up(me: Member) -> list[float]:
    """Make steps whose gradient is the rank's number plus 1, at uneven speeds."""
    module = _constant(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    model = Decentralized(module, optimizer, scheme="eager", timeout_s=60.0)
    for _ in range(10 + 7 * me.rank):
        optimizer.zero_grad()
        (sum(one.sum() for one in model.module.parameters()) * (me.rank + 1.0)).backward()  # type: ignore[union-attr]
        time.sleep(0.003 * (me.rank % 3))
        optimizer.step()
    model.finish()
    return _weights(module).tolist()


def _push_sums(me: Member, overlap: bool) -> tuple[list[float], list[float]]:
    """Return the weight of PushSum and x after each of 20 rounds, without what is on its way."""
    module = _constant(me.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model = Decentralized(module, optimizer, scheme="sgp", init_sync=False, timeout_s=60.0, overlap=overlap)
    scheme: Any = model._scheme
    ws, xs = [], []
    for batch in _regression(me, 20):
        _step(model, optimizer, batch)
        ws.append(scheme._push_weight)
        xs.append(scheme._push_weight * float(_weights(module)[0]))
    model.finish()
    return ws, xs


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_workers", thorough([3, 4, 5], [3]))
def test_sgp_preserves_both_sums(num_workers: int, overlap: bool) -> None:
    """With overlap half of each sum is on its way after a step."""
    outcomes = run_ranks(_push_sums, num_workers, overlap)
    here = 0.5 if overlap else 1.0
    for step in range(20):
        assert sum(ws[step] for ws, _ in outcomes) == pytest.approx(here * num_workers, abs=1e-5)
        assert sum(xs[step] for _, xs in outcomes) == pytest.approx(here * sum(range(num_workers)), abs=1e-4)
    for ws, xs in outcomes:
        assert xs[-1] / ws[-1] == pytest.approx((num_workers - 1) / 2, abs=0.02)


@pytest.mark.parametrize("num_workers", thorough([3, 4], [3]))
def test_eager_loses_no_gradient(num_workers: int) -> None:
    expected = -sum((10 + 7 * rank) * (rank + 1.0) for rank in range(num_workers)) / num_workers
    for weights in run_ranks(_adds_up, num_workers):
        assert weights == pytest.approx([expected] * (SIZE + 1), rel=1e-5)


def _global_averages(me: Member) -> list[float]:
    module = _constant(me.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model = Decentralized(module, optimizer, scheme="wagma", init_sync=False, timeout_s=60.0, tau=1)
    seen = []
    for number, batch in enumerate(_regression(me, 3)):
        _step(model, optimizer, batch)
        seen.append(float(_weights(module)[0]))
        with torch.no_grad():
            for one in module.parameters():
                one.add_(float(me.rank * number))
    model.finish()
    return seen


def test_wagma_with_tau_1_averages_globally() -> None:
    for seen in run_ranks(_global_averages, 3):
        assert seen == pytest.approx([1.0, 1.0, 2.0])


def _merges_late(me: Member) -> float:
    """Rank 1 makes its first step after rank 0 has made its own, whose average has what rank 1 had before."""
    module = _constant(me.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    model = Decentralized(module, optimizer, scheme="wagma", init_sync=False, timeout_s=60.0)
    if me.rank == 1:
        me.store.wait(["stepped"])
    for one in module.parameters():
        one.grad = torch.full_like(one, -6.0 * me.rank)
    optimizer.step()
    weight = float(_weights(module)[0])
    if me.rank == 0:
        me.store.set("stepped", "")
    model.finish()
    return weight


def test_wagma_does_not_wait_for_a_late_member() -> None:
    """Rank 0 takes (0 + 1) / 2; rank 1, with 1 + 6, then takes (0 + 1 + 7) / 3."""
    assert run_ranks(_merges_late, 2) == pytest.approx([0.5, 8 / 3])


def _stops_at_total(me: Member, scheme: str) -> int:
    module = nn.Linear(SIZE, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = Decentralized(module, optimizer, scheme=scheme, timeout_s=60.0, total_steps=60)
    batches = _regression(me, 10)
    while not model.done:
        time.sleep(0.003 * (1 + me.rank))
        _step(model, optimizer, batches[model.statistics.steps % 10])
    model.finish()
    return model.statistics.steps


@pytest.mark.parametrize("scheme", SCHEMES)
def test_total_steps_end_the_training(scheme: str) -> None:
    steps = run_ranks(_stops_at_total, 3, scheme)
    assert 60 <= sum(steps) <= 180
    assert min(steps) > 0


def _closes_early(me: Member, scheme: str) -> str:
    module = nn.Linear(SIZE, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = Decentralized(module, optimizer, scheme=scheme, timeout_s=60.0)
    said = "finished"
    try:
        for batch in _regression(me, 40):
            _step(model, optimizer, batch)
            time.sleep(0.005)
            if me.rank == 2 and model.statistics.steps == 5:
                break
        if me.rank != 2:
            model.finish()
    except RuntimeError as error:
        said = str(error)
    model.close()
    return said


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_worker_that_leaves_hangs_nobody(scheme: str) -> None:
    outcomes = run_ranks(_closes_early, 3, scheme)
    for said in outcomes[:2]:
        assert said == "finished" if scheme == "adpsgd" else "rank 2" in said


def _survives(me: Member, scheme: str, victim: int) -> str:
    me.join()
    module = nn.Linear(SIZE, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = Decentralized(module, optimizer, scheme=scheme, timeout_s=60.0)
    said = "finished"
    try:
        for batch in _regression(me, 60):
            _step(model, optimizer, batch)
            time.sleep(0.005)
            if me.rank == victim and model.statistics.steps == 10:
                os.kill(os.getpid(), signal.SIGKILL)
        model.finish()
    except RuntimeError as error:
        said = str(error)
    model.close()
    return f"{said} after {model.statistics.steps}"


@pytest.mark.parametrize("victim", thorough([0, 2, 3], [0, 2]))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_killed_worker_hangs_nobody(scheme: str, victim: int) -> None:
    with Ranks(_survives, 4, scheme, victim, join=False) as ranks:
        outcomes = ranks.outcomes(60, [rank for rank in range(4) if rank != victim])
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        if scheme == "adpsgd" and victim != 0:
            assert outcome.value == "finished after 60"
        else:
            assert f"rank {victim}" in outcome.value


def test_groups_of_wagma() -> None:
    for num_workers in range(1, 20):
        for step in range(12):
            groups = butterfly_groups(step, num_workers, 4)
            assert sorted(one for members in groups for one in members) == list(range(num_workers))
            assert max(len(members) for members in groups) <= 4
    assert [default_group_size(one) for one in (1, 2, 8, 16, 64)] == [2, 2, 2, 4, 8]


def _refusals(me: Member) -> None:
    module = nn.Linear(SIZE, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for scheme, options in (("wagma", {"group_size": 3}), ("wagma", {"tau": 0}), ("sgp", {"tau": 1})):
        with pytest.raises(UsageError, match=r"tau|power of two"):
            Decentralized(module, optimizer, scheme=scheme, **options)  # type: ignore[arg-type]
    model = Decentralized(module, optimizer, scheme="eager")
    with pytest.raises(UsageError, match="closure"):
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type,return-value]
    model.close()
    assert me.world_size == 1


def test_what_is_refused() -> None:
    run_ranks(_refusals, 1)
