"""``PACELINE_DETERMINISTIC=1``: launches with other links, other late ranks and other sleeps have the same bits."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dear_models import build, dear, fit, was_all_reduced
from torch import nn

import paceline
from effort import thorough
from paceline.backend import arrivals, chosen_algorithms
from paceline.observe import links
from paceline.observe.links import Links
from paceline.train.dear.bucket import Bucket, Phase
from paceline.train.dear.feedpipe import FeedPipe
from paceline.train.dear.lookout import WARM_UP_STEPS
from ranks import BACKEND, Member, Ranks, run_ranks

pytestmark = pytest.mark.skipif(BACKEND != "paceline", reason="tests Paceline's own decisions")

DETERMINISTIC = {"PACELINE_DETERMINISTIC": "1", "PACELINE_TRANSPORT": "tcp"}
STEPS = WARM_UP_STEPS + 10
COUNTS = (2_000, 4_000, 9_000, 30_000, 300_000, 3_000_000)
NETWORKS = (Links(1e-6, (1.25e6,) * 3), Links(2e-2, (2e9,) * 3), Links(1e-4, (1e9, 1e7, 1e9)))
"""What each launch would measure."""


class Turning(nn.Module):
    """Uses its layers forwards in the first iteration, and all but the first backwards in the others.

    Two layers share a bucket. As their number is odd, another order puts them elsewhere in a bucket, so that their
    gradients are added in another order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(9))
        self.turned = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        first, *others = self.layers
        for layer in (first, *(reversed(others) if self.turned else others)):
            inputs = torch.tanh(layer(inputs))
        self.turned = True
        return inputs


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()


def _arrivals(launch: int, dice: random.Random) -> Any:
    """Which all-gathers have arrived when one is awaited: in one launch all, in another none, else as it happens."""
    as_it_comes = FeedPipe._arrived

    def arrived(feed: FeedPipe, following: Sequence[Bucket]) -> Iterator[Bucket]:
        time.sleep(dice.random() * 0.002)
        if launch > 1:
            yield from as_it_comes(feed, following)
        for bucket in following if launch == 0 else ():
            if bucket.phase is Phase.PENDING:
                feed.wait(bucket)
                yield bucket

    return patch.object(FeedPipe, "_arrived", arrived)


def launched(me: Member, launch: int, sharded: bool) -> dict[str, Any]:
    """One launch of the same program; what must not depend on the launch."""
    dice = random.Random(f"{launch} {me.rank}")
    socket.gethostname = lambda: f"host{me.rank}"  # type: ignore[assignment]
    links.measure = lambda *_, **_what: NETWORKS[launch % len(NETWORKS)]  # type: ignore[assignment]
    time.sleep(dice.random() * 0.1)
    me.join()
    sums = []
    for count in COUNTS:
        sums.append(torch.rand(count, generator=torch.Generator().manual_seed(me.rank)))
        time.sleep(0.05 if me.rank == launch else dice.random() * 0.01)
        dist.all_reduce(sums[-1])
    torch.manual_seed(0)
    net = Turning()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    model = paceline.DataParallel(net, optimizer, bucket_mb=0.005, sharded=sharded)
    batches, norms = torch.Generator().manual_seed(me.rank), []
    with _arrivals(launch, dice):
        for step in range(STEPS):
            inputs, targets = torch.randn(2, 16, 24, generator=batches)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            if step % 2:
                norms.append(model.clip_grad_norm_(0.05))
            time.sleep(0.02 if me.rank == launch else dice.random() * 0.002)
            optimizer.step()
    model.synchronize()
    state = optimizer.state_dict()  # small differences of gradients show there first
    assert all(bool(weight.isfinite().all()) for weight in net.parameters())
    assert all(norm > 0.01 for norm in norms)
    groups = (None, model._groups.reduce, model._groups.gather)
    found = {
        "sums": _digest(sums),
        "norms": _digest(norms),
        "state": _digest([*net.parameters(), *(one["momentum_buffer"] for one in state["state"].values())]),
        "buckets": [bucket.indexes for bucket in model._pipe.buckets],
        "early": was_all_reduced(model),
        "decided": [one.choice for one in arrivals()],
        "algorithms": [line for group in groups for line in chosen_algorithms(group)],
    }
    me.meet("end")
    dist.destroy_process_group()
    return found


def _launch(number: int, sharded: bool, environment: dict[str, str]) -> list[dict[str, Any]]:
    with Ranks(launched, 3, number, sharded, join=False, environment=environment) as ranks:
        return ranks.results(120)


@pytest.mark.parametrize("sharded", [False, True])
def test_launches_have_the_same_bits(sharded: bool) -> None:
    launches = [_launch(number, sharded, DETERMINISTIC) for number in range(thorough(6, 2))]
    first = launches[0][0]
    for number, ranks in enumerate(launches):
        for rank, found in enumerate(ranks):
            assert found == first, f"rank {rank} in launch {number}"
    assert first["decided"] == []
    assert not first["early"]
    assert [index for bucket in first["buckets"] for index in bucket] == list(range(18))  # as in the first iteration
    assert len(first["buckets"]) == 5
    assert {line.rpartition(": ")[2] for line in first["algorithms"]} > {"doubling", "ring"}


