"""Corners that are easy to get wrong: strides, tensors of autograd, forks, groups that end early, ranks that leave."""

from __future__ import annotations

import gc
import os

import pytest
import torch
import torch.distributed as dist
from contract import needs, numbers, same

from ranks import Member, run_ranks


def transposed(me: Member) -> None:
    """Dense, but in another order than the tensors of the other side."""
    ranks = range(me.world_size)
    mine = [numbers(rank, (6, 4)).t() for rank in ranks]
    gathered = [torch.zeros(4, 6) for _ in ranks]
    dist.all_gather(gathered, mine[me.rank])
    for rank in ranks:
        same(gathered[rank], mine[rank].contiguous(), "all_gather")
    outputs = [torch.zeros(6, 4).t() for _ in ranks]
    dist.all_to_all(outputs, [mine[me.rank].contiguous() for _ in ranks])
    for rank in ranks:
        same(outputs[rank].contiguous(), mine[rank].contiguous(), "all_to_all")
    if me.rank == 0:
        dist.send(mine[0], 1)
    elif me.rank == 1:
        received = torch.zeros(4, 6)
        dist.recv(received, 0)
        same(received, mine[0].contiguous(), "recv")


@needs("strided tensors")
def test_tensors_dense_in_another_order() -> None:
    run_ranks(transposed, 3)


def for_autograd(me: Member) -> None:
    """Results that are stored by another thread than the caller's, which has no idea of no_grad."""
    leaf = torch.ones(4, 6, requires_grad=True)
    with torch.no_grad():
        view = leaf[:, ::2]
        dist.all_reduce(view)
        work = dist.all_reduce(leaf[:, 1::2], async_op=True)
        assert work is not None
        work.wait()
    same(leaf.detach(), torch.full((4, 6), float(me.world_size)))
    with torch.inference_mode():
        frozen = torch.ones(4, 6)
        dist.broadcast(frozen[:, ::2], 0)
    same(frozen, torch.ones(4, 6))


@needs("strided tensors")
def test_leaves_and_tensors_of_inference_mode() -> None:
    run_ranks(for_autograd, 2)


def forked(me: Member) -> None:
    """A child that does nothing with torch must not end its parent's group."""
    dist.all_reduce(torch.ones(3))
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    total = torch.ones(3)
    dist.all_reduce(total)
    same(total, torch.full((3,), float(me.world_size)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_leaves_the_parents_group_alone() -> None:
    run_ranks(forked, 2)


def collected(me: Member) -> None:
    """A group that is dropped, not destroyed, while works are still held."""
    for _ in range(5):
        group = dist.new_group()
        work = dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
        assert work is not None
        work.wait()
        dist.distributed_c10d._world.pg_map.pop(group, None)
        del group
        gc.collect()
    dist.barrier()
    del me


def test_groups_that_are_collected() -> None:
    run_ranks(collected, 2)


def wrong_peers(me: Member) -> None:
    for call in (lambda: dist.send(torch.ones(1), -1), lambda: dist.send(torch.ones(1), me.world_size)):
        with pytest.raises((ValueError, RuntimeError)):
            call()
    dist.barrier()


def test_ranks_that_do_not_exist() -> None:
    run_ranks(wrong_peers, 2)


def served_by_the_rest(me: Member) -> list[float]:
    """Rank 0 takes from whoever sends; rank 1 leaves as soon as it has sent."""
    group = dist.new_group()
    received = []
    if me.rank == 1:
        dist.send(torch.tensor([1.0]), 0, group=group)
        dist.destroy_process_group(group)
        me.store.set("left", "")
    elif me.rank == 2:
        me.store.get("left")
        dist.send(torch.tensor([2.0]), 0, group=group)
    else:
        for _ in range(2):
            message = torch.zeros(1)
            dist.recv(message, group=group)
            received.append(float(message))
    return received


def test_any_source_while_others_leave() -> None:
    assert run_ranks(served_by_the_rest, 3)[0] == [1.0, 2.0]
