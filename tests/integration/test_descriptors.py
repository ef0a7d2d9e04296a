"""Too many open files: every rank hears of it in words that say what to do, at whatever point the files run out."""

from __future__ import annotations

import os
import resource
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from effort import thorough
from ranks import Member, Ranks

MOST_GROUPS = 60


def make_groups(me: Member, spare: int, limited: int | None) -> str:
    """Groups, until the files run out, on one rank (``limited``) or on all (None). Returns what the rank heard."""
    if limited is None or limited == me.rank:
        # A limit counts numbers, and gaps are used up first: as many are left on every rank.
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        while (filler := os.dup(0)) < used:
            pass
        os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (filler + spare, filler + spare))
    try:
        me.join(timeout_s=15)
        for _ in range(MOST_GROUPS):
            group = dist.new_group(timeout=timedelta(seconds=15))
            dist.all_reduce(torch.ones(10_000), group=group)
            if me.rank == 0:
                dist.send(torch.ones(10), 1, group=group)
            elif me.rank == 1:
                dist.recv(torch.ones(10), 0, group=group)
            dist.barrier(group)  # of which all hear who are not concerned by the message
    except (RuntimeError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "no error"
    me.store.set(f"said/{me.rank}", said)
    me.store.wait([f"said/{rank}" for rank in range(me.world_size)])
    return said


@pytest.mark.parametrize("limited", [None, 1])
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("spare", thorough(list(range(40)), [0, 1, 3, 4, 6, 7, 8, 13, 21]))
def test_every_rank_hears_of_it(spare: int, transport: str, limited: int | None) -> None:
    with Ranks(make_groups, 3, spare, limited, join=False, environment={"PACELINE_TRANSPORT": transport}) as ranks:
        outcomes = ranks.outcomes(60)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        assert not outcome.killed
    said = [outcome.value for outcome in outcomes]
    assert all("too many open files" in words.lower() for words in said), said
