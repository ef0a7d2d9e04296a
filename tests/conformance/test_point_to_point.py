"""Messages between two ranks, and objects: tags, order, any source, batches, and the pickles c10d makes of them."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from contract import numbers, same

from ranks import Member, run_ranks


def messages(me: Member) -> None:
    """Messages match by tag; those of one tag arrive in the order they were sent."""
    first, last = 0, me.world_size - 1
    if me.rank == first:
        works = [dist.isend(numbers(tag, 10 + tag), last, tag=tag) for tag in range(5)]
        works += [dist.isend(torch.tensor([float(i)]), last, tag=9) for i in range(5)]
        for work in works:
            work.wait()
        dist.send(torch.tensor(3.5), last)
        dist.send(torch.empty(0), last)
        dist.send(numbers(8, 2_000_000), last)
    elif me.rank == last:
        for tag in (3, 1, 4, 0, 2):
            received = torch.zeros(10 + tag)
            assert dist.recv(received, first, tag=tag) == first
            same(received, numbers(tag, 10 + tag), ("tag", tag))
        waiting = [torch.zeros(1) for _ in range(5)]
        works = [dist.irecv(tensor, first, tag=9) for tensor in waiting]
        for work in reversed(works):
            work.wait()
        assert [float(tensor) for tensor in waiting] == [0.0, 1.0, 2.0, 3.0, 4.0]
        scalar, nothing, large = torch.tensor(0.0), torch.empty(0), torch.zeros(2_000_000)
        dist.recv(scalar, first)
        dist.recv(nothing, first)
        dist.recv(large, first)
        assert float(scalar) == 3.5
        same(large, numbers(8, 2_000_000), "8 MB")


def both_ways(me: Member) -> None:
    """Everybody sends before anybody receives; then whole rings and exchanges as batches."""
    right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    sending = dist.isend(numbers(me.rank, 500_000), right)
    received = torch.zeros(500_000)
    dist.recv(received, left)
    sending.wait()
    same(received, numbers(left, 500_000), "isend, recv")

    inputs = {peer: torch.zeros(3) for peer in range(me.world_size) if peer != me.rank}
    batch = [dist.P2POp(dist.irecv, tensor, peer) for peer, tensor in inputs.items()]
    batch += [dist.P2POp(dist.isend, numbers(10 * me.rank + peer, 3), peer) for peer in inputs]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    for peer, tensor in inputs.items():
        same(tensor, numbers(10 * peer + me.rank, 3), ("batch_isend_irecv", peer))


def from_anyone(me: Member) -> None:
    """recv without a source takes whatever comes, and says from whom."""
    if me.rank == 0:
        seen = []
        for _ in range(2 * (me.world_size - 1)):
            received = torch.zeros(4)
            source = dist.recv(received)
            same(received, numbers(source, 4), ("from", source))
            seen.append(source)
        assert sorted(seen) == sorted(2 * list(range(1, me.world_size)))
        specific = torch.zeros(1)
        dist.recv(specific, 1, tag=5)
        assert float(specific) == 5.0
    else:
        dist.send(numbers(me.rank, 4), 0)
        dist.send(numbers(me.rank, 4), 0)
        if me.rank == 1:
            dist.send(torch.tensor([5.0]), 0, tag=5)


def in_a_group(me: Member) -> None:
    """Ranks of a message are global ones, also in a group where they are others."""
    group = dist.new_group([1, 2])
    if me.rank == 1:
        dist.send(torch.tensor([1.5]), 2, group=group)
    elif me.rank == 2:
        received = torch.zeros(1)
        assert dist.recv(received, 1, group=group) == 1
        assert float(received) == 1.5


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("function", [messages, both_ways, from_anyone])
def test_messages(function: object, world_size: int) -> None:
    run_ranks(function, world_size)


def test_messages_in_a_group() -> None:
    run_ranks(in_a_group, 3)


def a_time_limit(me: Member) -> None:
    """The time limit of a message counts from when somebody waits for it, not from when it was posted."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    dist.barrier(group)
    large = numbers(1, 100_000)
    if me.rank == 0:
        received, second = torch.zeros(4), torch.zeros(100_000)
        works = [dist.irecv(received, 1, group=group), dist.isend(large, 1, group=group)]
        works.append(dist.irecv(second, 1, group=group, tag=1))
        time.sleep(2)
        me.meet("posted")
        for work in works:
            work.wait()
        same(received, numbers(5, 4), "irecv")
        same(second, large, "irecv of much")
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            dist.recv(received, 1, group=group, tag=2)
    else:
        me.meet("posted")
        dist.send(numbers(5, 4), 0, group=group)
        dist.recv(torch.zeros(100_000), 0, group=group)
        dist.send(large, 0, group=group, tag=1)


def test_a_time_limit_counts_from_the_wait() -> None:
    run_ranks(a_time_limit, 2)


def unwanted(me: Member) -> None:
    """Many messages before anybody receives one; collectives go on meanwhile, and all arrive in order."""
    count = 300
    if me.rank == 0:
        works = [dist.isend(numbers(i, 10_000), 1, tag=i % 3) for i in range(count)]
    dist.all_reduce(torch.ones(1000))
    if me.rank == 1:
        for tag in (2, 0, 1):
            for i in range(tag, count, 3):
                received = torch.zeros(10_000)
                dist.recv(received, 0, tag=tag)
                same(received, numbers(i, 10_000), i)
    elif me.rank == 0:
        for work in works:
            work.wait()


def test_messages_that_nobody_wants_yet() -> None:
    run_ranks(unwanted, 3)


def objects(me: Member) -> None:
    """The object collectives, with objects whose pickles differ in size."""
    n, ranks = me.world_size, range(me.world_size)

    def thing(rank: int) -> object:
        return {"rank": rank, "list": list(range(100 * rank)), "tensor": numbers(rank, 3).tolist()}

    gathered: list[object] = [None] * n
    dist.all_gather_object(gathered, thing(me.rank))
    assert gathered == [thing(rank) for rank in ranks]
    for root in ranks:
        shared = [thing(root), None, root] if me.rank == root else [None, None, None]
        dist.broadcast_object_list(shared, root)
        assert shared == [thing(root), None, root]
        collected: list[object] | None = [None] * n if me.rank == root else None
        dist.gather_object(thing(me.rank), collected, root)
        assert collected is None or collected == [thing(rank) for rank in ranks]
        received: list[object] = [None]
        dist.scatter_object_list(received, [thing(rank + 1) for rank in ranks] if me.rank == root else None, root)
        assert received == [thing(me.rank + 1)]
    if n > 1:
        received = [None, None]
        if me.rank == 0:
            dist.send_object_list([thing(5), "text"], 1)
        elif me.rank == 1:
            assert dist.recv_object_list(received, 0) == 0
            assert received == [thing(5), "text"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_objects(world_size: int) -> None:
    run_ranks(objects, world_size)
