"""Work objects: waiting, asking, futures, and many collectives in flight on several groups at once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from contract import WORLD_SIZES, has, numbers, same

from ranks import Member, run_ranks


def life_of_a_work(me: Member) -> None:
    """wait is idempotent, is_completed and is_success turn true, the future has the tensors."""
    wanted = sum(numbers(rank, 5) for rank in range(me.world_size))
    mine = numbers(me.rank, 5)
    work = dist.all_reduce(mine, async_op=True)
    assert work.wait()
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    same(mine, wanted, "wait")
    same(work.result()[0], wanted, "result")

    mine = numbers(me.rank, 5)
    work = dist.all_reduce(mine, async_op=True)
    assert work.wait(timedelta(seconds=30))
    same(mine, wanted, "wait with a time limit")

    mine = numbers(me.rank, 5)
    future = dist.all_reduce(mine, async_op=True).get_future()
    same(future.wait()[0], wanted, "future")
    assert future.done()

    mine = numbers(me.rank, 5)
    chained = dist.all_reduce(mine, async_op=True).get_future().then(lambda done: done.value()[0] / 2)
    same(chained.wait(), wanted / 2, "then")
    both = torch.futures.collect_all(
        [dist.all_reduce(numbers(me.rank, 5), async_op=True).get_future() for _ in range(3)]
    )
    for future in both.wait():
        same(future.value()[0], wanted, "collect_all")


def futures_of_all(me: Member) -> None:
    """Every collective has a future, and the output is there when it is done."""
    n, ranks = me.world_size, range(me.world_size)
    calls: dict[str, Callable[[torch.Tensor], dist.Work]] = {
        "broadcast": lambda x: dist.broadcast(x, 0, async_op=True),
        "reduce": lambda x: dist.reduce(x, 0, async_op=True),
        "all_gather": lambda x: dist.all_gather([torch.zeros(n) for _ in ranks], x, async_op=True),
        "all_gather_single": lambda x: dist.all_gather_single(torch.zeros(n * n), x, async_op=True),
        "reduce_scatter": lambda x: dist.reduce_scatter(torch.zeros(1), list(x.chunk(n)), async_op=True),
        "reduce_scatter_single": lambda x: dist.reduce_scatter_single(torch.zeros(1), x, async_op=True),
        "all_to_all_single": lambda x: dist.all_to_all_single(torch.zeros(n), x, async_op=True),
        "all_to_all": lambda x: dist.all_to_all(list(torch.zeros(n).chunk(n)), list(x.chunk(n)), async_op=True),
        "gather": lambda x: dist.gather(x, [torch.zeros(n) for _ in ranks] if me.rank == 0 else None, async_op=True),
        "scatter": lambda x: dist.scatter(x, [torch.zeros(n) for _ in ranks] if me.rank == 0 else None, async_op=True),
        "barrier": lambda _: dist.barrier(async_op=True),
    }
    if not has("futures of reduce_scatter"):
        del calls["reduce_scatter"], calls["reduce_scatter_single"]
    for name, call in calls.items():
        work = call(numbers(me.rank, n))
        future = work.get_future()
        future.wait()
        assert future.done(), name
        work.wait()
        assert work.is_completed(), name


def nothing_to_wait_for(me: Member) -> None:
    """What was called to be waited for has ended when it returns, with the result or nothing in hand."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    options = dist.AllreduceOptions()
    options.asyncOp = False
    for size in (1, 1000, 1 << 20):
        mine = numbers(me.rank, size)
        work = backend.allreduce([mine], options)
        assert work is None or work.wait()
        same(mine, sum(numbers(rank, size) for rank in range(me.world_size)), size)


