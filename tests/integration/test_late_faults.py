"""Late ranks and faults: who dies or freezes while others wait for a decision, or work without the late rank."""

from __future__ import annotations

import json
import re
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist

from effort import thorough
from ranks import BACKEND, Member, Ranks

pytestmark = pytest.mark.skipif(BACKEND != "paceline", reason="tests Paceline's own decisions")

SLOW = {"PACELINE_TRANSPORT": "tcp", "PACELINE_RATE": "50mbit", "PACELINE_LATENCY": "5us"}
LIMIT_S = 8.0


def waiting(me: Member, late: int, timeout_s: float, warm_up: int) -> None:
    """One rank never comes to the last all-reduce; the others say what they were told."""
    socket.gethostname = lambda: f"host{me.rank}"  # type: ignore[assignment]
    me.join(timeout_s=timeout_s)
    for _ in range(warm_up):
        if me.rank == late:
            time.sleep(0.2)
        dist.all_reduce(torch.ones(400_000))
    me.store.set(f"ready/{me.rank}", "")
    if me.rank == late:
        time.sleep(600)
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(400_000))
    me.store.set(f"failed/{me.rank}", json.dumps(str(caught.value)))


def _hear(ranks: Ranks, event: str, who: list[int], limit_s: float) -> list[str]:
    deadline_s = time.monotonic() + limit_s
    while not ranks.store.check([f"{event}/{rank}" for rank in who]):
        assert time.monotonic() < deadline_s, f"no {event!r} of all of {who}: {ranks.ended()}"
        time.sleep(0.01)
    return [ranks.store.get(f"{event}/{rank}").decode() for rank in who]


PAIRS = [(3, 3), (3, 1), (3, 0), (0, 0), (0, 2)]
WARM_UPS, MOMENTS_S = (0, 1, 8), (0.0, 0.3)


@pytest.mark.parametrize(
    ("late", "victim", "warm_up", "moment_s"),
    thorough(
        [(*pair, warm_up, moment_s) for pair in PAIRS for warm_up in WARM_UPS for moment_s in MOMENTS_S],
        [(*pair, WARM_UPS[(turn + i) % 3], MOMENTS_S[turn]) for i, pair in enumerate(PAIRS) for turn in (0, 1)],
    ),
)
def test_a_death_while_a_rank_is_late(late: int, victim: int, warm_up: int, moment_s: float) -> None:
    with Ranks(waiting, 4, late, 60.0, warm_up, join=False, environment=SLOW) as ranks:
        _hear(ranks, "ready", [0, 1, 2, 3], 60)
        time.sleep(moment_s)
        ranks.signal(victim, signal.SIGKILL)
        others = [rank for rank in range(4) if rank not in (late, victim)]
        for said in _hear(ranks, "failed", others, LIMIT_S):
            assert re.search(rf"allreduce #\d+: .*\brank {victim}\b", said), said


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_never_comes_is_named_at_the_time_limit(late: int) -> None:
    with Ranks(waiting, 3, late, 2.0, 1, join=False, environment=SLOW) as ranks:
        others = [rank for rank in range(3) if rank != late]
        for said in _hear(ranks, "failed", others, 60):
            assert re.search(rf"Timed out .*\brank {late}\b.* has not called it", said), said


def test_a_frozen_late_rank_is_named() -> None:
    with Ranks(waiting, 3, 2, 3.0, 1, join=False, environment=SLOW) as ranks:
        _hear(ranks, "ready", [2], 60)
        ranks.signal(2, signal.SIGSTOP)
        for said in _hear(ranks, "failed", [0, 1], 60):
            assert re.search(r"\brank 2\b.*does not answer", said), said
