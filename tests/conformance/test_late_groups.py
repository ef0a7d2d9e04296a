"""All-reduces planned around late ranks, rightly and wrongly: the right sums, the same bits on all ranks."""

from __future__ import annotations

import hashlib
import socket
import time

import pytest
import torch
import torch.distributed as dist

from effort import thorough
from paceline.backend import arrivals, chosen_algorithms
from ranks import BACKEND, Member, Ranks, run_ranks

pytestmark = pytest.mark.skipif(BACKEND != "paceline", reason="tests Paceline's own decisions")

COUNTS = (7, 30_011, 400_000)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def forced(me: Member) -> tuple[list[str], str]:
    """Sums of several sizes, one after the other and all in flight, with whole numbers and with fractions."""
    digests = []
    for count in COUNTS:
        numbers = torch.arange(count, dtype=torch.float32) % 1000 + me.rank
        dist.all_reduce(numbers)
        expected = torch.arange(count, dtype=torch.float32) % 1000 * me.world_size
        assert torch.equal(numbers, expected + me.world_size * (me.world_size - 1) / 2)
    tensors = [torch.rand(count) for count in COUNTS for _ in range(2)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    digests += [_digest(tensor) for tensor in tensors]
    least = torch.full((100_000,), float(me.rank + 1))
    dist.all_reduce(least, dist.ReduceOp.MIN)
    assert torch.equal(least, torch.ones(100_000))
    return digests, "; ".join(chosen_algorithms())


@pytest.mark.parametrize(
    ("ranks", "late"),
    thorough(
        [(ranks, late) for ranks in range(3, 9) for late in ("0", "1:50", "2")],
        [(3, "2"), (4, "0"), (5, "1:50"), (6, "2"), (7, "0"), (8, "1:50")],
    ),
)
def test_whoever_is_said_to_be_late_sums_are_right(ranks: int, late: str) -> None:
    said = run_ranks(forced, ranks, environment={"PACELINE_LATE": late, "PACELINE_TRANSPORT": "tcp"})
    assert len({tuple(digests) for digests, _ in said}) == 1


@pytest.mark.parametrize("late", ["1,2", "0:100,3:900", "1,2,3"])
def test_several_late_ranks(late: str) -> None:
    said = run_ranks(forced, 5, environment={"PACELINE_LATE": late, "PACELINE_RATE": "1gbit"})
    assert len({tuple(digests) for digests, _ in said}) == 1


def _parts(step: int, rank: int) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(100 * step + rank)
    return [torch.rand(count, generator=dice) for count in (400_000, 100, 150_000, 300_000)]


def between_hosts(me: Member, task: str) -> tuple[list[str], str, list[str]]:
    """Ranks that take one another for other hosts, so that large all-reduces await decisions."""
    socket.gethostname = lambda: f"host{me.rank}"  # type: ignore[assignment]
    me.join(timeout_s=30)
    digests = []
    for step in range(14):
        tensors = _parts(step, me.rank)
        if (task == "late" and me.rank == 2) or (task == "turns" and me.rank == step % me.world_size):
            time.sleep(0.3)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        if step % 3 == 0:
            dist.barrier()
            assert all(work.is_completed() for work in works)
        for work in works:
            work.wait()
        digests += [_digest(tensor) for tensor in tensors]
        if step % 5 == 0:
            for found, *parts in zip(tensors, *(_parts(step, rank) for rank in range(me.world_size)), strict=True):
                torch.testing.assert_close(found, torch.stack(parts).sum(0))
    seen, chosen = [one.choice for one in arrivals()], "; ".join(chosen_algorithms())
    me.meet("end")
    dist.destroy_process_group()
    return digests, chosen, seen


@pytest.mark.parametrize(
    ("ranks", "task"),
    thorough(
        [(ranks, task) for ranks in (3, 4, 6) for task in ("late", "turns", "nobody")],
        [(3, "late"), (4, "nobody"), (4, "late"), (6, "turns")],
    ),
)
def test_decisions_between_hosts(ranks: int, task: str) -> None:
    slow = {"PACELINE_TRANSPORT": "tcp", "PACELINE_RATE": "50mbit", "PACELINE_LATENCY": "5us"}
    with Ranks(between_hosts, ranks, task, join=False, environment=slow) as running:
        said = running.results(60)
    assert len({tuple(digests) for digests, _, _ in said}) == 1
    assert len(said[0][2]) == 14 * 3  # the small one of each step awaits nothing
    assert said[1][2] == []
    if task == "late":
        assert any(choice.startswith("2:") for choice in said[0][2]), said[0][2]


@pytest.mark.parametrize("setting", [{"PACELINE_DETERMINISTIC": "1"}, {"PACELINE_LATE": "off"}])
def test_without_decisions(setting: dict[str, str]) -> None:
    slow = {"PACELINE_TRANSPORT": "tcp", "PACELINE_RATE": "50mbit", "PACELINE_LATENCY": "5us", **setting}
    with Ranks(between_hosts, 3, "late", join=False, environment=slow) as running:
        said = running.results(60)
    assert said[0][2] == []
    assert len({tuple(digests) for digests, _, _ in said}) == 1
