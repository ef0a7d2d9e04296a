"""The ranks of the tests: failures come back with their traceback, limits hold, and nobody is left behind."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ranks import Member, RankError, Ranks, run_ranks


def add_up(me: Member, start: int) -> int:
    number = torch.tensor(start + me.rank)
    dist.all_reduce(number)
    return int(number)


def one_fails(me: Member) -> None:
    if me.rank == 1:
        raise ValueError("rank one had enough")
    time.sleep(600)


def one_warns(me: Member) -> None:
    if me.rank == 1:
        warnings.warn("something is deprecated", DeprecationWarning, stacklevel=1)


def sleeps(me: Member) -> None:
    me.store.set(f"asleep/{me.rank}", str(os.getpid()))
    time.sleep(600)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_values_come_back_by_rank() -> None:
    assert run_ranks(add_up, 3, 10) == [33, 33, 33]


@pytest.mark.parametrize(
    ("function", "words"), [(one_fails, "ValueError: rank one had enough"), (one_warns, "something is deprecated")]
)
def test_a_failure_names_the_rank(function: object, words: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(function, 3)
    assert str(caught.value).startswith("rank 1 of 3")
    assert words in str(caught.value)
    assert "nothing from ranks [0, 2]" in str(caught.value) or function is one_warns


def test_a_limit_holds_and_nobody_stays() -> None:
    with Ranks(sleeps, 2, join=False) as ranks:
        pids = ranks.pids
        ranks.store.wait(["asleep/0", "asleep/1"])
        assert [int(ranks.store.get(f"asleep/{rank}")) for rank in range(2)] == pids
        with pytest.raises(RankError, match=r"nothing from ranks \[0, 1\]"):
            ranks.results(0.2)
        ranks.signal(1, signal.SIGKILL)
        assert ranks.outcomes(10, [1])[0].killed
        ranks.signal(0, signal.SIGSTOP)
    assert not any(_alive(pid) for pid in pids)
