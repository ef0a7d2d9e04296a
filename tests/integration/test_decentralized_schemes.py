"""Decentralized with the schemes in which all workers meet, and with parameter servers: on real ranks."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from effort import thorough
from paceline.errors import UsageError
from ranks import BACKEND, Member, Ranks, run_ranks

ROUNDING = 2e-6
SCHEMES: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "local-sgd": {"local_steps": 4},
    "diloco": {"local_steps": 4},
    "ps": {},
    "ps-async": {"staleness": 2},
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05),
    "plain": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
}


def build(norm: bool = False, optimizer: str = "sgd") -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    layers = [nn.Linear(8, 16), *([nn.BatchNorm1d(16)] if norm else []), nn.Tanh(), nn.Linear(16, 3)]
    net = nn.Sequential(*layers)
    return net, OPTIMIZERS[optimizer](net.parameters())


def loss_of(model: nn.Module, step: int, worker: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 * step + worker)
    inputs = torch.randn((8, 8), generator=dice)
    return nn.functional.cross_entropy(model(inputs), (inputs.sum(1) > 0).long())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step, worker).backward()
        optimizer.step()


def flat(net: nn.Module, buffers: bool = False) -> torch.Tensor:
    tensors = [*net.parameters(), *(one for one in net.buffers() if one.is_floating_point() and buffers)]
    return torch.cat([one.detach().flatten() for one in tensors])


def spread(net: nn.Module, buffers: bool = True) -> float:
    """The largest difference between this worker's weights and the mean of all."""
    own = flat(net, buffers)
    mean = own.clone()
    dist.all_reduce(mean)
    return float((mean / dist.get_world_size() - own).abs().max())


def validation(net: nn.Module) -> float:
    net.eval()
    with torch.no_grad():
        loss = sum(loss_of(net, 5000 + one, 0).item() for one in range(20))
    net.train()
    return loss


def mean_gradient_training(optimizer: str, num_workers: int, steps: int) -> torch.Tensor:
    """One process, with the mean of all workers' gradients."""
    net, made = build(optimizer=optimizer)
    for step in range(steps):
        made.zero_grad()
        for worker in range(num_workers):
            (loss_of(net, step, worker) / num_workers).backward()
        made.step()
    return flat(net)


def _equals_ddp(me: Member) -> None:
    for name in ("sgd", "adamw"):
        net, optimizer = build(optimizer=name)
        train(nn.parallel.DistributedDataParallel(net), optimizer, me.rank, 10)
        ours, made = build(optimizer=name)
        model = paceline.Decentralized(ours, made, scheme="allreduce")
        train(model, made, me.rank, 10)
        assert (flat(net) - flat(ours)).abs().max() < ROUNDING
        model.finish()
        assert (flat(net) - flat(ours)).abs().max() < ROUNDING
        assert model.statistics.steps == 10
        assert model.statistics.groups == {3: 10}
        assert model.statistics.bytes_sent > 0


def test_allreduce_equals_ddp() -> None:
    run_ranks(_equals_ddp, 3)


def _averages(me: Member) -> None:
    ours, made = build(optimizer="plain")
    model = paceline.Decentralized(ours, made, scheme="local-sgd", local_steps=1)
    train(model, made, me.rank, 6)
    assert (flat(ours) - mean_gradient_training("plain", 3, 6)).abs().max() < ROUNDING  # one step: the same for SGD
    model.finish()

    ours, made = build()
    net, optimizer = build()
    model = paceline.Decentralized(ours, made, scheme="local-sgd", local_steps=4)
    for period in range(3):
        train(net, optimizer, me.rank, 4, 4 * period)
        train(model, made, me.rank, 3, 4 * period)
        assert spread(ours) > 1e-4
        train(model, made, me.rank, 1, 4 * period + 3)
        mean = flat(net)
        dist.all_reduce(mean)
        nn.utils.vector_to_parameters(mean / 3, net.parameters())
        assert (flat(ours) - mean / 3).abs().max() < ROUNDING
    model.finish()


def test_local_sgd_averages_every_few_steps() -> None:
    run_ranks(_averages, 3)


