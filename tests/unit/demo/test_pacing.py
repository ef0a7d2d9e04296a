"""Connections are slowed down without any privilege, and nothing is left open."""

from __future__ import annotations

import os
import socket

import pytest
import torch.distributed as dist

from paceline.demo import trainings
from paceline.demo.data import Digits, make_model
from paceline.demo.messages import Job, Strategy
from paceline.demo.pacing import SO_MAX_PACING_RATE, pace_connections


def test_tcp_connections_are_paced_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, plain = socket.socketpair()
        with other, plain:
            before = set(os.listdir("/proc/self/fd"))
            assert pace_connections(1_000_000) >= 2
            assert set(os.listdir("/proc/self/fd")) == before
            assert one.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == 1_000_000
            assert plain.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) != 1_000_000


@pytest.mark.parametrize("strategy", Strategy)
def test_all_strategies_are_paced_alike(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's rings and Paceline's send to one neighbour only, in both halves of an all-reduce."""
    rates: list[int] = []
    monkeypatch.setattr(trainings, "pace_connections", rates.append)
    job = Job("", num_ranks=1, iterations=2, late_rank=0, late_s=0.0, pace_bytes_per_s=1_000_000)
    dist.init_process_group(strategy.backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainings.finish(trainings.train(strategy, make_model(job.seed), Digits.load(), job, lambda _: None))
    finally:
        dist.destroy_process_group()
    assert set(rates) == {1_000_000}
    assert len(rates) == 2 if strategy.synchronous else len(rates) >= 2
