"""Work objects: waiting, futures, profiles, what they keep alive, and many in flight on several groups at once."""

from __future__ import annotations

import gc
import os
import random
import resource
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from contract import WORLD_SIZES, has, numbers, same

from ranks import BACKEND, Member, run_ranks


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


def a_time_limit(me: Member) -> float:
    """A collective whose partner stays away ends at the group's time limit, and only then. Returns the seconds."""
    took_s = 0.0
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier(group)
    if me.rank == 0:
        began_s = time.monotonic()
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.all_reduce(torch.ones(2), group=group)
        took_s = time.monotonic() - began_s
    me.meet("told")
    return took_s


def test_a_time_limit_holds() -> None:
    took_s, _ = run_ranks(a_time_limit, 2)
    assert 1 <= took_s < 30, "the limit of the group of all ranks is a minute"


def limits_of_waits(me: Member) -> None:
    """Rank 1 comes when rank 0 has found that it is not there. No time limit is too long, or too negative."""
    centuries = [timedelta(milliseconds=10**15), timedelta(days=10**7), timedelta(seconds=2**34)]
    for turn, limit in enumerate([timedelta(0), *centuries]):
        mine = numbers(me.rank, 5)
        if me.rank == 1:
            me.store.wait([f"come/{turn}"])
            time.sleep(0.05)  # by now rank 0 waits
        work = dist.all_reduce(mine, async_op=True)
        if me.rank == 0:
            for passed in (timedelta(milliseconds=-1), -limit or timedelta(milliseconds=1)):
                with pytest.raises(RuntimeError, match="timed out"):
                    work.wait(passed)
            me.store.set(f"come/{turn}", "now")
        assert work.wait(limit)
        assert work.wait(timedelta(milliseconds=-1))  # it is done
        same(mine, sum(numbers(rank, 5) for rank in range(me.world_size)), limit)


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo overflows")
def test_limits_of_waits() -> None:
    run_ranks(limits_of_waits, 2)


def callbacks_without_threads(me: Member) -> int:
    """Callbacks of rank 0 that want more threads than the system has: each waits, and all of them run in the end."""
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    if me.rank == 1:
        me.store.wait(["come"])
        for _ in range(30):
            dist.all_reduce(torch.ones(1))
        dist.barrier()
        return 30
    done = threading.Event()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 20), limits[1]))  # less than a thread's stack
    try:
        futures = [
            dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: done.wait()) for _ in range(30)
        ]
        me.store.set("come", "now")
        dist.barrier()
        done.set()
        return sum(future.wait() for future in futures)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo has a fixed number of threads")
def test_callbacks_are_not_lost_where_no_thread_can_be_started() -> None:
    assert run_ranks(callbacks_without_threads, 2) == [30, 30]


def futures_of_children(me: Member) -> None:
    """A forked child has none of the threads of its parent that run callbacks."""

    def settled_elsewhere(store: dist.Store, key: str) -> bool:
        if me.rank == 1:
            store.wait([key])
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: True)
        store.set(key, "now")
        return bool(future.wait())

    assert settled_elsewhere(me.store, "parents")
    child = os.fork()
    if child == 0:
        try:
            dist.destroy_process_group()
            store = dist.TCPStore("127.0.0.1", me.store.port, is_master=False)
            Member(me.rank, me.world_size, me.backend, store).join("children")
            os._exit(0 if settled_elsewhere(store, "of children") else 1)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo cannot be used after a fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_futures_of_forked_children() -> None:
    run_ranks(futures_of_children, 2)


def _profiler(**options: object) -> torch.profiler.profile:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options)


def profiled_in_flight(me: Member) -> set[str]:
    """The profiler stops while collectives and messages are under way. Returns what it has seen."""
    names: set[str] = set()
    for _ in range(40):
        small, large, peer = torch.ones(10), [torch.ones(300_000) for _ in range(6)], (me.rank + 1) % 2
        with _profiler() as profiler:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in large]
            works.append(dist.broadcast(small, 0, async_op=True))
            works.append(dist.irecv(torch.ones(100_000), peer))
            works.append(dist.isend(torch.ones(100_000), peer))
        for work in works:
            work.wait()
        names |= {event.name for event in profiler.events()}
    return names


def profiled_training(_: Member) -> set[str]:
    """paceline.DataParallel, whose all-gathers are under way at the end of each step, with a schedule of profiles."""
    import paceline

    net = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = paceline.DataParallel(net, optimizer)
    names: set[str] = set()

    def collect(profiler: torch.profiler.profile) -> None:
        names.update(event.name for event in profiler.events())

    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=5)
    with _profiler(schedule=schedule, on_trace_ready=collect, acc_events=True) as profiler:
        for _step in range(25):
            model(torch.ones(4, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    return names


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo crashes")
@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (profiled_in_flight, {"all_reduce", "broadcast", "send", "recv"}),
        (profiled_training, {"_reduce_scatter_base", "_all_gather_base"}),
    ],
)
def test_profilers_that_stop_while_works_are_under_way(function: object, wanted: set[str]) -> None:
    for names in run_ranks(function, 2):
        assert {f"paceline:{name}" for name in wanted} <= names


def lives_of_tensors(me: Member) -> None:
    """Memory that was lent to a group is free when the group is gone, waited for or not, and while others go on."""
    group = dist.new_group()
    alive: dict[str, weakref.ref[object]] = {}
    peer = (me.rank + 1) % 2

    def fresh(name: str) -> torch.Tensor:
        array = np.ones(100_000, dtype=np.float32)
        alive[name] = weakref.ref(array)
        return torch.from_numpy(array)

    def strided(name: str) -> torch.Tensor:
        return fresh(name)[::2]

    for name in ("waited for", "waited for when done"):
        work = dist.all_reduce(fresh(name), group=group, async_op=True)
        while name.endswith("done") and not work.is_completed():
            time.sleep(0.001)
        work.wait()
        del work
        gc.collect()
        assert alive[name]() is None, name
    dist.all_reduce(fresh("not waited for"), group=group, async_op=True)
    dist.all_reduce(strided("strided"), group=group, async_op=True)
    dist.all_reduce(fresh("with a future"), group=group, async_op=True).get_future().wait()
    dist.all_reduce_coalesced([twice := fresh("twice in a call"), twice], group=group)
    del twice
    dist.all_gather_single(fresh("output"), fresh("input")[:50_000], group=group, async_op=True)
    works = [dist.isend(fresh("sent"), peer, group=group), dist.irecv(fresh("received"), peer, group=group)]
    for work in works:
        work.wait()
    del work, works
    dist.destroy_process_group(group)
    gc.collect()
    assert not [name for name, array in alive.items() if array() is not None]


def test_tensors_are_not_kept_alive() -> None:
    run_ranks(lives_of_tensors, 2)
