"""paceline.partial_all_reduce: some ranks of a group, on Paceline's engine and over Gloo's messages."""

from __future__ import annotations

import itertools
import random
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.backend import chosen_algorithms, failure
from paceline.partial import give_up
from ranks import Member, Ranks, run_ranks

BACKENDS = ["paceline", "gloo"]


def _input(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 100).to(dtype)


def _mean(members: list[int] | tuple[int, ...], size: int) -> torch.Tensor:
    return torch.stack([_input(rank, size) for rank in members]).mean(0)


def _teams(me: Member) -> str:
    """Every set of ranks at least once, in an order of its own on each rank; sizes, operations, types, strides."""
    sets = [list(some) for count in range(1, 5) for some in itertools.combinations(range(me.world_size), count)]
    for size in (0, 1, 1000, 50_003):
        works: list[tuple[torch.Tensor, list[int], Any]] = []
        for number, members in enumerate(sets):
            if me.rank in members and me.backend == "paceline":
                tensor = _input(me.rank, size)
                random.Random(number).shuffle(members)
                works.append((tensor, members, paceline.partial_all_reduce(tensor, members, async_op=True)))
            elif me.rank in members:
                tensor = _input(me.rank, size)
                paceline.partial_all_reduce(tensor, members)
                works.append((tensor, members, None))
        for tensor, members, work in works:
            if work is not None:
                work.wait()
            torch.testing.assert_close(tensor, _mean(members, size), atol=1e-4, rtol=1e-5)
    if me.rank in (1, 3):
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32):
            tensor, other = _input(me.rank, 100, dtype), _input(4 - me.rank, 100, dtype)
            total = tensor + other
            paceline.partial_all_reduce(tensor, (1, 3), dist.ReduceOp.SUM)
            torch.testing.assert_close(tensor, total)
        tensor = _input(me.rank, 60).view(6, 10).t()
        paceline.partial_all_reduce(tensor, (3, 1), dist.ReduceOp.MAX)
        torch.testing.assert_close(tensor, torch.maximum(_input(1, 60), _input(3, 60)).view(6, 10).t())
    total = torch.ones(10)
    dist.all_reduce(total)
    assert total[0] == me.world_size
    return "done"


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_ranks_reduce(backend: str) -> None:
    assert run_ranks(_teams, 4, backend=backend) == ["done"] * 4


def _own_order(me: Member) -> str:
    """Operations of many teams under way, begun in another order on each rank, with the group's own among them."""
    rng = random.Random(5)
    jobs = [
        (number, rng.sample(range(me.world_size), rng.randint(2, 4)), rng.choice([10, 5000, 200_000]))
        for number in range(60)
    ]
    mine = [job for job in jobs if me.rank in job[1]]
    random.Random(me.rank).shuffle(mine)
    total = torch.ones(100_000)
    ours = dist.all_reduce(total, async_op=True)
    started = []
    for number, members, size in mine:
        tensor = _input(me.rank, size)
        started.append((members, tensor, paceline.partial_all_reduce(tensor, members, number=number, async_op=True)))
    for members, tensor, work in started:
        work.wait()
        torch.testing.assert_close(tensor, _mean(members, tensor.numel()), atol=1e-4, rtol=1e-5)
    assert ours is not None
    ours.wait()
    assert total[0] == me.world_size
    return "\n".join(chosen_algorithms())


def test_calls_come_in_any_order() -> None:
    said = run_ranks(_own_order, 5)
    assert "partial allreduce up to" in said[0]
    assert "of 4 ranks" in said[0]


def _refusals(me: Member) -> None:
    tensor = torch.ones(3)
    for members, words in (([], "each once"), ([0, 0], "each once"), ([0, 9], "0 to 1"), ([1 - me.rank], "not one of")):
        with pytest.raises(paceline.UsageError, match=words):
            paceline.partial_all_reduce(tensor, members)
    with pytest.raises(paceline.UsageError, match="below 2"):
        paceline.partial_all_reduce(tensor, [me.rank], number=1 << 62)
    paceline.partial_all_reduce(tensor, [0, 1], number=7)
    with pytest.raises(dist.DistBackendError, match="used this number before"):
        paceline.partial_all_reduce(tensor, [0, 1], number=7)
    assert failure() == ""


def test_what_is_refused() -> None:
    run_ranks(_refusals, 2)


def _until_it_fails(tensor: torch.Tensor, timeout: timedelta) -> str:
    for _ in range(10_000):
        try:
            paceline.partial_all_reduce(tensor, range(4), timeout=timeout)
        except dist.DistBackendError as error:
            return str(error)
    return "no error"


def _survives(me: Member, how: str) -> str:
    me.join()
    tensor = torch.full((100_000,), float(me.rank))
    paceline.partial_all_reduce(tensor, range(4))
    if me.rank == 3:
        me.store.set("ready", "")
        time.sleep(600)
    within = timedelta(seconds=60 if how == "kill" else 1)
    said = _until_it_fails(tensor, within)
    alive = torch.full((1000,), float(me.rank))
    paceline.partial_all_reduce(alive, range(3))
    assert alive[0] == 1.0
    assert failure() == ""
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_rest_goes_on(how: str) -> None:
    """A member that dies or stands still is named, by all; the others go on in the same group."""
    with Ranks(_survives, 4, how, join=False) as ranks:
        ranks.store.wait(["ready"])
        time.sleep(0.2)
        ranks.signal(3, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        outcomes = ranks.outcomes(60, [0, 1, 2])
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert "partial allreduce #" in outcome.value
        assert "rank 3 (" in outcome.value
        assert ("did not call it" if how == "stop" else "rank 3") in outcome.value


def _gives_up(me: Member) -> str:
    paceline.partial_all_reduce(torch.ones(10), range(3))
    if me.rank == 1:
        give_up(5, "worker 1 has other plans")
    with pytest.raises(dist.DistBackendError) as caught:
        paceline.partial_all_reduce(torch.ones(100_000), range(3), number=5)
    tensor = torch.full((10,), float(me.rank))
    paceline.partial_all_reduce(tensor, range(3), number=6)
    assert tensor[0] == 1.0
    return str(caught.value)


def test_an_operation_is_given_up() -> None:
    for said in run_ranks(_gives_up, 3):
        assert "partial allreduce #5: worker 1 has other plans" in said
