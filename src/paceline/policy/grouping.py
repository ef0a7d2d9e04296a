"""Which workers average together: the size of groups, partitions by host and link, slow and isolated workers. Pure.

The group generator (``groups.py``) decides when groups are made; these functions decide of whom.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.errors import UsageError

_SAME_CLASS = 2.0
"""Links whose rates differ by less than this are of one class."""

_WEIGHT = 0.3
"""Weight of the newest step in a worker's moving average."""

_LONGEST = 8.0
"""A longer step counts as this many typical ones, so that a worker recovers from one long pause within a few steps."""


def choose_group_size(compute_s: float, all_reduce_s: float, num_workers: int) -> int:
    """Return the largest group size of 2, 4, 8, ..., ``num_workers`` whose average hides behind one step.

    An all-reduce of all workers moves about twice the weights through each link, and a group of g moves 2 (g - 1) / g
    times the weights. So the group takes (g - 1) / g of the time of all. Before, its members wait for each other: n
    workers ask n times in a step, and of g who come one after another each waits for half of the others on average. The
    size is 2 where even a pair takes longer than a step.

    >>> choose_group_size(compute_s=0.060, all_reduce_s=0.045, num_workers=8)
    4
    """
    if compute_s < 0 or all_reduce_s < 0 or num_workers < 1:
        raise UsageError("choose_group_size needs times of 0 or more and at least one worker")
    best, size = min(2, num_workers), 2
    while size < num_workers:
        size = min(2 * size, num_workers)
        if (size - 1) / size * all_reduce_s + (size - 1) / (2 * num_workers) * compute_s <= compute_s:
            best = size
    return best


@dataclass(frozen=True)
class LinkClass:
    """Hosts with links of about the same rate, and the group size for their workers."""

    number: int
    group_size: int


def link_classes(rate_bytes_per_s: Mapping[str, float], group_size: int) -> dict[str, LinkClass]:
    """Sort hosts into classes by the rate of their links, the fastest first.

    A group is as slow as its slowest link, so like is grouped with like: for given sizes, this has the smallest sum of
    transfer times. Within a class rates differ by less than a factor of two. A class of slow links gets the largest
    group that takes no longer than a group of the fastest class, and at least pairs.

    >>> link_classes({"a": 1e9, "b": 1e9, "c": 2e8}, group_size=4)["c"]
    LinkClass(number=1, group_size=2)
    """
    slow = [host for host, rate in rate_bytes_per_s.items() if not rate > 0]
    if slow:
        raise UsageError(f"the link of host {slow[0]} has no rate: give bytes per second, above zero")
    classes: list[list[str]] = []
    for host in sorted(rate_bytes_per_s, key=lambda name: -rate_bytes_per_s[name]):
        if not classes or rate_bytes_per_s[classes[-1][0]] >= _SAME_CLASS * rate_bytes_per_s[host]:
            classes.append([])
        classes[-1].append(host)
    rates = [rate_bytes_per_s[hosts[-1]] for hosts in classes]
    found = {}
    for number, hosts in enumerate(classes):
        slower = rates[0] / rates[number]
        size = group_size
        while size > 2 and slower * (size - 1) / size > (group_size - 1) / group_size:
            size -= 1
        found.update(dict.fromkeys(hosts, LinkClass(number, size)))
    return found


def random_groups(workers: Sequence[int], size: int, rng: random.Random) -> list[list[int]]:
    """Partition workers into disjoint random groups of ``size``; a last group of one is added to the one before.

    >>> random_groups(range(5), 2, random.Random(1))
    [[2, 3], [4, 0, 1]]
    """
    shuffled = list(workers)
    rng.shuffle(shuffled)
    return _cut(shuffled, size)


def inter_intra_groups(
    workers: Sequence[int], host_of: Mapping[int, str], size: int, rng: random.Random
) -> list[list[int]]:
    """Group workers so that one worker of each host uses the network: two groups for most workers, in this order.

    1. A random head of each host averages with the heads of other hosts, in groups of ``size``; the other workers of a
       host average among themselves.
    2. All workers of a host average, which passes on what the head has brought.
    """
    hosts: dict[str, list[int]] = {}
    for worker in workers:
        hosts.setdefault(host_of[worker], []).append(worker)
    for local in hosts.values():
        rng.shuffle(local)
    across = random_groups([local[0] for local in hosts.values()], size, rng)
    within = [local[1:] for local in hosts.values()]
    return [group for group in [*across, *within, *hosts.values()] if len(group) > 1]


