"""paceline.Decentralized under faults: workers that die, stand still, raise, lie, come late or go early.

The contract: those that are left go on, and ``finish()`` leaves equal weights on all of them. ``FAULTS`` says how many
workers to kill at random moments (default 20). No time is asserted; the limits are there for a hang.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import GeneratorError
from paceline.lab import Lab
from paceline.policy.groups import Rules
from paceline.train.decentralized.generator import GeneratorService
from paceline.train.decentralized.generator.secret import read_or_make_secret
from ranks import BACKEND, Member, Outcome, Ranks

FAULTS = int(os.environ.get("FAULTS", "20"))
LIMIT_S = 100.0
KILLS_A_JOB = 5
SHORT = {"patience_s": 1.0, "longest_average_s": 10.0, "timeout_s": 60.0}
RULES = Rules(group_size=2, lease_s=5, patience_s=1, longest_average_s=10)
loses_ranks = pytest.mark.skipif(BACKEND == "gloo", reason="Gloo waits for a lost rank until the group's time limit")
LAB_RANK = Path(__file__).with_name("decentralized_lab_rank.py")


def _model(seed: int = 0, width: int = 8) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def _flat(module: nn.Module) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in module.parameters()])


def _wrap(module: nn.Module, lr: float = 0.01, **options: Any) -> tuple[paceline.Decentralized, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    return paceline.Decentralized(module, optimizer, **{"lease_s": 5.0, **SHORT, **options}), optimizer


def _step(model: paceline.Decentralized, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()


def _train_until(
    me: Member, model: paceline.Decentralized, optimizer: torch.optim.Optimizer, key: str, more: int = 0
) -> None:
    """Make steps until a key is in the store and, from then on, a worker has taken part in some more averages."""
    goal, step, end_s = None, 0, time.monotonic() + LIMIT_S
    while goal is None or model.statistics.groups.total() < goal:
        assert time.monotonic() < end_s, f"{model.statistics}, waiting for {key} and {more} more averages"
        _step(model, optimizer)
        time.sleep(0.001)
        step += 1
        if step % 5 == 0:
            if goal is None and me.store.check([key]):
                goal = model.statistics.groups.total() + more
            if me.store.check([f"{key}/enough"]):
                return
    me.store.set(f"{key}/enough", "")


def _await(ranks: Ranks, event: str, who: Iterable[int]) -> None:
    """Wait until these workers have reported an event."""
    end_s = time.monotonic() + LIMIT_S
    for rank in who:
        while not ranks.store.check([f"{event}/{rank}"]):
            broken = [outcome.error for outcome in ranks.ended() if outcome.error and outcome.rank == rank]
            assert not broken, broken
            assert time.monotonic() < end_s, f"no {event!r} of worker {rank}"
            time.sleep(0.01)


def _assert_equal(outcomes: list[Outcome]) -> list[list[float]]:
    failed = [outcome.error or f"worker {outcome.rank} died" for outcome in outcomes if outcome.error or outcome.killed]
    assert not failed, "\n".join(failed)
    values: list[list[float]] = [outcome.value for outcome in outcomes]
    for value in values[1:]:
        assert value == pytest.approx(values[0], rel=1e-5, abs=1e-6)
    assert all(map(math.isfinite, values[0]))
    return values


@contextmanager
def _service(tmp_path: Path, **options: Any) -> Iterator[tuple[str, str]]:
    """A generator without a process group: its address, and the file with the job's secret."""
    file = tmp_path / "secret"
    service = GeneratorService(secret=read_or_make_secret(file)[0], rules=RULES, settle_s=0.0, **options)
    service.start()
    try:
        yield service.address, str(file)
    finally:
        service.stop()


# Kills at random moments.


def victim(me: Member) -> list[float]:
    """Train, look at the mean now and then, and finish when told to."""
    me.join()
    module = _model()
    model, optimizer = _wrap(module, overlap=me.rank % 3 != 2)
    me.store.set(f"ready/{me.rank}", "")
    for step in range(10**6):
        _step(model, optimizer)
        time.sleep(0.0005 * (1 + me.rank % 3))
        if step % 10 == 0 and me.store.check(["enough"]):
            break
        if step % 40 == 39 and me.rank % 2:
            with model.averaged():
                pass
    model.finish()
    return _flat(module).tolist()


@loses_ranks
@pytest.mark.timeout(60 + 15 * FAULTS)
def test_any_worker_may_die_at_any_moment() -> None:
    dice = random.Random(FAULTS)
    left = FAULTS
    while left:
        kills = min(KILLS_A_JOB, left)
        left -= kills
        workers = kills + 2
        dead = dice.sample(range(workers), kills)
        others = [rank for rank in range(workers) if rank not in dead]
        with Ranks(victim, workers, join=False) as ranks:
            _await(ranks, "ready", range(workers))
            for number, rank in enumerate(dead):
                if number == kills - 1:  # while the others finish
                    ranks.store.set("enough", "")
                time.sleep(dice.uniform(0, 0.25))
                ranks.signal(rank, signal.SIGKILL)
            try:
                _assert_equal(ranks.outcomes(LIMIT_S, others))
            except (AssertionError, TimeoutError) as error:
                raise AssertionError(f"after kills of {dead} among {workers}: {error}") from error


