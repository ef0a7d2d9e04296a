"""Groups inside the group: disjoint, overlapping, many, and gone again; and the process group's whole life.

split_group has no test: PyTorch 2.13 refuses it without an accelerator before it asks the backend.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from contract import numbers, same

from ranks import Member, Ranks, run_ranks


def _sum_over(group: dist.ProcessGroup | None, ranks: list[int], me: Member) -> None:
    mine = numbers(me.rank, 9)
    dist.all_reduce(mine, group=group)
    same(mine, sum(numbers(rank, 9) for rank in ranks), ranks)


def overlapping(me: Member) -> None:
    """All pairs, all triples and everybody: each rank works in those it belongs to, roots are global ranks."""
    members = [[0, 1], [1, 2], [2, 3], [3, 0], [0, 2], [0, 1, 2], [1, 2, 3], [3, 1, 0], [0, 1, 2, 3]]
    groups = [dist.new_group(ranks) for ranks in members]
    for group, ranks in zip(groups, members, strict=True):
        if me.rank not in ranks:
            assert group == dist.GroupMember.NON_GROUP_MEMBER
            continue
        ordered = sorted(ranks)
        assert dist.get_process_group_ranks(group) == ordered
        assert (dist.get_rank(group), dist.get_world_size(group)) == (ordered.index(me.rank), len(ranks))
        _sum_over(group, ranks, me)
        received = numbers(me.rank, 3)
        dist.broadcast(received, ordered[-1], group=group)
        same(received, numbers(ordered[-1], 3), ("broadcast", ranks))
        gathered = [torch.zeros(2) for _ in ranks]
        dist.all_gather(gathered, numbers(me.rank, 2), group=group)
        same(torch.stack(gathered), torch.stack([numbers(rank, 2) for rank in ordered]), ("all_gather", ranks))
        dist.barrier(group)


def subgroups(me: Member) -> None:
    """new_subgroups cuts the world into equal parts, new_subgroups_by_enumeration into given ones."""
    mine, parts = dist.new_subgroups(2)
    assert len(parts) == 2
    first = me.rank // 2 * 2
    _sum_over(mine, [first, first + 1], me)
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    _sum_over(mine, [0, 3] if me.rank in (0, 3) else [1, 2], me)


def come_and_go(me: Member) -> int:
    """Groups made, used and destroyed again and again leave nothing open."""
    everyone = list(range(me.world_size))
    group = dist.new_group()
    _sum_over(group, everyone, me)
    dist.destroy_process_group(group)
    _sum_over(None, everyone, me)
    open_before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        group = dist.new_group()
        _sum_over(group, everyone, me)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
    dist.barrier()
    return len(os.listdir("/proc/self/fd")) - open_before


@pytest.mark.parametrize("function", [overlapping, subgroups])
def test_groups(function: object) -> None:
    run_ranks(function, 4)


@pytest.mark.parametrize("world_size", [2, 3])
def test_groups_come_and_go(world_size: int) -> None:
    grown = run_ranks(come_and_go, world_size)
    assert max(grown) <= 2, f"files left open by ten groups, by rank: {grown}"


def again_and_again(me: Member) -> None:
    """init, one collective, destroy at once: a fast rank leaves while a slow one is still reading."""
    for turn in range(5):
        me.join("again")  # in the same part of the store: what earlier groups left there must not be taken for news
        mine = numbers(me.rank, 300_000)
        dist.all_reduce(mine)
        same(mine, sum(numbers(rank, 300_000) for rank in range(me.world_size)), turn)
        dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_process_group_can_be_made_again(world_size: int) -> None:
    with Ranks(again_and_again, world_size, join=False) as ranks:
        ranks.results()


def names(me: Member) -> None:
    """What PyTorch asks a backend about itself."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    assert dist.get_backend() == me.backend
    assert backend.name() == me.backend
    assert (backend.rank(), backend.size()) == (me.rank, me.world_size)
    assert (group.rank(), group.size()) == (me.rank, me.world_size)


def test_names() -> None:
    run_ranks(names, 2)


def sequence(_: Member) -> list[int]:
    """The numbers of a group's collectives count up alike on all ranks.

    The backend is asked itself: ProcessGroup passes the question on to built-in backends only.
    """
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    backend._set_sequence_number_for_group()
    counted = [backend._get_sequence_number_for_group()]
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
        counted.append(backend._get_sequence_number_for_group())
    dist.barrier()
    return counted


def test_sequence_numbers() -> None:
    counted = run_ranks(sequence, 3)
    assert counted[1:] == counted[:-1]
    assert [number - counted[0][0] for number in counted[0]] == [0, 1, 2, 3]
