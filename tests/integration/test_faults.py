"""Faults: ranks that die, freeze or call something else, and strangers at the door.

The contract. When a rank dies, every other rank's collective raises ``torch.distributed.DistBackendError`` at once (the
aim is two seconds; the test prints what it took and waits ``LIMIT_S``), in words that name the dead rank and the
operation: ``allreduce #812: rank 3 (hostname) closed its connection: its process died``. A rank that only stands still
is named at the group's time limit: ``... does not answer``. Ranks that call different things all hear of both calls:
``rank 0 called allreduce(float32[1000], sum) as #5, and rank 1 called broadcast(float32[1000], root 0)``. After each
of these the survivors can form a new group. ``FAULTS`` says how many ranks to kill (default 6).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable

import pytest
import torch
import torch.distributed as dist
from hostility import besiege, listening_ports

from paceline.backend import failure
from ranks import BACKEND, Member, Ranks

FAULTS = int(os.environ.get("FAULTS", "6"))
LIMIT_S = 5.0  # two seconds, and slack for a machine with more ranks than cores
MOMENTS = ("before", "during", "after")
names_ranks = pytest.mark.skipif(BACKEND == "gloo", reason="Gloo names no ranks, and may hang for its time limit")


def _report(me: Member, event: str, said: str = "") -> None:
    me.store.set(f"{event}/{me.rank}", json.dumps([time.monotonic(), said]))


def _await(ranks: Ranks, event: str, who: Iterable[int], limit_s: float) -> dict[int, tuple[float, str]]:
    """What these ranks report, as (when, words) by rank; fails if one says nothing, or ends in another way."""
    silent, deadline_s = set(who), time.monotonic() + limit_s
    heard: dict[int, tuple[float, str]] = {}
    while silent:
        for rank in [rank for rank in silent if ranks.store.check([f"{event}/{rank}"])]:
            when, said = json.loads(ranks.store.get(f"{event}/{rank}"))
            heard[rank] = (when, said)
            silent.remove(rank)
        ended = [outcome for outcome in ranks.ended() if outcome.rank in silent and (outcome.error or outcome.killed)]
        assert not ended, "\n".join(outcome.error or f"rank {outcome.rank} died" for outcome in ended)
        assert time.monotonic() < deadline_s, f"{limit_s} s without {event!r} of ranks {sorted(silent)}; heard {heard}"
        time.sleep(0.005)
    return heard


def _error_of(call: Callable[[], object]) -> str:
    with pytest.raises(dist.DistBackendError) as caught:
        call()
    return str(caught.value)


def _work_forever(size: int) -> None:
    while True:
        dist.all_reduce(torch.ones(size))
        dist.broadcast(torch.ones(size), 0)
        dist.all_gather_single(torch.zeros(size * dist.get_world_size()), torch.ones(size))


def survivor(me: Member, victim: int, moment: str, size: int) -> None:
    """Work until the victim dies, say what the error was, then form a new group with those who are left."""
    me.join()
    dist.all_reduce(torch.ones(size))
    _report(me, "ready")
    if me.rank == victim and moment != "during":
        time.sleep(600)
    if moment == "after":
        me.store.wait(["dead"])
    said = _error_of(lambda: _work_forever(size))
    _report(me, "failed", said)
    dist.destroy_process_group()
    left = Member(me.rank - (me.rank > victim), me.world_size - 1, me.backend, me.store)
    left.join("survivors")
    number = torch.ones(3)
    dist.all_reduce(number)
    assert number.tolist() == [float(left.world_size)] * 3
    left.meet("end")
    dist.destroy_process_group()


@names_ranks
@pytest.mark.timeout(60 + 20 * FAULTS)
def test_survivors_of_a_death_know_who_died_and_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    dice = random.Random(FAULTS)
    took_s = []
    for fault in range(FAULTS):
        world_size, moment = dice.choice((2, 3, 4)), MOMENTS[fault % 3]
        victim, size = dice.randrange(world_size), dice.choice((1, 1000, 1_000_000))
        others = [rank for rank in range(world_size) if rank != victim]
        what = f"fault {fault}: rank {victim} of {world_size} killed {moment} a collective of {size} floats"
        with Ranks(survivor, world_size, victim, moment, size, join=False) as ranks:
            _await(ranks, "ready", range(world_size), 60)
            time.sleep(dice.uniform(0, 0.05))
            killed_at_s = time.monotonic()
            ranks.signal(victim, signal.SIGKILL)
            ranks.outcomes(10, [victim])
            if moment == "after":
                killed_at_s = time.monotonic()
                ranks.store.set("dead", "")
            heard = _await(ranks, "failed", others, LIMIT_S)
            for rank, (when_s, said) in heard.items():
                took_s.append(when_s - killed_at_s)
                assert re.search(r"(allreduce|broadcast|allgather\w*) #\d+: ", said), f"{what}; rank {rank}: {said}"
                assert re.search(rf"\brank {victim}\b", said), f"{what}; rank {rank}: {said}"
            failed = [outcome.error for outcome in ranks.outcomes(30, others) if outcome.error or outcome.killed]
            assert not failed, f"{what}: {failed}"
    took_s.sort()
    told = f"{took_s[len(took_s) // 2]:.3f} s (median), {took_s[-1]:.3f} s (worst)"
    with capsys.disabled():
        sys.stdout.write(f"\n{FAULTS} deaths: the others knew after {told}; the aim is 2 s\n")


def receiver(me: Member) -> None:
    """Rank 0 waits for a message of rank 1, which dies."""
    me.join()
    dist.barrier()
    _report(me, "ready")
    if me.rank == 1:
        time.sleep(600)
    _report(me, "failed", _error_of(lambda: dist.recv(torch.zeros(4), 1)))


@names_ranks
def test_a_receiver_knows_who_died() -> None:
    with Ranks(receiver, 2, join=False) as ranks:
        _await(ranks, "ready", range(2), 60)
        ranks.signal(1, signal.SIGKILL)
        assert re.search(r"recv.*\brank 1\b", _await(ranks, "failed", [0], LIMIT_S)[0][1])


def working(me: Member) -> None:
    """Work until an error comes, and say what it was."""
    me.join(timeout_s=3)
    dist.all_reduce(torch.ones(1000))
    _report(me, "ready")
    _report(me, "failed", _error_of(lambda: _work_forever(1000)))


@names_ranks
def test_a_frozen_rank_is_named() -> None:
    with Ranks(working, 3, join=False) as ranks:
        _await(ranks, "ready", range(3), 60)
        ranks.signal(2, signal.SIGSTOP)
        for _, said in _await(ranks, "failed", [0, 1], 3 + LIMIT_S).values():
            assert re.search(r"#\d+: .*\brank 2\b.*does not answer", said), said
        ranks.signal(2, signal.SIGCONT)
        _await(ranks, "failed", [2], 3 + LIMIT_S)


CALLS: dict[str, Callable[[], object]] = {
    "allreduce(float32[1000], sum)": lambda: dist.all_reduce(torch.ones(1000)),
    "allreduce(float32[999], sum)": lambda: dist.all_reduce(torch.ones(999)),
    "allreduce(float64[1000], sum)": lambda: dist.all_reduce(torch.ones(1000, dtype=torch.float64)),
    "allreduce(float32[1000], max)": lambda: dist.all_reduce(torch.ones(1000), dist.ReduceOp.MAX),
    "broadcast(float32[1000], root 0)": lambda: dist.broadcast(torch.ones(1000), 0),
    "broadcast(float32[1000], root 1)": lambda: dist.broadcast(torch.ones(1000), 1),
    "broadcast(float32[999], root 0)": lambda: dist.broadcast(torch.ones(999), 0),
    "broadcast(int32[1000], root 0)": lambda: dist.broadcast(torch.ones(1000, dtype=torch.int32), 0),
    "barrier()": dist.barrier,
}


def disagreeing(me: Member, most: str, one: str) -> None:
    """Rank 1 calls one thing, the others another. A root may be done before it hears: hence the barrier."""
    me.join()
    for _ in range(3):
        dist.all_reduce(torch.ones(5))
    call = CALLS[one if me.rank == 1 else most]
    _report(me, "failed", _error_of(lambda: (call(), dist.barrier())))


@names_ranks
@pytest.mark.parametrize(
    ("most", "one"),
    [
        ("allreduce(float32[1000], sum)", "broadcast(float32[1000], root 0)"),
        ("allreduce(float32[1000], sum)", "allreduce(float32[999], sum)"),
        ("allreduce(float32[1000], sum)", "allreduce(float64[1000], sum)"),
        ("allreduce(float32[1000], sum)", "allreduce(float32[1000], max)"),
        ("broadcast(float32[1000], root 0)", "broadcast(float32[1000], root 1)"),
        ("broadcast(float32[1000], root 0)", "broadcast(float32[999], root 0)"),
        ("broadcast(float32[1000], root 0)", "broadcast(int32[1000], root 0)"),
        ("allreduce(float32[1000], sum)", "barrier()"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_hear_of_both_calls(most: str, one: str, world_size: int) -> None:
    with Ranks(disagreeing, world_size, most, one, join=False) as ranks:
        for _, said in _await(ranks, "failed", range(world_size), 30).values():
            assert re.search(rf"rank 1 (\(\S+\) )?called {re.escape(one)}", said), said
            assert re.search(rf"rank [02] (\(\S+\) )?called {re.escape(most)}", said), said


def _scatter() -> dist.Work:
    return dist.scatter(torch.zeros(4), [torch.ones(4) for _ in range(dist.get_world_size())], 0, async_op=True)


ROOTS: dict[str, Callable[[], dist.Work]] = {
    "broadcast": lambda: dist.broadcast(torch.ones(1000), 0, async_op=True),
    "scatter": _scatter,
}


def root(me: Member, rooted: str, then: str) -> None:
    """Rank 0 sends little and is done; rank 1 calls something else. Rank 0 hears of it in whatever it does next."""
    me.join()
    dist.all_reduce(torch.ones(5))
    if me.rank == 1:
        _report(me, "failed", _error_of(lambda: dist.all_reduce(torch.ones(1000))))
    else:
        work = ROOTS[rooted]() if me.rank == 0 else None
        while not failure():
            time.sleep(0.005)
        calls: dict[str, Callable[[], object]] = {
            "wait": work.wait if work else dist.barrier,
            "call": dist.barrier,
            "destroy": dist.destroy_process_group,
        }
        _report(me, "failed", _error_of(calls[then]))
    if dist.is_initialized():
        dist.destroy_process_group()  # says nothing twice
    me.join("again")
    dist.barrier()
    me.meet("end")
    dist.destroy_process_group()


@names_ranks
@pytest.mark.parametrize("then", ["wait", "call", "destroy"])
@pytest.mark.parametrize("rooted", ROOTS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_root_that_is_done_hears_of_both_calls(rooted: str, then: str, world_size: int) -> None:
    with Ranks(root, world_size, rooted, then, join=False) as ranks:
        for rank, (_, said) in _await(ranks, "failed", range(world_size), 30).items():
            assert re.search(r"rank 1 (\(\S+\) )?called allreduce\(float32\[1000\], sum\)", said), (rank, said)
            assert re.search(rf"rank [02] (\(\S+\) )?called {rooted}\(", said), (rank, said)
        failed = [outcome.error for outcome in ranks.outcomes(30) if outcome.error or outcome.killed]
        assert not failed, failed


def steadfast(me: Member) -> int:
    """Collectives, checked, until the test says stop; then a new group, while the strangers are still connected."""
    me.join()
    turns = 0
    while True:
        stop = float(me.rank == 0 and me.store.check(["stop"]))
        numbers = torch.full((5000,), stop)
        dist.all_reduce(numbers)
        gathered = torch.zeros(me.world_size * 7)
        dist.all_gather_single(gathered, torch.full((7,), float(me.rank)))
        assert gathered.tolist() == [float(rank) for rank in range(me.world_size) for _ in range(7)]
        assert bool((numbers == numbers[0]).all())
        turns += 1
        if me.rank == 0:
            me.store.add("turns", 1)
        if numbers[0] != 0:
            break
    group = dist.new_group()
    dist.barrier(group)
    me.meet("end")
    dist.destroy_process_group()
    return turns


def test_strangers_at_the_port_do_no_harm() -> None:
    with Ranks(steadfast, 3, join=False) as ranks:
        _turns_past(ranks, 1)
        ports = sorted({port for pid in ranks.pids for port in listening_ports(pid)})
        assert ports, "no rank listens; the backend is expected to"
        with besiege(ports, connections=1000, seed=1):
            _turns_past(ranks, ranks.store.add("turns", 0) + 20)
            ranks.store.set("stop", "")
            turns = ranks.results(60)
        assert turns == [turns[0]] * 3


def _turns_past(ranks: Ranks, count: int) -> None:
    deadline_s = time.monotonic() + 30
    while ranks.store.add("turns", 0) < count:
        failed = [outcome.error for outcome in ranks.ended() if outcome.error]
        assert not failed, "\n".join(failed)
        assert time.monotonic() < deadline_s, f"{ranks.store.add('turns', 0)} turns after 30 s, {count} expected"
        time.sleep(0.01)