def _outer_steps(me: Member) -> None:
    net, optimizer = build()
    outer = nn.Parameter(flat(net))
    nesterov = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for period in range(5):
        train(net, optimizer, me.rank, 3, 3 * period)
        change = outer.detach() - flat(net)
        dist.all_reduce(change)
        outer.grad = change / 3
        nesterov.step()
        nn.utils.vector_to_parameters(outer.detach().clone(), net.parameters())
    ours, made = build()
    model = paceline.Decentralized(ours, made, scheme="diloco", local_steps=3)
    train(model, made, me.rank, 15)
    assert (flat(ours) - outer).abs().max() < 1e-5
    model.finish()
    assert (flat(ours) - outer).abs().max() < 1e-5


def test_diloco_equals_its_definition() -> None:
    run_ranks(_outer_steps, 3)


def _serves_in_bulk(me: Member) -> None:
    for name in ("sgd", "adamw"):
        wanted = mean_gradient_training(name, 3, 10)
        ours, made = build(optimizer=name)
        model = paceline.Decentralized(ours, made, scheme="ps")
        train(model, made, me.rank, 10)
        assert (flat(ours) - wanted).abs().max() < 1e-5
        model.finish()
        sent = 11 * 4 * len(wanted) * (2 if me.rank == 0 else 1)
        assert sent <= model.statistics.bytes_sent < 1.1 * sent
        assert (flat(ours) - wanted).abs().max() < 1e-5
        if me.rank == 0 and name == "adamw":
            assert all(float(made.state[one]["step"]) == 10 for one in ours.parameters())


def test_a_parameter_server_trains_with_mean_gradients() -> None:
    run_ranks(_serves_in_bulk, 3)


def _some_ranks(me: Member, scheme: str) -> list[float]:
    """Ranks 3, 1 and 2 of four, in this order."""
    group = dist.new_group([3, 1, 2], sort_ranks=False)
    if me.rank == 0:
        return []
    ours, made = build()
    model = paceline.Decentralized(ours, made, group, scheme=scheme)
    train(model, made, dist.get_rank(group), 6)
    model.finish()
    return flat(ours).tolist()


@pytest.mark.parametrize("scheme", ["allreduce", "ps"])
def test_some_ranks_train(scheme: str) -> None:
    wanted = mean_gradient_training("sgd", 3, 6)
    for ours in run_ranks(_some_ranks, 4, scheme)[1:]:
        assert (torch.tensor(ours) - wanted).abs().max() < 1e-5


def _alone(me: Member) -> None:
    for scheme, options in SCHEMES.items():
        if scheme == "diloco":
            continue
        for name in ("sgd", "adamw"):
            net, optimizer = build(optimizer=name)
            train(net, optimizer, me.rank, 10)
            ours, made = build(optimizer=name)
            model = paceline.Decentralized(ours, made, scheme=scheme, **options)
            train(model, made, me.rank, 10)
            model.finish()
            assert (flat(ours) - flat(net)).abs().max() < ROUNDING, scheme
            train(ours, made, me.rank, 5, 10)  # with the server's state of the optimizer
            train(net, optimizer, me.rank, 5, 10)
            assert (flat(ours) - flat(net)).abs().max() < 2 * ROUNDING, scheme


def test_one_worker_trains_as_without() -> None:
    run_ranks(_alone, 1)


def _converges(me: Member, scheme: str) -> int:
    ours, made = build(norm=True, optimizer="plain")
    begin = validation(ours)
    model = paceline.Decentralized(ours, made, scheme=scheme, total_steps=900, **SCHEMES[scheme])
    step = 0
    while not model.done:
        time.sleep((0, 0.001, 0.004)[me.rank])
        train(model, made, me.rank, 1, step)
        step += 1
    model.finish()
    assert spread(ours) < ROUNDING
    assert validation(ours) < 0.6 * begin
    return step


@pytest.mark.parametrize("scheme", SCHEMES)
def test_workers_of_different_speed_converge(scheme: str) -> None:
    steps = run_ranks(_converges, 3, scheme)
    if scheme == "ps-async":
        assert 900 <= sum(steps) <= 902  # those under way when training ends
        assert max(steps) - min(steps) <= SCHEMES[scheme]["staleness"] + 1
    else:
        assert steps == [300, 300, 300]


def _ends_unevenly(me: Member, scheme: str) -> tuple[Any, ...]:
    ours, made = build(norm=True)
    model = paceline.Decentralized(ours, made, scheme=scheme, **SCHEMES[scheme])
    train(model, made, me.rank, (0, 7, 18)[me.rank])
    model.finish()
    assert spread(ours) < ROUNDING
    assert not model.done
    return tuple(flat(ours, buffers=True).tolist()), model.statistics.steps


