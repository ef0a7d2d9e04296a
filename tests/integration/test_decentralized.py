"""paceline.Decentralized: the training loop stays as it is, and workers end with the mean of their weights."""

from __future__ import annotations

import copy
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.errors import UnsupportedError, UsageError
from ranks import Member, run_ranks

WIDTH = 4  # features that one worker has data for
MANY = 4000  # steps that suffice for anything here


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 6, generator=source)
    return inputs, inputs[:, :2].sin()


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs, targets = _batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def _train(model: paceline.Decentralized, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        optimizer.step()


def _num_averages(model: paceline.Decentralized) -> int:
    return sum(model.statistics.groups.values())


def _assert_equal(weights: list[list[float]]) -> None:
    for other in weights[1:]:
        assert other == pytest.approx(weights[0], rel=1e-6, abs=1e-7)
    assert all(map(math.isfinite, weights[0]))


# What a loop may contain: each function trains on every rank until it has averaged, and finishes.


def _until_averaged(me: Member, model: paceline.Decentralized, step_once: Callable[[int], Any], count: int = 3) -> None:
    """Make steps until a worker has taken part in so many averages."""
    for step in range(MANY):
        step_once(step)
        if _num_averages(model) >= count:
            me.store.set("averaged", "")
            return
        if step % 10 == 0 and me.store.check(["averaged"]):
            return
        time.sleep(0.0005)


def _with_scheduler(me: Member) -> list[float]:
    module = _model(me.rank)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model = paceline.Decentralized(module, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)
    steps = 0

    def step_once(step: int) -> None:
        nonlocal steps
        optimizer.zero_grad()
        for part in range(3):  # accumulation
            (_loss(model, me.rank, 3 * step + part) / 3).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm.isfinite()
        optimizer.step()
        scheduler.step()
        steps += 1

    _until_averaged(me, model, step_once)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5 ** (steps // 10))
    assert model.statistics.steps == steps
    model.finish()
    return _flat(module).tolist()


def _with_amp(me: Member) -> list[float]:
    module = _model(me.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    model = paceline.Decentralized(module, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step_once(step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model, me.rank, step).float()
        scaler.scale(loss).backward()
        if step == 3:  # overflow: the scaler makes no step
            module[0].weight.grad.fill_(math.inf)
            before = _flat(module)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step == 3:
            torch.testing.assert_close(_flat(module), before, rtol=0, atol=0)

    _until_averaged(me, model, step_once)
    model.finish()
    return _flat(module).tolist()


def _with_closure(me: Member) -> list[float]:
    module = _model(me.rank)
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    model = paceline.Decentralized(module, optimizer)

    def step_once(step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss(model, me.rank, step)
            loss.backward()
            return loss

        if step % 2:
            optimizer.step(closure)
        else:
            optimizer.step(closure=closure)

    _until_averaged(me, model, step_once)
    assert _num_averages(model) >= 1  # snapshots get their turn between steps that are long
    model.finish()
    return _flat(module).tolist()


def _with_average_state(me: Member) -> list[float]:
    module = _model(me.rank)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01, betas=(0.5, 0.6))
    model = paceline.Decentralized(module, optimizer, average_state=True)

    def step_once(step: int) -> None:
        optimizer.zero_grad()
        # Gradients of very different sizes: differences of second moments that would make others negative.
        (_loss(model, me.rank, step) * (1.0 if step % 20 < 10 else 1e-3) * 10.0**-me.rank).backward()
        optimizer.step()
        assert all((optimizer.state[one]["exp_avg_sq"] >= 0).all() for one in module.parameters())

    _until_averaged(me, model, step_once)
    model.finish()
    return _flat(module).tolist()


def _with_frozen(me: Member) -> list[float]:
    module = _model(me.rank)
    module[0].requires_grad_(requires_grad=False)
    frozen = module[0].weight.clone()
    optimizer = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.01)
    model = paceline.Decentralized(module, optimizer, init_sync=False)
    model.eval()
    assert [part.training for part in module.modules()] == [False] * 4
    model.train()
    assert [part.training for part in module.modules()] == [True] * 4
    _until_averaged(me, model, lambda _: _train(model, optimizer, me.rank, 1))
    model.finish()
    torch.testing.assert_close(module[0].weight, frozen, rtol=0, atol=0)
    return _flat(module[2]).tolist()


LOOPS = [_with_scheduler, _with_amp, _with_closure, _with_average_state, _with_frozen]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__[1:])
def test_the_loop_stays_as_it_is(loop: Any) -> None:
    _assert_equal(run_ranks(loop, 2))


@pytest.mark.parametrize("loop", [_with_scheduler])
def test_any_backend_will_do(loop: Any) -> None:
    _assert_equal(run_ranks(loop, 3, backend="gloo"))


class _Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 1)
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))
        self.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(inputs))


