"""paceline.all_reduce in real Gloo groups, beside torch.distributed.all_reduce."""

from __future__ import annotations

import signal
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline import collectives
from paceline.algorithms import ALGORITHMS
from paceline.collectives import Late, read_late
from paceline.ir.collective import Collective, Kind
from ranks import Member, Ranks, run_ranks

NAMES = [
    entry.name for entry in ALGORITHMS.values() if entry.serves(Collective(Kind.ALL_REDUCE, 5)) and not entry.multicast
]
LATE: list[Late] = [None, 1, [0, 2], {2: 0.05}, {0: 0.01, 1: 0.02}]


def _input(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


def _reduce(me: Member) -> str:
    """Everything that two ranks can compare: sizes, lateness, algorithms, operations, types, strides, sub-groups."""
    n = me.world_size
    for size in (0, 1, 7, 1000, 100_003):
        wanted = _input(me.rank, size)
        dist.all_reduce(wanted)
        for late in LATE if n > 2 else [None, 1]:
            mine = _input(me.rank, size)
            assert paceline.all_reduce(mine, late=late) is None
            torch.testing.assert_close(mine, wanted)
            _agreed(mine)
    with mock.patch.object(collectives, "_PART_BYTES", 1000):  # reduced in parts, side by side
        for size in (499, 500, 751, 100_003):
            mine, wanted = _input(me.rank, size), _input(me.rank, size)
            dist.all_reduce(wanted)
            paceline.all_reduce(mine, late=1)
            torch.testing.assert_close(mine, wanted)
            _agreed(mine)
    for name in NAMES if n == 5 else []:
        mine, wanted = _input(me.rank, 999), _input(me.rank, 999)
        dist.all_reduce(wanted)
        paceline.all_reduce(mine, algorithm=name, late=3)
        torch.testing.assert_close(mine, wanted)
    _operations_and_types(me)
    _strided(me)
    _in_groups(me)
    _at_once(me)
    return "done"


def _agreed(tensor: torch.Tensor) -> None:
    """Every rank has the same bits."""
    all_of_them = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, tensor)
    assert all(torch.equal(one, tensor) for one in all_of_them)


