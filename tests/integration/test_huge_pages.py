"""Large buffers in huge pages, which ranks of one host pull from each other's memory: right sums, and deaths meanwhile.

numpy asks for huge pages where it allocates much. The engine moves tensors of torch that come back to huge pages.
Where the kernel has no huge pages the same tests go through rings.
"""

from __future__ import annotations

import os
import platform
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ranks import BACKEND, Member, Ranks, run_ranks

COUNT = 5 << 20  # 20 MB: every chunk is large enough to be pulled
ALGORITHMS = ("ring", "direct", "doubling", "halving_doubling", "one_shot", "bruck")


def buffer(value: float) -> torch.Tensor:
    return torch.from_numpy(np.full(COUNT, value, dtype=np.float32))


def add_up(me: Member) -> None:
    for turn in range(3):
        tensor = buffer(me.rank + turn)
        tensor[me.rank] = 100
        dist.all_reduce(tensor)
        ranks = me.world_size
        plain = float(sum(range(ranks)) + ranks * turn)
        assert tensor[ranks:].eq(plain).all()
        assert tensor[:ranks].tolist() == [plain + 100 - rank - turn for rank in range(ranks)]


def move(me: Member) -> None:
    root = buffer(7 if me.rank == 1 else 0)
    dist.broadcast(root, 1)
    assert root.eq(7).all()
    parts = [buffer(-1) for _ in range(me.world_size)]
    dist.all_gather(parts, buffer(me.rank))
    for rank, part in enumerate(parts):
        assert part.eq(rank).all()


def in_flight_together(me: Member) -> None:
    tensors = [buffer(turn) for turn in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for turn in (3, 1, 0, 2):
        work = works[turn]
        assert work is not None
        work.wait()
        assert tensors[turn].eq(turn * me.world_size).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums(ranks: int) -> None:
    run_ranks(add_up, ranks)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_by_every_kind_of_schedule(algorithm: str) -> None:
    run_ranks(add_up, 4, environment={"PACELINE_ALGORITHM": f"allreduce:{algorithm}"})


def test_moves() -> None:
    run_ranks(move, 3)


def test_many_in_flight() -> None:
    run_ranks(in_flight_together, 3)


def huge_bytes(tensor: torch.Tensor) -> int:
    """How much of the mappings that a tensor lies in is in huge pages."""
    begin, end, found, inside = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(mapping[1], 16) < end and begin < int(mapping[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) << 10
    return found


def come_back(me: Member) -> list[int]:
    tensor = torch.empty(COUNT)
    before = huge_bytes(tensor)
    for turn in range(60):
        tensor.fill_(me.rank + turn)
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(me.world_size)) + me.world_size * turn).all()
    return [before, huge_bytes(tensor)]


def collapses() -> bool:
    """Whether the kernel moves memory to huge pages when asked, and leaves torch's in small ones until then."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    major, minor = (int(number) for number in platform.release().split(".")[:2])
    return (major, minor) >= (6, 7) and enabled.exists() and "[madvise]" in enabled.read_text()


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo moves no memory")
@pytest.mark.skipif(not collapses(), reason="huge pages are not given on request here")
@pytest.mark.skipif("THP_MEM_ALLOC_ENABLE" in os.environ, reason="torch asks for huge pages itself")
@pytest.mark.parametrize("setting", ["auto", "off"])
def test_tensors_that_come_back_are_moved(setting: str) -> None:
    for before, after in run_ranks(come_back, 2, environment={"PACELINE_HUGE_PAGES": setting}):
        assert before == 0
        assert after >= 16 << 20 if setting == "auto" else after == 0


def until_the_end(me: Member) -> str:
    me.join()
    tensor = buffer(0)
    dist.all_reduce(tensor)
    me.store.set(f"ready/{me.rank}", "")
    try:
        while True:
            dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        return str(error)


@pytest.mark.skipif(BACKEND == "gloo", reason="Gloo names no ranks")
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_meanwhile_is_named(victim: int) -> None:
    with Ranks(until_the_end, 3, join=False) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(3)])
        ranks.signal(victim, signal.SIGKILL)
        outcomes = ranks.outcomes(30)
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.error is None, outcome.error
            assert f"rank {victim} (" in outcome.value
            assert "its process died" in outcome.value