def _batch_norm(me: Member) -> list[Any]:
    module = _Normalised()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = paceline.Decentralized(module, optimizer, overlap=me.world_size == 2)

    def step_once(_: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 3) + 10 * me.rank).sum().backward()
        optimizer.step()

    _until_averaged(me, model, step_once)
    tracked = int(module.norm.num_batches_tracked)
    assert tracked == model.statistics.steps
    model.finish()
    assert module.norm.num_batches_tracked == tracked
    return [one.tolist() for one in (module.norm.running_mean, module.mask, module.scale)]


class _Twice(torch.optim.SGD):
    """An optimizer whose step calls its base class's, as many do: torch runs the hooks for each."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _steps_of_a_subclass(me: Member) -> int:
    net = _model()
    torch.optim.SGD(net.parameters(), lr=0.1)  # from now on torch has put its hooks around SGD's own step, too
    optimizer = _Twice(net.parameters(), lr=0.1)
    model = paceline.Decentralized(net, optimizer, timeout_s=60)
    _train(model, optimizer, me.rank, 5)
    model.finish()
    return model.statistics.steps


def test_a_step_within_a_step_is_one() -> None:
    assert run_ranks(_steps_of_a_subclass, 2) == [5, 5]


@pytest.mark.parametrize("workers", [2, 3])
def test_statistics_of_batches_are_averaged_and_infinite_buffers_stay(workers: int) -> None:
    results = run_ranks(_batch_norm, workers)
    _assert_equal([mean for mean, _, _ in results])
    assert all(0 < one < 10 * (workers - 1) for one in results[0][0])
    for _, mask, scale in results:
        assert mask == [[0.0, -math.inf], [0.0, 0.0]]
        assert scale == [1.0] * 3


def _state_dict(me: Member) -> None:
    module = _model(me.rank)
    keys = list(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = paceline.Decentralized(module, optimizer)
    assert list(model.state_dict()) == keys
    _train(model, optimizer, me.rank, 3)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    bare = _model(7)
    bare.load_state_dict(saved)
    torch.testing.assert_close(_flat(bare), torch.cat([saved[key].flatten() for key in keys]))
    model.load_state_dict(_model(8).state_dict())
    torch.testing.assert_close(_flat(module), _flat(_model(8)), rtol=0, atol=0)
    model.load_state_dict({f"module.{key}": value for key, value in saved.items()})
    assert copy.deepcopy(model) is not module
    assert type(copy.deepcopy(model)) is nn.Sequential
    for step in range(50):  # loaded again and again, while others average
        model.load_state_dict(saved)
        _train(model, optimizer, me.rank, 1 + step % 2)
    model.finish()
    model.finish()
    _train(model, optimizer, me.rank, 1)  # the module is free again


def test_state_dict_has_plain_keys() -> None:
    run_ranks(_state_dict, 2)


def _averaged_alone(me: Member) -> tuple[Any, Any]:
    """Rank 0 looks at the mean now and then; the others train on."""
    module = _model(me.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model = paceline.Decentralized(module, optimizer, init_sync=False)
    means = []
    if me.rank == 0:
        for _ in range(5):
            _train(model, optimizer, 0, 3)
            own = _flat(module)
            with model.averaged() as shown:
                assert shown is module
                means.append(_flat(module))
                with pytest.raises(UsageError, match="under way already"), model.averaged():
                    pass
                torch.testing.assert_close(_flat(module), means[-1], rtol=0, atol=0)
            torch.testing.assert_close(_flat(module), own, rtol=0, atol=0)
        me.store.set("looked", "")
    else:
        for step in itertools.count():
            _train(model, optimizer, me.rank, 1)
            if step % 10 == 0 and me.store.check(["looked"]):
                break
            time.sleep(0.001)
    with pytest.raises(KeyError), model.averaged():
        raise KeyError
    model.finish()
    with model.averaged() as free:
        means.append(_flat(free))
    return torch.stack(means).tolist(), _flat(module).tolist()


def test_one_worker_looks_at_the_mean_while_the_others_train_on() -> None:
    expected = torch.stack([_flat(_model(rank)) for rank in range(3)]).mean(0)
    for means, final in (map(torch.tensor, result) for result in run_ranks(_averaged_alone, 3)):
        torch.testing.assert_close(final, expected, rtol=1e-4, atol=1e-5)
        # A mean taken while groups average holds each worker's weights at its own moment.
        assert ((means - expected).norm(dim=1) < 0.8 * (_flat(_model(0)) - expected).norm()).all()
        torch.testing.assert_close(means[-1], final)


def _uneven(me: Member, overlap: bool) -> list[float]:
    module = _model(me.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = paceline.Decentralized(module, optimizer, overlap=overlap)
    _train(model, optimizer, me.rank, (0, 1, 150)[me.rank])
    assert not model.done
    model.finish()
    return _flat(module).tolist()


@pytest.mark.parametrize("overlap", [True, False])
def test_workers_make_different_numbers_of_steps(overlap: bool) -> None:
    _assert_equal(run_ranks(_uneven, 3, overlap))


def _until_done(me: Member, total: int) -> tuple[int, list[float]]:
    module = _model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    model = paceline.Decentralized(module, optimizer, total_steps=total)
    while not model.done:
        _train(model, optimizer, me.rank, 1)
        time.sleep(0.001 * (1 + me.rank))
    model.finish()
    return model.statistics.steps, _flat(module).tolist()


def test_a_total_of_steps_ends_the_training() -> None:
    results = run_ranks(_until_done, 3, 150)
    assert sum(steps for steps, _ in results) >= 150
    _assert_equal([weights for _, weights in results])


def _alone(me: Member) -> None:
    module = _model()
    bare = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    model = paceline.Decentralized(module, optimizer)
    _train(model, optimizer, me.rank, 20)
    with model.averaged():
        pass
    model.finish()
    other = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
    for step in range(20):
        other.zero_grad()
        _loss(bare, me.rank, step).backward()
        other.step()
    torch.testing.assert_close(_flat(module), _flat(bare), rtol=0, atol=0)


def test_a_single_worker_trains_as_without() -> None:
    run_ranks(_alone, 1)


def _refusals(_: Member) -> None:
    module = _model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def refused(match: str, *args: Any, kind: type[Exception] = UsageError, **options: Any) -> None:
        with pytest.raises(kind, match=match):
            paceline.Decentralized(*(args or (module, optimizer)), **options)

    refused("no scheme 'ripple': choose one of", scheme="ripple")
    refused("'ripples' has no option 'groups': it takes overlap, group_size", groups=4)
    refused("group_size is 1: a group has at least 2", group_size=1)
    refused("group_size is 'large': give a number of 2 or more", group_size="large")
    refused("no formation 'ring': choose one of first_come", formation="ring")
    refused("lease_s above 0", lease_s=0)
    refused("total_steps is 0: it must be 1 or more", total_steps=0)
    refused("timeout_s is 0: it must be above 0", timeout_s=0)
    refused("process_group or a generator, not both", process_group=dist.group.WORLD, generator="127.0.0.1:1")
    refused('only "ripples" runs with generator=', scheme="static", generator="127.0.0.1:1")
    refused("paceline generator --total-steps", total_steps=5, generator="127.0.0.1:1")
    refused("needs the job's secret: pass secret_file=", generator="127.0.0.1:1")
    refused("wraps a torch.nn.Module, not Linear|not list", [module], optimizer)
    refused("takes one optimizer", module, [optimizer])
    refused("the optimizer's parameters are not the module's", module, torch.optim.SGD(_model().parameters(), lr=1))
    frozen = _model().requires_grad_(requires_grad=False)
    refused("no parameter of the module requires a gradient", frozen, torch.optim.SGD(frozen.parameters(), lr=1))
    sparse = nn.Sequential(nn.Embedding(3, 2, sparse=True))
    refused("sparse=False", sparse, torch.optim.SGD(sparse.parameters(), lr=1), kind=UnsupportedError)

    model = paceline.Decentralized(module, optimizer)  # none of these has left anything behind
    refused("is in another Decentralized already: close\\(\\) that one")
    refused("is in another Decentralized already", model, optimizer)
    with pytest.raises(UsageError, match=r"DistributedDataParallel around paceline.Decentralized would reduce"):
        DistributedDataParallel(model)
    model.close()
    model.close()
    inside = DistributedDataParallel(_model())
    refused("around DistributedDataParallel would reduce", inside, torch.optim.SGD(inside.parameters(), lr=1))
    again = paceline.Decentralized(module, optimizer)
    again.finish()


def test_wrong_arguments_are_named() -> None:
    run_ranks(_refusals, 1)


def test_without_a_process_group_there_is_an_error() -> None:
    module = _model()
    with pytest.raises(UsageError, match="init_process_group"):
        paceline.Decentralized(module, torch.optim.SGD(module.parameters(), lr=0.1))


def _other_model(me: Member) -> str:
    module = nn.Linear(3, 2 + me.rank)
    with pytest.raises(UsageError) as caught:
        paceline.Decentralized(module, torch.optim.SGD(module.parameters(), lr=0.1))
    return str(caught.value)


def test_models_that_differ_are_named() -> None:
    for said in run_ranks(_other_model, 2):
        assert "rank 1 has another model than rank 0" in said


def _still(me: Member, overlap: bool, formation: str, group_size: int) -> tuple[list[float], list[float], int]:
    """With a learning rate of 0 averages alone change the weights."""
    module = _model(me.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model = paceline.Decentralized(
        module, optimizer, init_sync=False, overlap=overlap, formation=formation, group_size=group_size, patience_s=1
    )
    _until_averaged(me, model, lambda _: _train(model, optimizer, me.rank, 1), 12)
    before = _flat(module)
    model.finish()
    return before.tolist(), _flat(module).tolist(), _num_averages(model)


@pytest.mark.parametrize(
    ("overlap", "formation", "group_size"),
    [(True, "first_come", 2), (False, "first_come", 2), (True, "division", 3), (False, "inter_intra", 2)],
)
def test_the_mean_is_kept_and_the_spread_shrinks(overlap: bool, formation: str, group_size: int) -> None:
    workers = 4
    begin = torch.stack([_flat(_model(rank)) for rank in range(workers)])
    results = run_ranks(_still, workers, overlap, formation, group_size)
    for _, final, _ in results:
        torch.testing.assert_close(torch.tensor(final), begin.mean(0), rtol=1e-4, atol=1e-5)
    end = torch.tensor([before for before, _, _ in results])
    assert max(count for _, _, count in results) >= 3
    assert (end - end.mean(0)).norm() < 0.7 * (begin - begin.mean(0)).norm()


def _own_features(me: Member, overlap: bool) -> float:
    """A worker's inputs are zero but for its own features: of the others it learns by averaging alone."""
    features = WIDTH * me.world_size
    teacher = torch.ones(features)
    module = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2)
    model = paceline.Decentralized(module, optimizer, overlap=overlap)
    source = torch.Generator().manual_seed(me.rank)
    own = torch.zeros(features)
    own[WIDTH * me.rank : WIDTH * (me.rank + 1)] = 1

    def step_once(_: int) -> None:
        inputs = torch.randn(32, features, generator=source) * own
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs).squeeze(1), inputs @ teacher).backward()
        optimizer.step()

    _until_averaged(me, model, step_once, 60)
    model.finish()
    return float((module.weight.detach().squeeze(0) - teacher).square().sum())