# The generator.


def heir(me: Member) -> list[float]:
    """Average with others after the one that ran the generator is gone."""
    me.join()
    module = _model()
    model, optimizer = _wrap(module)
    me.store.set(f"ready/{me.rank}", "")
    _train_until(me, model, optimizer, "killed", more=3)
    model.finish()
    return _flat(module).tolist()


@loses_ranks
def test_a_standby_takes_over_when_the_generator_dies_with_its_worker() -> None:
    with Ranks(heir, 3, join=False) as ranks:
        _await(ranks, "ready", range(3))
        time.sleep(0.2)
        ranks.signal(0, signal.SIGKILL)
        ranks.outcomes(LIMIT_S, [0])
        ranks.store.set("killed", "")
        _assert_equal(ranks.outcomes(LIMIT_S, [1, 2]))


def comer(me: Member, address: str, secret: str, more: int) -> list[float]:
    """Join by a generator's address; train until told, then for some averages, and finish."""
    module = _model(me.rank)
    model, optimizer = _wrap(module, generator=address, secret_file=secret)
    me.store.set(f"ready/{me.rank}", "")
    _train_until(me, model, optimizer, "go", more)
    model.finish()
    return _flat(module).tolist()


@contextmanager
def _generator_program(listen: str, secret: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    program = [sys.executable, "-c", "from paceline.cli.main import run; run()", "generator"]
    place = ["--listen", listen, "--secret-file", str(secret), "--json"]
    rules = ["--lease", "5s", "--patience", "1s", "--group-size", "2"]
    process = subprocess.Popen([*program, *place, *rules], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["listening"]
    finally:
        process.kill()
        process.communicate()


def test_the_generator_may_die_and_start_again(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with _generator_program("127.0.0.1:0", secret) as (process, address):
        ranks = Ranks(comer, 3, address, str(secret), 3, join=False)
        with ranks:
            _await(ranks, "ready", range(3))
            time.sleep(0.2)
            process.kill()
            process.wait()
            time.sleep(0.5)  # steps alone
            with _generator_program(address, secret) as (_, again):
                assert again == address
                ranks.store.set("go", "")
                _assert_equal(ranks.outcomes(LIMIT_S))


# Workers that stand still.


def sleeper(me: Member, overlap: bool) -> list[float]:
    """With a learning rate of 0 weights stay as they are; those that are awake add 100 to theirs at the key."""
    me.join()
    module = _model()
    model, optimizer = _wrap(module, lr=0.0, lease_s=2.5, overlap=overlap)
    me.store.set(f"ready/{me.rank}", "")
    if me.rank == 2:
        _train_until(me, model, optimizer, "awake", more=1)
    else:
        _train_until(me, model, optimizer, "paused")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(100.0)
        me.store.set(f"changed/{me.rank}", "")
        _train_until(me, model, optimizer, "awake", more=1)
    model.finish()
    return _flat(module).tolist()


@loses_ranks
@pytest.mark.parametrize("overlap", [True, False])
def test_the_weights_of_a_worker_that_stood_still_overwrite_nothing(overlap: bool) -> None:
    with Ranks(sleeper, 3, overlap, join=False) as ranks:
        _await(ranks, "ready", range(3))
        time.sleep(0.2)
        ranks.signal(2, signal.SIGSTOP)
        time.sleep(4.5)  # its lease is over
        ranks.store.set("paused", "")
        _await(ranks, "changed", (0, 1))
        ranks.signal(2, signal.SIGCONT)
        ranks.store.set("awake", "")
        values = _assert_equal(ranks.outcomes(LIMIT_S))
    assert values[0] == pytest.approx((_flat(_model()) + 100).tolist(), rel=1e-4)


# Workers that are none.


def stranger(me: Member, address: str, secret: str, wrong: str) -> str | list[float]:
    """Rank 2 has another model, and rank 3 another secret."""
    if me.rank < 2:
        return comer(me, address, secret, more=2)
    me.store.wait([f"ready/{rank}" for rank in range(2)])
    with pytest.raises(GeneratorError) as caught:
        _wrap(_model(width=9 if me.rank == 2 else 8), generator=address, secret_file=secret if me.rank == 2 else wrong)
    me.store.set(f"refused/{me.rank}", "")
    return str(caught.value)


def test_another_model_or_secret_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    read_or_make_secret(wrong)
    with _service(tmp_path) as (address, secret), Ranks(stranger, 4, address, secret, str(wrong), join=False) as ranks:
        _await(ranks, "refused", (2, 3))
        ranks.store.set("go", "")
        outcomes = ranks.outcomes(LIMIT_S)
        _assert_equal(outcomes[:2])
        assert "model is not the one of the job's other workers: 6 parameters, 101 elements" in str(outcomes[2])
        assert "secret" in outcomes[3].value


# Coming and going.


def last_comer(me: Member, address: str, secret: str) -> list[float]:
    """Rank 2 joins when the others have finished but for one step of rank 1."""
    module = _model(me.rank)
    if me.rank == 2:
        me.store.wait(["finishing"])
    elif me.rank == 1:
        me.store.wait(["ready/0"])
    model, optimizer = _wrap(module, lr=0.0, generator=address, secret_file=secret)
    me.store.set(f"ready/{me.rank}", "")
    if me.rank == 0:
        me.store.wait(["ready/1"])
        _step(model, optimizer)
        me.store.set("finishing", "")
    if me.rank == 1:
        me.store.wait(["ready/2"])
    model.finish()
    return _flat(module).tolist()


def test_a_worker_may_join_in_the_last_second(tmp_path: Path) -> None:
    with _service(tmp_path) as (address, secret), Ranks(last_comer, 3, address, secret, join=False) as ranks:
        values = _assert_equal(ranks.outcomes(LIMIT_S))
    assert values[0] == pytest.approx(_flat(_model(0)).tolist(), rel=1e-4, abs=1e-5)  # each newcomer copies


def late_comer(me: Member, address: str, secret: str) -> list[float] | str:
    """Others join at random moments around the end of a job with a total of steps."""
    module = _model(me.rank)
    time.sleep(0 if me.rank == 0 else random.Random(me.rank).uniform(0.1, 0.8))
    try:
        model, optimizer = _wrap(module, generator=address, secret_file=secret)
    except GeneratorError as error:
        return str(error)
    while not model.done:
        _step(model, optimizer)
        time.sleep(0.001)
    model.finish()
    return _flat(module).tolist()


def test_workers_that_come_at_the_end_take_part_or_are_told(tmp_path: Path) -> None:
    with (
        _service(tmp_path, total_steps=400) as (address, secret),
        Ranks(late_comer, 5, address, secret, join=False) as ranks,
    ):
        outcomes = ranks.outcomes(LIMIT_S)
    came = [outcome for outcome in outcomes if not isinstance(outcome.value, str)]
    _assert_equal(came)
    for outcome in outcomes:
        assert outcome in came or "the job has ended after" in outcome.value


def leaver(me: Member) -> list[float]:
    """All leave but rank 1; one of them by an error in its training code."""
    me.join()
    module = _model()
    model, optimizer = _wrap(module)
    for _ in range(20 + 10 * me.rank):
        _step(model, optimizer)
        time.sleep(0.001)
    if me.rank == 2:
        raise ZeroDivisionError("the training's own")
    if me.rank != 1:
        model.close()
        me.store.set(f"left/{me.rank}", "")
        return []
    _train_until(me, model, optimizer, "alone")
    begin = model.statistics.steps
    for _ in range(20):
        _step(model, optimizer)
    assert model.statistics.steps == begin + 20
    own = _flat(module)
    with model.averaged():
        torch.testing.assert_close(_flat(module), own)
    model.finish()
    torch.testing.assert_close(_flat(module), own)
    return _flat(module).tolist()


@loses_ranks
def test_all_workers_but_one_may_leave() -> None:
    with Ranks(leaver, 4, join=False) as ranks:
        _await(ranks, "left", (0, 3))
        (raised,) = ranks.outcomes(LIMIT_S, [2])
        assert "ZeroDivisionError: the training's own" in str(raised.error)
        ranks.store.set("alone", "")
        _assert_equal(ranks.outcomes(LIMIT_S, [1]))


# More than one job, and links that are cut.


def member_of_job(me: Member, job: int) -> list[float]:
    """With a learning rate of 0 only averages with another job could change the weights."""
    me.join()
    module = _model(job)
    model, optimizer = _wrap(module, lr=0.0)
    for _ in range(100):
        _step(model, optimizer)
        time.sleep(0.001)
    model.finish()
    return _flat(module).tolist()


def test_two_jobs_on_a_host_do_not_mix() -> None:
    with Ranks(member_of_job, 2, 1, join=False) as one, Ranks(member_of_job, 2, 2, join=False) as other:
        for job, ranks in ((1, one), (2, other)):
            for value in _assert_equal(ranks.outcomes(LIMIT_S)):
                assert value == pytest.approx(_flat(_model(job)).tolist(), rel=1e-5)


@pytest.mark.lab(hosts=3, up="100mbit", down="100mbit")
def test_a_link_may_be_cut_while_groups_average(lab: Lab) -> None:
    processes = [
        host.popen([sys.executable, str(LAB_RANK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for host in lab.hosts
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "working\n"
        lab.cut(2)
        time.sleep(random.Random(3).uniform(3, 4))  # longer than the lease
        for process in processes[:2]:
            assert process.stdin is not None
            process.stdin.write("end\n")
            process.stdin.flush()
        said = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in processes[:2]]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert said[0]["sum"] == pytest.approx(said[1]["sum"])
    assert said[0]["norm"] == pytest.approx(said[1]["norm"])
