"""What schemes share whose workers all take part in global averages."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.distributed as dist

from paceline.errors import UnsupportedError
from paceline.train.decentralized.hosts import host_name
from paceline.train.decentralized.mesh import GroupMesh, Mesh
from paceline.train.decentralized.schemes.scheme import Scheme, Worker


def group_mesh(mesh: Mesh) -> GroupMesh:
    """Return the mesh of a process group, or raise an error where workers come and go."""
    if not isinstance(mesh, GroupMesh):
        raise UnsupportedError('this scheme needs a process group: only "ripples" runs with a generator of its own')
    return mesh


def average_all(scheme: Scheme) -> torch.Tensor:
    """Return the mean of all workers' weights; every worker must call it."""
    mesh, weights = group_mesh(scheme.mesh), scheme.weights
    vector = weights.new(weights.num_weights)
    weights.read(vector)
    with scheme.waiting():
        dist.all_reduce(vector, group=mesh.group)
    return vector.div_(mesh.num_workers)


class Synchronous(Scheme):
    """A scheme in which all workers meet again and again, although they may make different numbers of steps.

    Whenever all meet, each tells whether it is training. One whose data has ended waits in ``finish``, and one that
    evaluates waits in ``average``; there it answers the meetings of those that train, until nobody does. Each worker
    learns the same of a meeting, so all see ``done`` at the same one.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self.group_mesh = group_mesh(worker.mesh)
        self.num_workers = self.group_mesh.num_workers
        self._steps_of_all = 0

    @abstractmethod
    def answer(self) -> bool:
        """Take part in the next meeting without training; return whether anybody trains."""

    @property
    @abstractmethod
    def is_current(self) -> bool:
        """Whether this worker's weights count in a mean of all, while nobody trains. Those of some worker do."""

    def add_up(self, vector: torch.Tensor) -> None:
        """Make a vector the sum of all workers' vectors, in place."""
        with self.waiting():
            dist.all_reduce(vector, group=self.group_mesh.group)

    def count_steps(self, steps: int) -> None:
        """Note steps that all workers together have made."""
        self._steps_of_all += steps
        if self.steps_left == 0:
            self.done.set()

    @property
    def steps_left(self) -> int | None:
        """How many steps all workers together have still to make; None if there is no limit."""
        total = self.worker.total_steps
        return None if total is None else max(0, total - self._steps_of_all)

    def average(self) -> torch.Tensor:
        """Return the mean of all workers' weights, as soon as nobody trains."""
        return self._mean(ending=False)[0]

    def finish(self) -> None:
        """Answer the others until all have finished, and take the mean."""
        all_end = False
        while not all_end:
            mean, all_end = self._mean(ending=True)
        self.weights.write(mean)

    def _mean(self, ending: bool) -> tuple[torch.Tensor, bool]:
        """Return the mean of the current workers' weights, and whether all workers are in ``finish``."""
        while self.answer():
            pass
        num_weights = self.weights.num_weights
        vector = self.weights.new(num_weights + 2).zero_()
        if self.is_current:
            self.weights.read(vector[:num_weights])
            vector[-2] = 1
        vector[-1] = ending
        self.add_up(vector)
        current, ended = vector[-2:].tolist()
        return vector[:num_weights].div_(current), ended == self.num_workers


def hosts_of(mesh: Mesh) -> list[list[int]]:
    """Return the workers of each host, by number."""
    group = group_mesh(mesh)
    names: list[str] = [""] * group.num_workers
    dist.all_gather_object(names, host_name(), group=group.group)
    hosts: dict[str, list[int]] = {}
    for worker, name in enumerate(names):
        hosts.setdefault(name, []).append(worker)
    return list(hosts.values())