@pytest.mark.parametrize("scheme", SCHEMES)
def test_workers_end_when_their_data_ends(scheme: str) -> None:
    ended = run_ranks(_ends_unevenly, 3, scheme)
    assert [steps for _, steps in ended] == [0, 7, 18]
    net, _ = build(norm=True)
    assert (torch.tensor(ended[0][0]) - flat(net, buffers=True)).abs().max() > 0.01


def _last_one(me: Member, scheme: str) -> list[float]:
    ours, made = build()
    model = paceline.Decentralized(ours, made, scheme=scheme)
    train(model, made, me.rank, (4, 9)[me.rank])
    model.finish()
    return flat(ours).tolist()


@pytest.mark.parametrize("scheme", ["allreduce", "ps"])
def test_means_are_of_those_that_train(scheme: str) -> None:
    """Worker 1 goes on alone after four steps, with the same state of the optimizer."""
    net, optimizer = build()
    for step in range(9):
        optimizer.zero_grad()
        workers = (0, 1) if step < 4 else (1,)
        for worker in workers:
            (loss_of(net, step, worker) / len(workers)).backward()
        optimizer.step()
    for ours in run_ranks(_last_one, 2, scheme):
        assert (torch.tensor(ours) - flat(net)).abs().max() < ROUNDING


def _evaluates(me: Member, scheme: str, epochs: tuple[int, int]) -> None:
    """Averages between epochs, the last after the end of the training's; then a second training."""
    ours, made = build(norm=True)
    for _ in range(2):
        model = paceline.Decentralized(ours, made, scheme=scheme, **SCHEMES[scheme])
        for epoch in range(3):
            train(model, made, me.rank, epochs[me.rank], 10 * epoch)
            before = flat(ours, buffers=True)
            with model.averaged():
                assert spread(ours) < ROUNDING
                shown = flat(ours, buffers=True)
            if epochs[0] == epochs[1]:
                assert (flat(ours, buffers=True) - before).abs().max() == 0
                assert (shown - before).abs().max() > 0
        model.finish()
        assert spread(ours) < ROUNDING


@pytest.mark.parametrize("epochs", thorough([(3, 3), (3, 5), (9, 1)], [(3, 5)]))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_evaluate_the_mean(scheme: str, epochs: tuple[int, int]) -> None:
    run_ranks(_evaluates, 2, scheme, epochs)


def _counts(me: Member, scheme: str, options: dict[str, Any]) -> int:
    ours, made = build()
    model = paceline.Decentralized(ours, made, scheme=scheme, total_steps=31, **options)
    step = 0
    while not model.done:
        train(model, made, me.rank, 1, step)
        step += 1
    model.finish()
    return step


@pytest.mark.parametrize("scheme", ["allreduce", "local-sgd", "diloco", "ps"])
def test_all_are_done_at_the_same_step(scheme: str) -> None:
    assert run_ranks(_counts, 3, scheme, SCHEMES[scheme]) == [11, 11, 11]


def _averages_state(me: Member) -> None:
    ours, made = build()
    model = paceline.Decentralized(ours, made, scheme="local-sgd", local_steps=5, average_state=True)
    train(model, made, me.rank, (0, 5, 10)[me.rank])
    if me.rank == 2:
        assert model.statistics.groups == {3: 2}
    model.finish()
    assert spread(ours) < ROUNDING


def test_state_is_averaged_also_beside_workers_without() -> None:
    run_ranks(_averages_state, 3)


def _refuses(_: Member) -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("allreduce", {"local_steps": 3}, "takes no options"),
        ("local-sgd", {"local_steps": 0}, "local_steps is 0"),
        ("diloco", {"outer_lr": 0.0}, "outer_lr is 0.0"),
        ("diloco", {"outer_momentum": 1.0}, "outer_momentum is 1.0"),
        ("ps", {"staleness": 3}, "takes no options"),
        ("ps-async", {"staleness": -1}, "staleness is -1"),
    ]
    for scheme, options, said in wrong:
        with pytest.raises(UsageError, match=said):
            paceline.Decentralized(*build(), scheme=scheme, **options)
    for scheme in ("allreduce", "ps"):
        ours, made = build()
        model = paceline.Decentralized(ours, made, scheme=scheme)
        with pytest.raises(UsageError, match="without a closure"):
            made.step(lambda: 0.0)
        model.finish()


