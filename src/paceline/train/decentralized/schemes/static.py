"""The static scheduler of Ripples: who averages with whom is a function of the step, for workers of equal speed."""

from __future__ import annotations

import time

import torch

from paceline.errors import UsageError
from paceline.policy.grouping import static_groups
from paceline.train.decentralized.schemes.scheme import Scheme, Worker
from paceline.train.decentralized.schemes.synchronous import average_all, hosts_of


class Static(Scheme):
    """In even steps one worker of each host averages across hosts and the rest in pairs; in odd steps each host.

    There is no generator. All workers make the same number of steps. ``group_size`` is that of groups across hosts.
    """

    def __init__(self, worker: Worker, group_size: int = 2) -> None:
        super().__init__(worker)
        if group_size < 2:
            raise UsageError(f"group_size is {group_size}: a group has at least 2 workers")
        self._group_size = group_size
        self._hosts = hosts_of(self.mesh)
        self._vector: torch.Tensor | None = None

    def after_step(self) -> None:
        """Average with this step's group, if this worker is in one."""
        step = self.statistics.steps - 1
        groups = static_groups(step, self._hosts, self._group_size)
        for number, members in enumerate(groups):
            if self.mesh.worker in members:
                self._average(members, (step << 12) + number)

    def _average(self, members: list[int], number: int) -> None:
        if self._vector is None or self._vector.numel() != self.weights.size:
            self._vector = self.weights.new()
        begin = time.perf_counter()
        self.weights.read(self._vector)
        with self.waiting():
            self.mesh.reduce(self._vector, members, number, timeout_s=self.worker.timeout_s)
        self.weights.write(self._vector)
        vector_bytes = self._vector.numel() * self._vector.element_size()
        self.statistics.count_average(len(members), vector_bytes, time.perf_counter() - begin)

    def finish(self) -> None:
        """Average all workers' weights."""
        self.weights.write(average_all(self))

    def average(self) -> torch.Tensor:
        """Return the mean of all workers' weights."""
        return average_all(self)
