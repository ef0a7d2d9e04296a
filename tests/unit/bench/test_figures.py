from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bench.figures import Operation, Summary, bus_factor, limit_s
from paceline.bench.sizes import elements
from paceline.ir.cluster import Cluster

LAN8 = Cluster.preset("lan8")
BUFFER_S = 64e6 * 1514 / 1448 / 62.5e6
"""How long 64 MB take to cross a port of lan8."""


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    factors = {operation.value: bus_factor(operation, 4) for operation in Operation}
    assert factors == {
        "allreduce": 1.5, "allgather": 0.75, "reducescatter": 0.75, "alltoall": 0.75,
        "broadcast": 1.0, "sendrecv": 1.0, "barrier": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "buffers"),
    [
        (Operation.ALL_REDUCE, 2 * 7 / 8),
        (Operation.ALL_GATHER, 7 / 8),
        (Operation.REDUCE_SCATTER, 7 / 8),
        (Operation.ALL_TO_ALL, 7 / 8),
        (Operation.BROADCAST, 1.0),
        (Operation.SEND_RECV, 1.0),
    ],
)
def test_the_limit_is_bytes_over_a_ports_rate(operation: Operation, buffers: float) -> None:
    assert limit_s(operation, LAN8, 64_000_000) == pytest.approx(buffers * BUFFER_S)


def test_the_limit_is_of_bytes_alone() -> None:
    small, large = (limit_s(Operation.ALL_REDUCE, LAN8, size) for size in (4_000, 4_000_000))
    assert small is not None
    assert large == pytest.approx(1000 * small)
    assert limit_s(Operation.BARRIER, LAN8, 0) is None
    assert limit_s(Operation.ALL_REDUCE, Cluster.preset("gpu8"), 64_000_000) is None  # no byte crosses a port


def test_a_slow_uplink_is_the_limit() -> None:
    assert limit_s(Operation.SEND_RECV, Cluster.preset("uplink8"), 64_000_000) == pytest.approx(5 * BUFFER_S)


def test_summaries_have_medians_and_quartiles() -> None:
    summary = Summary.of([4.0, 1.0, 2.0, 3.0, 5.0], loop_s=16.0)
    assert (summary.median_s, summary.lower_quartile_s, summary.upper_quartile_s) == (3.0, 2.0, 4.0)
    assert (summary.min_s, summary.max_s, summary.loop_mean_s, summary.count) == (1.0, 5.0, 3.2, 5)
    assert Summary.of([2.0], 2.0).upper_quartile_s == 2.0


def test_ranks_of_a_host_share_its_port() -> None:
    hosts_of_two, hosts_of_four = Cluster.preset("lan4x2"), Cluster.preset("lan2x4")
    buffer_s = BUFFER_S / 2  # 1 Gbit/s
    assert limit_s(Operation.ALL_REDUCE, hosts_of_two, 64_000_000) == pytest.approx(1.5 * buffer_s)
    assert limit_s(Operation.ALL_REDUCE, hosts_of_four, 64_000_000) == pytest.approx(buffer_s)
    assert limit_s(Operation.SEND_RECV, hosts_of_four, 64_000_000) == pytest.approx(buffer_s)
    by_turns = replace(hosts_of_four, host_of=(0, 1) * 4)  # each rank sends to the other host
    assert limit_s(Operation.SEND_RECV, by_turns, 64_000_000) == pytest.approx(4 * buffer_s)


def test_what_two_operations_move_over_a_port_adds_up() -> None:
    """On slow uplinks an all-gather by multicast and a reduce-scatter send one buffer; two rings would send 1.75."""
    both = (Operation.ALL_GATHER, LAN8, 64_000_000)
    assert limit_s(*both, beside=Operation.REDUCE_SCATTER) == pytest.approx(1.75 * BUFFER_S)
    uplink8 = Cluster.preset("uplink8")
    sent_s = limit_s(Operation.ALL_GATHER, uplink8, 64_000_000, beside=Operation.REDUCE_SCATTER)
    assert sent_s == pytest.approx(5 * BUFFER_S)
    unicast = replace(uplink8, multicast=False)
    assert limit_s(Operation.ALL_GATHER, unicast, 64_000_000, beside=Operation.REDUCE_SCATTER) == pytest.approx(
        1.75 * 5 * BUFFER_S
    )
    spread = limit_s(Operation.BROADCAST, LAN8, 64_000_000, beside=Operation.BROADCAST)
    assert spread == pytest.approx(2 * BUFFER_S)
    assert limit_s(Operation.ALL_GATHER, Cluster.preset("gpu8"), 64_000_000, beside=Operation.BROADCAST) is None


def test_a_share_is_equal_also_of_what_runs_beside() -> None:
    assert elements(Operation.ALL_REDUCE, 4_000, "float32", 7) == 1000
    assert elements(Operation.ALL_REDUCE, 4_000, "float32", 7, Operation.ALL_GATHER) == 994