def test_wrong_options_are_refused() -> None:
    run_ranks(_refuses, 2)


def _loses_one(me: Member, scheme: str) -> str:
    me.join(timeout_s=20)
    ours, made = build()
    model = paceline.Decentralized(ours, made, scheme=scheme, timeout_s=20, **SCHEMES[scheme])
    train(model, made, me.rank, 8)
    if me.rank == 2:
        me.store.set("ready", "")
        time.sleep(600)
    try:
        train(model, made, me.rank, 200, 8)
        model.finish()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return f"done {float(flat(ours).sum())}"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_loss_of_a_worker(scheme: str) -> None:
    with Ranks(_loses_one, 3, scheme, join=False) as ranks:
        ranks.store.wait(["ready"])
        time.sleep(0.2)
        ranks.signal(2, signal.SIGKILL)
        outcomes = ranks.outcomes(60, [0, 1])
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        if scheme == "ps-async":
            assert outcome.value.startswith("done")
        elif scheme == "ps":
            assert "worker 2 is lost" in outcome.value
        else:
            assert "Error" in outcome.value
            assert BACKEND != "paceline" or "rank 2" in outcome.value
    if scheme == "ps-async":
        assert outcomes[0].value == outcomes[1].value


@pytest.mark.parametrize("scheme", ["ps", "ps-async"])
def test_the_loss_of_the_server(scheme: str) -> None:
    with Ranks(_loses_server, 3, scheme, join=False) as ranks:
        ranks.store.wait(["ready"])
        ranks.signal(0, signal.SIGKILL)
        for outcome in ranks.outcomes(60, [1, 2]):
            assert outcome.error is None, outcome.error
            assert "MessageError" in outcome.value
            assert "beside worker 0 cannot be reached" in outcome.value


def _loses_server(me: Member, scheme: str) -> str:
    me.join(timeout_s=20)
    ours, made = build()
    model = paceline.Decentralized(ours, made, scheme=scheme, timeout_s=20, **SCHEMES[scheme])
    if me.rank == 0:
        train(model, made, me.rank, 4)
        me.store.set("ready", "")
        time.sleep(600)
    try:
        train(model, made, me.rank, 200)
    except RuntimeError as error:
        model.close()
        return f"{type(error).__name__}: {error}"
    return "done"


def _leaves(me: Member, leaver: int) -> str:
    """One closes in the middle: the asynchronous server goes on without a worker, and nobody without the server."""
    ours, made = build()
    model = paceline.Decentralized(ours, made, scheme="ps-async", staleness=1)
    if me.rank == leaver:
        train(model, made, me.rank, 2)
        model.close()
        me.meet("done")
        return ""
    try:
        train(model, made, me.rank, 22)
        model.finish()
        said = "finished"
    except RuntimeError as error:
        model.close()
        said = str(error)
    me.meet("done")
    return said


def test_a_worker_leaves() -> None:
    assert run_ranks(_leaves, 3, 1) == ["finished", "", "finished"]


def test_the_server_leaves() -> None:
    said = run_ranks(_leaves, 3, 0)
    assert all("the parameter server beside worker 0 has ended" in one for one in said[1:])


class Mine(torch.optim.Optimizer):
    """An optimizer that torch does not know, and that can be told to fail."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "broken": False})

    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            if group["broken"]:
                raise ValueError("no step today")
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


def _breaks(me: Member) -> str:
    ours, _ = build()
    made = Mine(ours.parameters())
    model = paceline.Decentralized(ours, made, scheme="ps")
    train(model, made, me.rank, 2)
    me.meet("two")
    if me.rank == 0:
        made.param_groups[0]["broken"] = True
    me.meet("broken")
    try:
        train(model, made, me.rank, 2, 2)
    except (RuntimeError, ValueError) as error:
        said = str(error)
    me.meet("said")
    model.close()
    return said


def test_a_step_that_fails_on_the_server_ends_the_training() -> None:
    first, second = run_ranks(_breaks, 2)
    assert "no step today" in first
    assert "the parameter server beside worker 0 has ended" in second