def others_go_on(me: Member) -> None:
    """Rank 1 comes only when a thread of rank 0, which waits, has called it."""

    def lists() -> list[torch.Tensor]:
        return [torch.zeros(1) for _ in range(me.world_size)]

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
        "broadcast": lambda: dist.broadcast(torch.ones(1), 1),
        "reduce": lambda: dist.reduce(torch.ones(1), 0),
        "all_gather": lambda: dist.all_gather(lists(), torch.ones(1)),
        "all_gather_single": lambda: dist.all_gather_single(torch.zeros(me.world_size), torch.ones(1)),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(1), lists()),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(torch.zeros(1), torch.ones(me.world_size)),
        "all_to_all": lambda: dist.all_to_all(lists(), lists()),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(me.world_size), torch.ones(me.world_size)),
        "gather": lambda: dist.gather(torch.ones(1), lists() if me.rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(torch.ones(1), lists() if me.rank == 1 else None, 1),
        "barrier": lambda: dist.barrier(),
    }
    for name, call in calls.items():
        if me.rank == 1:
            me.store.wait([f"come/{name}"])
            call()
            continue
        calling = threading.Event()

        def invite(word: str, calling: threading.Event) -> None:
            calling.wait()
            time.sleep(0.02)  # by now the call waits
            me.store.set(f"come/{word}", "now")

        thread = threading.Thread(target=invite, args=(name, calling))
        thread.start()
        calling.set()
        call()
        thread.join()


def cores_stay_free(_: Member) -> None:
    """Ranks that share cores take turns on them without giving up any."""
    before = os.sched_getaffinity(0)
    for _turn in range(100):
        dist.barrier()
    assert os.sched_getaffinity(0) == before


def many_in_flight(me: Member) -> None:
    """Sixty collectives on four groups, started in an order that differs between ranks except within a group.

    They are waited for in yet another order; all of them must come out right.
    """
    groups = [dist.new_group() for _ in range(4)]
    dice = random.Random(me.rank)
    agenda = [(group, turn) for group in range(4) for turn in range(15)]
    dice.shuffle(agenda)
    turns = [0] * 4
    started = []
    for group, _ in agenda:
        turn = turns[group]
        turns[group] += 1
        size, root = 1 + 997 * turn, turn % me.world_size
        mine = numbers(me.rank + turn + group, size)
        if turn % 3 == 2:
            work = dist.broadcast(mine, root, group=groups[group], async_op=True)
            wanted = numbers(root + turn + group, size)
        else:
            work = dist.all_reduce(mine, group=groups[group], async_op=True)
            wanted = sum(numbers(rank + turn + group, size) for rank in range(me.world_size))
        started.append((work, mine, wanted, (group, turn)))
    dice.shuffle(started)
    for work, mine, wanted, what in started:
        work.wait()
        same(mine, wanted, what)


def dropped_works(me: Member) -> None:
    """A work nobody keeps still happens, and a barrier waits for all before it."""
    kept = [numbers(me.rank, 50_000) for _ in range(5)]
    for tensor in kept:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    for tensor in kept:
        same(tensor, sum(numbers(rank, 50_000) for rank in range(me.world_size)), "started before the barrier")


@pytest.mark.parametrize("function", [life_of_a_work, futures_of_all, nothing_to_wait_for, many_in_flight])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_works(function: object, world_size: int) -> None:
    run_ranks(function, world_size)


def test_dropped_works_happen() -> None:
    run_ranks(dropped_works, 3)


def test_threads_of_a_rank_that_waits_go_on() -> None:
    run_ranks(others_go_on, 2)


def test_ranks_that_share_cores_keep_them_all() -> None:
    run_ranks(cores_stay_free, 2 + len(os.sched_getaffinity(0)))


def a_time_limit(me: Member) -> str:
    """A collective whose partner stays away ends at the group's time limit, and only then."""
    said = ""
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier(group)
    if me.rank == 0:
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(2), group=group)
        said = str(caught.value)
    me.meet("told")
    return said


def test_a_time_limit_holds() -> None:
    assert run_ranks(a_time_limit, 2)[0]
