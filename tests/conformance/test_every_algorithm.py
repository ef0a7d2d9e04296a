"""Every algorithm on the real engine, over every transport: the same schedules that are proven, on real sockets."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from contract import numbers, same

from paceline.algorithms import ALGORITHMS
from paceline.backend import chosen_algorithms
from paceline.config import Options
from paceline.ir.collective import ROOTED, Collective, Kind
from ranks import BACKEND, Member, run_ranks

pytestmark = pytest.mark.skipif(BACKEND != "paceline", reason="algorithms are Paceline's")

TRANSPORTS = ("auto", "tcp")
SIZES = (0, 1, 5, 2051, 40_003, 600_001)
"""Elements: none, fewer than ranks, in one frame, around what is pulled instead of sent, and many slices."""


def run(kind: Kind, me: Member, root: int, size: int, group: dist.ProcessGroup, name: str) -> None:
    """One collective, checked."""
    inputs = [numbers(rank, size * me.world_size, torch.float32) for rank in range(me.world_size)]
    mine, total = inputs[me.rank].clone(), sum(inputs[1:], inputs[0])
    share = slice(me.rank * size, (me.rank + 1) * size)
    result, wanted = torch.zeros(0), torch.zeros(0)
    if kind is Kind.ALL_REDUCE:
        dist.all_reduce(mine, group=group)
        result, wanted = mine, total
    elif kind is Kind.REDUCE_SCATTER:
        result, wanted = torch.zeros(size), total[share]
        dist.reduce_scatter_single(result, mine, group=group)
        same(mine, inputs[me.rank], "input")
    elif kind is Kind.ALL_GATHER:
        result = torch.zeros(size * me.world_size)
        wanted = torch.cat([part[:size] for part in inputs])
        dist.all_gather_single(result, mine[:size].contiguous(), group=group)
    elif kind is Kind.BROADCAST:
        dist.broadcast(mine, root, group=group)
        result, wanted = mine, inputs[root]
    elif kind is Kind.REDUCE:
        dist.reduce(mine, root, group=group)
        result, wanted = mine, total if me.rank == root else inputs[me.rank]
    elif kind is Kind.GATHER:
        parts = [torch.zeros(size) for _ in inputs] if me.rank == root else None
        dist.gather(mine[:size].contiguous(), parts, root, group=group)
        result = torch.cat(parts or [result])
        wanted = torch.cat([part[:size] for part in inputs]) if me.rank == root else wanted
    elif kind is Kind.SCATTER:
        result, wanted = torch.zeros(size), inputs[root][share]
        dist.scatter(result, list(mine.chunk(me.world_size)) if me.rank == root else None, root, group=group)
    elif kind is Kind.ALL_TO_ALL:
        result, wanted = torch.zeros_like(mine), torch.cat([part[share] for part in inputs])
        dist.all_to_all_single(result, mine, group=group)
    else:
        dist.barrier(group=group)
    same(result, wanted, (name, kind, root, size))


def every_algorithm(me: Member) -> None:
    for name in ALGORITHMS:
        if not ALGORITHMS[name].multicast:
            collectives(me, name)


def collectives(me: Member, name: str) -> None:
    """All that the algorithm serves, in a group of its own for each, which is told in code."""
    for kind in sorted(ALGORITHMS[name].kinds):
        if not ALGORITHMS[name].serves(Collective(kind, me.world_size)):
            continue
        group = dist.new_group(pg_options=Options(algorithm=f"{kind}:{name}"))
        assert group is not None
        for size in SIZES if kind is not Kind.BARRIER else (0, 0):
            if kind is Kind.SCATTER and size == 0:
                continue  # torch.chunk makes no list of empty tensors
            for root in (0, me.world_size - 1) if kind in ROOTED else (0,):
                run(kind, me, root, size, group, name)
        assert {line.rpartition(": ")[2] for line in chosen_algorithms(group)} == {name}
        dist.destroy_process_group(group)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_algorithms(transport: str, world_size: int) -> None:
    run_ranks(every_algorithm, world_size, timeout_s=390, environment={"PACELINE_TRANSPORT": transport})


def unlike(me: Member) -> str:
    """Ranks that are told different algorithms."""
    os.environ["PACELINE_ALGORITHM"] = "ring" if me.rank else "direct"
    group = dist.new_group()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(1000), group=group)
    return str(caught.value)


def test_ranks_with_different_settings_are_told() -> None:
    for said in run_ranks(unlike, 3):
        assert "different schedules: set PACELINE_ALGORITHM" in said


def test_an_algorithm_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AssertionError, match="there is no algorithm 'rnig'"):
        run_ranks(first_barrier, 2, environment={"PACELINE_ALGORITHM": "rnig"})


def first_barrier(me: Member) -> None:
    del me
    dist.barrier()