@pytest.mark.parametrize("what", ["algorithms", "buckets", "early", "state"])
def test_without_it_launches_differ(what: str, plain_launches: list[dict[str, Any]]) -> None:
    """What the test above compares does depend on the launch where nothing is asked for."""
    one, other = (found[what] for found in plain_launches)
    assert one != other or (what == "early" and one)


@pytest.fixture(scope="module")
def plain_launches() -> list[dict[str, Any]]:
    return [_launch(number, False, {"PACELINE_TRANSPORT": "tcp"})[0] for number in range(2)]


def differing(me: Member, environments: dict[int, dict[str, str]]) -> tuple[Any, list[str]]:
    """Ranks of which each has its own settings: what they run, and what they were told."""
    os.environ.update(environments.get(me.rank, {}))
    socket.gethostname = lambda: f"host{me.rank}"  # type: ignore[assignment]
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    me.join(timeout_s=20)
    for count in COUNTS:
        dist.all_reduce(torch.ones(count))
    model, optimizer = dear("mlp", bucket_mb="auto")
    fit(model, optimizer, "mlp", me, 5)
    threshold = model._pipe._tuner.threshold_bytes, model._pipe._tuner.searching and me.rank == 0
    gathered = chosen_algorithms(), threshold, _digest(model.parameters())
    me.meet("end")
    dist.destroy_process_group()
    return gathered, [line for line in told if "rank 0" in line]


SET = {"PACELINE_DETERMINISTIC": "1"}
GIVEN = {"PACELINE_RATE": "50mbit", "PACELINE_LATENCY": "5us"}


@pytest.mark.parametrize(
    "environments",
    thorough(
        [{0: SET}, {1: SET}, {1: SET, 2: SET}, {0: GIVEN}, {2: GIVEN}, {0: SET, 1: GIVEN}, {0: GIVEN, 1: SET}],
        [{0: SET}, {1: SET}, {2: GIVEN}, {0: GIVEN, 1: SET}],
    ),
)
def test_rank_0_decides_where_ranks_are_set_differently(environments: dict[int, dict[str, str]]) -> None:
    with Ranks(differing, 3, environments, join=False, environment={"PACELINE_TRANSPORT": "tcp"}) as ranks:
        said = ranks.results(60)
    algorithms, (threshold_bytes, searching), _ = said[0][0]
    for (of_rank, (its_threshold_bytes, _), weights), _ in said:
        assert (of_rank, its_threshold_bytes, weights) == (algorithms, threshold_bytes, said[0][0][2])
    assert searching == (environments.get(0) != SET)
    for rank, (_, told) in enumerate(said):
        differs = environments.get(rank, {}) != environments.get(0, {})
        assert bool(told) == differs, (rank, told)


def read_beside(me: Member, reads: bool) -> list[list[int]]:
    """Another thread reads parameters in the iteration that the order is learnt from."""
    model, optimizer = dear("mlp")
    reader = threading.Thread(target=lambda: [p.detach().sum() for p in reversed(list(model.module.parameters()))])
    if reads and me.rank == 0:
        reader.start()
        reader.join()
    fit(model, optimizer, "mlp", me, 3)
    return [bucket.indexes for bucket in model._pipe.buckets]


def test_a_thread_that_reads_does_not_change_the_order() -> None:
    alone, beside = (run_ranks(read_beside, 2, reads, environment=DETERMINISTIC) for reads in (False, True))
    assert alone == beside
    assert [index for bucket in alone[0] for index in bucket] == list(range(6))


def messages(me: Member, environments: dict[int, dict[str, str]]) -> str:
    """``paceline.all_reduce`` on Gloo, where each rank has its own settings."""
    os.environ.update(environments.get(me.rank, {}))
    found = []
    for count in (100, 4_000, 200_000):
        tensor = torch.rand(count)
        paceline.all_reduce(tensor)
        found.append(tensor)
    state = paceline.hooks.StragglerState(every=2)
    net = nn.parallel.DistributedDataParallel(build("mlp"))
    net.register_comm_hook(state, paceline.hooks.straggler_hook)
    for _ in range(8):
        net(torch.rand(4, 16)).sum().backward()
    assert state.measures == (environments.get(0) != SET)
    return _digest([*found, *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)])


@pytest.mark.parametrize("environments", [{0: SET}, {1: SET}, {1: GIVEN}])
def test_over_messages_rank_0_decides_too(environments: dict[int, dict[str, str]]) -> None:
    said = run_ranks(messages, 3, environments, backend="gloo", timeout_s=40)
    assert len(set(said)) == 1