def _operations_and_types(me: Member) -> None:
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8):
            mine = (torch.arange(50) % 3 + me.rank % 2).to(dtype)
            wanted = mine.clone()
            dist.all_reduce(wanted, op)
            paceline.all_reduce(mine, op, late=0)
            assert torch.equal(mine, wanted), (op, dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        mine = torch.full((33,), float(me.rank), dtype=dtype)
        paceline.all_reduce(mine, dist.ReduceOp.AVG)
        torch.testing.assert_close(mine, torch.full((33,), (me.world_size - 1) / 2, dtype=dtype))
    whole = torch.full((9,), -me.rank)
    paceline.all_reduce(whole, dist.ReduceOp.AVG)
    assert torch.equal(whole, torch.full((9,), int(-(me.world_size - 1) / 2)))


def _strided(me: Member) -> None:
    base = torch.zeros(20, 30)
    view = base.t()[3:9, ::2]
    view.fill_(me.rank + 1.0)
    paceline.all_reduce(view, late=0)
    total = sum(range(1, me.world_size + 1))
    assert torch.equal(view, torch.full((6, 10), float(total)))
    assert base.sum() == 60 * total  # nothing else was touched
    turned = torch.full((5,), 1j).conj()
    paceline.all_reduce(turned)
    assert torch.equal(turned.resolve_conj(), torch.full((5,), -1j * me.world_size))
    parameter = torch.nn.Parameter(torch.ones(3))
    paceline.all_reduce(parameter)
    assert parameter.tolist() == [me.world_size] * 3


def _in_groups(me: Member) -> None:
    """Ranks of a group are numbered anew, and late speaks of those."""
    members = list(range(1, me.world_size))
    group = dist.new_group(members)
    if me.rank in members:
        mine = torch.full((40,), float(me.rank))
        paceline.all_reduce(mine, group=group, late=0 if len(members) > 1 else None)
        assert mine.tolist() == [float(sum(members))] * 40
    else:
        with pytest.raises(paceline.UsageError, match="not in the process group"):
            paceline.all_reduce(torch.ones(1), group=group)


def _at_once(me: Member) -> None:
    """More calls than run side by side, waited for in the other order."""
    tensors = [torch.full((1000 + 31 * index,), float(me.rank + index)) for index in range(20)]
    works = [paceline.all_reduce(one, late=index % me.world_size, async_op=True) for index, one in enumerate(tensors)]
    n = me.world_size
    for index, work in reversed(list(enumerate(works))):
        assert work is not None
        assert work.wait()
        assert work.is_completed()
        (result,) = work.get_future().wait()
        assert result.data_ptr() == tensors[index].data_ptr()
        assert result.tolist() == [n * (n - 1) / 2 + n * index] * (1000 + 31 * index)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_as_the_backends_own(num_ranks: int) -> None:
    assert run_ranks(_reduce, num_ranks, backend="gloo") == ["done"] * num_ranks


def _alone(_: Member) -> list[float]:
    mine = torch.ones(3)
    paceline.all_reduce(mine, dist.ReduceOp.AVG)
    work = paceline.all_reduce(mine, async_op=True)
    assert work is not None
    work.wait()
    return mine.tolist()


def test_alone() -> None:
    assert run_ranks(_alone, 1, backend="gloo") == [[1.0] * 3]


def _on_paceline(me: Member) -> float:
    mine = torch.full((5000,), float(me.rank))
    paceline.all_reduce(mine, late=1)
    return float(mine.mean())


def test_over_our_own_backend_too() -> None:
    assert run_ranks(_on_paceline, 3, backend="paceline") == [3.0] * 3


def _differ(me: Member, async_op: bool) -> None:
    paceline.all_reduce(torch.ones(10), late=0)
    work = paceline.all_reduce(torch.ones(100_000), late=me.rank, async_op=async_op)
    if work is not None:
        work.wait()


@pytest.mark.parametrize("async_op", [False, True])
def test_different_late_ranks_are_a_sentence(async_op: bool) -> None:
    with Ranks(_differ, 3, async_op, backend="gloo", group_timeout_s=3.0) as ranks:
        outcomes = ranks.outcomes(40)
    errors = [str(outcome.error) for outcome in outcomes]
    assert all("Error" in error for error in errors)
    assert any(
        "call 2 of paceline.all_reduce in this group is not the same on all ranks: rank 0: " in error
        and "late: 0; rank 1: " in error
        for error in errors
    )


def _until_killed(me: Member) -> None:
    mine = torch.zeros(200_000)
    for turn in range(10_000):
        paceline.all_reduce(mine, late=turn % me.world_size)
        if turn == 3:
            me.store.set(f"running/{me.rank}", "")


def test_a_killed_peer_is_an_error_and_no_hang() -> None:
    with Ranks(_until_killed, 4, backend="gloo", group_timeout_s=5.0) as ranks:
        ranks.store.wait([f"running/{rank}" for rank in range(4)])
        ranks.signal(2, signal.SIGKILL)
        outcomes = ranks.outcomes(40, [0, 1, 3])
    for outcome in outcomes:
        assert outcome.error is not None
        assert "MessageError" in outcome.error
        assert "of the group failed: " in outcome.error


@pytest.mark.parametrize(
    ("late", "sentence"),
    [
        (4, "late names ranks of the group, 0 to 3, and 4 is none"),
        ([1, -1], "and -1 is none"),
        (["a"], "and 'a' is none"),
        (True, "and True is none"),
        ([1, 1], "late names rank 1 twice"),
        ({1: -0.5}, "rank 1 is late by seconds, 0 or more, not -0.5"),
        ({1: float("nan")}, "not nan"),
        ({1: float("inf")}, "not inf"),
        (range(4), "all 4 ranks are late, which is the same as none"),
    ],
)
def test_wrong_late_is_a_sentence(late: Any, sentence: str) -> None:
    with pytest.raises(paceline.UsageError, match=sentence):
        read_late(late, 4)


def test_late_is_read() -> None:
    inf = float("inf")
    assert read_late(None, 4) == read_late([], 4) == read_late({2: 0}, 4) == {}
    assert read_late(2, 4) == {2: inf}
    assert read_late((2, 0), 4) == {2: inf, 0: inf}
    assert read_late({1: 0.25, 0: 0.0}, 4) == {1: 0.25}


def test_without_a_group_it_is_a_sentence() -> None:
    with pytest.raises(paceline.UsageError, match=r"call torch\.distributed\.init_process_group first"):
        paceline.all_reduce(torch.ones(1))


def _refused(_: Member) -> list[str]:
    said = []
    for tensor, options in (
        (torch.ones(3).to_sparse(), {}),
        (torch.ones(3), {"op": dist._make_nccl_premul_sum(2.0)}),
        (torch.ones(3), {"late": 7}),
        (torch.ones(3), {"algorithm": "nosuch"}),
        (torch.ones(3), {"algorithm": "pairwise"}),
    ):
        with pytest.raises(paceline.UsageError) as caught:
            paceline.all_reduce(tensor, **options)
        said.append(str(caught.value))
    return said


def test_what_cannot_be_run_is_a_sentence() -> None:
    for said in run_ranks(_refused, 2, backend="gloo"):
        for sentence, part in zip(
            said,
            ("to_dense", "take one of SUM", "0 to 1, and 7", "no algorithm 'nosuch'", "not for allreduce"),
            strict=True,
        ):
            assert part in sentence
