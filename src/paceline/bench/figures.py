"""From times to the figures people compare: bandwidths as nccl-tests defines them, limits, medians and spreads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum

import msgspec
import numpy as np

from paceline.ir.bound import exposed_bound, together_bound
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective, Kind


class Operation(str, Enum):
    """What can be measured, by the names of the command line."""

    ALL_REDUCE = "allreduce"
    ALL_GATHER = "allgather"
    REDUCE_SCATTER = "reducescatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "alltoall"
    BARRIER = "barrier"
    SEND_RECV = "sendrecv"

    def __str__(self) -> str:
        """The plain name, in every Python version."""
        return self.value

    @property
    def redop(self) -> str:
        """What is done to the data."""
        return "sum" if self in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER) else "none"


SHARED = frozenset({Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL})
"""Where each rank has an equal share of the buffer, and nccl-tests counts the elements of one share."""


BESIDE = frozenset(Operation) - {Operation.BARRIER, Operation.SEND_RECV}
"""What can run at the same time as another of these."""


def bus_factor(operation: Operation, num_ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests has it."""
    if operation is Operation.ALL_REDUCE:
        return 2 * (num_ranks - 1) / num_ranks
    return (num_ranks - 1) / num_ranks if operation in SHARED else 1.0


def limit_s(
    operation: Operation,
    cluster: Cluster,
    size_bytes: int,
    late_s: Mapping[int, float] | None = None,
    beside: Operation | None = None,
) -> float | None:
    """Seconds that the bytes need to cross the busiest port, headers included.

    None where no byte crosses one: for a barrier, and on a single host.

    With late ranks, those that remain after the last has arrived; with another operation beside it, those of both.
    """
    num_hosts = len(cluster.hosts)
    if operation is Operation.BARRIER or num_hosts == 1:
        return None
    if operation is Operation.SEND_RECV:
        source = cluster.arrays.host
        destination = np.roll(source, -1)  # each rank sends to the next one
        crosses = source != destination
        sent, received = (np.bincount(ends[crosses], minlength=num_hosts) for ends in (source, destination))
        up = np.array([host.up_bytes_per_s for host in cluster.hosts])
        down = np.array([host.down_bytes_per_s for host in cluster.hosts])
        return float(size_bytes * cluster.wire_factor * np.maximum(sent / up, received / down).max())
    # Start-ups of a cluster are assumed, its rates are set: the limit is of bytes alone.
    hosts = tuple(replace(host, latency_s=0.0, local_latency_s=0.0) for host in cluster.hosts)
    collective = Collective(Kind(operation.value), cluster.num_ranks)
    if beside is not None:
        both = (collective, Collective(Kind(beside.value), cluster.num_ranks))
        return together_bound(both, cluster, size_bytes, multicast=cluster.multicast)
    bare = replace(cluster, hosts=hosts, late_s=()).with_late(late_s or {})
    return exposed_bound(collective, bare, size_bytes, multicast=cluster.multicast)


class Summary(msgspec.Struct, frozen=True):
    """All timed iterations of one contender at one size.

    ``loop_mean_s`` is nccl-tests' figure, a loop's time over its iterations. Where ranks meet at a barrier before each
    call, it is the mean of the iterations. The others are over iterations, each as long as on its slowest rank.
    """

    median_s: float
    lower_quartile_s: float
    upper_quartile_s: float
    min_s: float
    max_s: float
    loop_mean_s: float
    count: int

    @classmethod
    def of(cls, samples_s: Sequence[float], loop_s: float) -> Summary:
        """Summarise samples whose loops took ``loop_s`` together."""
        lower, median, upper = np.percentile(samples_s, [25, 50, 75]).tolist()
        count = len(samples_s)
        return cls(median, lower, upper, float(min(samples_s)), float(max(samples_s)), loop_s / count, count)


class Ratio(msgspec.Struct, frozen=True):
    """A contender's time over the subject's: of the medians, of the loops' means, and the span of rounds' medians."""

    of_medians: float
    of_means: float
    least: float
    most: float