def static_groups(step: int, hosts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    """Return the groups of one step where all workers are equally fast: a function of the step, with no generator.

    ``hosts`` has the workers of each host. In even steps one worker of each host, another one each time, averages with
    those of the other hosts, and the rest of a host averages in pairs. In odd steps each host averages. So one worker
    of a host uses the network at a time. Groups between hosts have up to ``size`` members; within some steps every
    worker has averaged with every other, directly or not. All workers must make the same number of steps.

    >>> for step in range(4):
    ...     print(static_groups(step, [[0, 1, 2, 3], [4, 5, 6, 7]], size=2))
    [[0, 4], [2, 3], [6, 7]]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    [[1, 5], [3, 0], [7, 4]]
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    if size < 2:
        raise UsageError(f"size is {size}: a group has at least 2 workers")
    if all(len(host) == 1 for host in hosts):
        return _butterfly([host[0] for host in hosts], size, step)
    if step % 2:
        return [list(host) for host in hosts if len(host) > 1]
    turn = step // 2
    groups = _butterfly([host[turn % len(host)] for host in hosts], size, turn)
    for host in hosts:
        head = turn % len(host)
        rest = [*host[head + 1 :], *host[:head]]
        rest = rest[len(rest) % 2 :]
        groups += [list(pair) for pair in zip(rest[::2], rest[1::2], strict=True)]
    return groups


def _butterfly(workers: Sequence[int], size: int, turn: int) -> list[list[int]]:
    """Group workers whose positions differ in one digit, the next one in each turn; ``size`` is the base."""
    strides = [1]
    while strides[-1] * size < len(workers):
        strides.append(strides[-1] * size)
    stride = strides[turn % len(strides)]
    groups: dict[tuple[int, int], list[int]] = {}
    for position, worker in enumerate(workers):
        groups.setdefault((position // (stride * size), position % stride), []).append(worker)
    return [group for group in groups.values() if len(group) > 1]


def _cut(workers: list[int], size: int) -> list[list[int]]:
    groups = [workers[begin : begin + size] for begin in range(0, len(workers), size)]
    if len(groups) > 1 and len(groups[-1]) == 1:
        last = groups.pop()
        groups[-1] += last
    return groups


class PaceFilter:
    """Finds slow workers by a moving average of the time between a worker's requests.

    A worker is slow if its average is more than ``slow_factor`` times the median of all. Unlike a difference of
    counters, the average forgets: a worker that recovers is no longer slow after a few steps.
    """

    def __init__(self, slow_factor: float) -> None:
        self.slow_factor = slow_factor
        self._average_s: dict[int, float] = {}
        self.typical_s = 0.0
        """The median of the workers' averages, a moment ago."""
        self._observed = 0

    def observe(self, worker: int, step_s: float) -> None:
        """Count a step of a worker. The median is taken anew once for as many steps as there are workers."""
        if self.typical_s > 0:
            step_s = min(step_s, _LONGEST * self.typical_s)
        average_s = self._average_s.get(worker)
        self._average_s[worker] = step_s if average_s is None else average_s + _WEIGHT * (step_s - average_s)
        self._observed += 1
        if self._observed >= len(self._average_s):
            self.typical_s, self._observed = median(self._average_s.values()), 0

    def forget(self, worker: int) -> None:
        """Drop a worker that is gone."""
        self._average_s.pop(worker, None)

    def is_slow(self, worker: int) -> bool:
        """Whether other workers should not wait for this one."""
        return self.typical_s > 0 and self._average_s.get(worker, 0.0) > self.slow_factor * self.typical_s


class Connectivity:
    """Tells whether groups connect all workers: a union-find over the commits of one block.

    Workers that only ever average within the same few drift apart from the rest. ``components`` names the sets of
    workers that no group of the block connects. A worker that has not asked for a group in the block is not counted.
    """

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._unions = 0
        self.num_commits = 0

    def add_request(self, worker: int) -> None:
        """Note that a worker has asked for a group."""
        self._parent.setdefault(worker, worker)

    def add_commit(self, members: Sequence[int]) -> None:
        """Note that these workers have averaged."""
        self.num_commits += 1
        first = self._find(members[0])
        for member in members[1:]:
            root = self._find(member)
            if root != first:
                self._parent[root] = first
                self._unions += 1

    def components(self) -> list[list[int]]:
        """Return the sets of workers that are not connected, or nothing if all are."""
        if self._unions == len(self._parent) - 1:
            return []
        found: dict[int, list[int]] = {}
        for worker in self._parent:
            found.setdefault(self._find(worker), []).append(worker)
        return list(found.values())

    def _find(self, worker: int) -> int:
        parent = self._parent
        parent.setdefault(worker, worker)
        while parent[worker] != worker:
            parent[worker] = worker = parent[parent[worker]]
        return worker


def bridges(representatives: Sequence[int], size: int) -> list[list[int]]:
    """Connect one worker of each component by groups of at most ``size``, each sharing one worker with the next.

    >>> bridges([3, 5, 7, 9], size=3)
    [[3, 5, 7], [7, 9]]
    """
    return [list(representatives[begin : begin + size]) for begin in range(0, len(representatives) - 1, size - 1)]