@pytest.mark.parametrize("overlap", [True, False])
def test_workers_learn_what_only_others_have_data_for(overlap: bool) -> None:
    workers = 3
    alone = WIDTH * (workers - 1)  # the squared error of a worker that knows its own features perfectly
    for error in run_ranks(_own_features, workers, overlap):
        assert error < 0.1 * alone


def _odd_ends(me: Member) -> list[float]:
    """Steps that raise; a closure that raises; a worker that closes in the middle of the training."""
    module = _model(me.rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = paceline.Decentralized(module, optimizer)
    raising = [False]

    def fail(*_: object) -> None:
        if raising[0]:
            raise KeyError("a step")

    handle = optimizer.register_step_pre_hook(fail)
    for step in range(40):
        raising[0] = step % 5 == 4
        optimizer.zero_grad()
        _loss(model, me.rank, step).backward()
        if raising[0]:
            with pytest.raises(KeyError):
                optimizer.step()
        elif step % 5 == 3:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
        else:
            optimizer.step()
        time.sleep(0.001)
    if me.rank == 2:
        raising[0] = True
        with pytest.raises(KeyError):
            optimizer.step()
        model.close()  # while a step is under way: it has raised
        assert not torch.equal(_flat(module), torch.zeros_like(_flat(module)))
        return []
    raising[0] = False
    handle.remove()
    model.finish()
    return _flat(module).tolist()


def test_steps_may_raise_and_a_worker_may_leave() -> None:
    results = run_ranks(_odd_ends, 3)
    _assert_equal(results[:2])


EXIT = """
import sys, time, torch, torch.distributed as dist, paceline
dist.init_process_group(sys.argv[1], store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[3]), world_size=2)
module = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
model = paceline.Decentralized(module, optimizer)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
if sys.argv[4] == "raise":
    raise KeyError("at the end")
if sys.argv[4] == "destroy":
    dist.destroy_process_group()
print("end")
"""


@pytest.mark.parametrize("ways", [("return", "raise"), ("destroy", "destroy")])
def test_a_process_may_end_without_closing(ways: tuple[str, str], tmp_path: Any) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, "paceline", str(tmp_path / "store"), str(rank), way],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, way in enumerate(ways)
    ]
    try:
        for process, how in zip(processes, ways, strict=True):
            out, error = process.communicate(timeout=60)
            assert process.returncode == (1 if how == "raise" else 0), error
            assert ("KeyError: 'at the end'" in error) if how == "raise" else (out == "end\n"), error
            assert "terminate called" not in error
            assert "Exception ignored" not in error
    finally:
        for process in processes:
            process.kill()
            process.wait()
