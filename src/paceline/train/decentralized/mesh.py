"""Adds vectors up among some of the workers: what every scheme is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from paceline import backend, partial


class Mesh(ABC):
    """The workers that this one can reach, by number. Any thread may call these, several at once."""

    worker: int
    """This worker's number."""
    address: str = ""
    """Where others reach it, if they do not know."""

    @abstractmethod
    def reduce(
        self,
        vector: torch.Tensor,
        members: Sequence[int],
        number: int,
        *,
        mean: bool = True,
        addresses: Mapping[int, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Make a vector the members' mean, or sum, in place.

        All members call it with the same ``number``, below 2**61 and used once. An error names the member that was
        lost or did not come; then the vector may hold anything.
        """

    @abstractmethod
    def give_up(self, number: int, reason: str) -> None:
        """End an operation on all its members, called yet or not, where the backend can."""

    @abstractmethod
    def close(self) -> None:
        """Part from the others. No operation may be under way."""

    def join(self, worker: int) -> None:  # noqa: B027  # ranks of a group have their numbers
        """Take the number that the generator has given this worker."""


class GroupMesh(Mesh):
    """The ranks of a process group with any backend. On Paceline's the loss of a rank leaves the others as they are."""

    def __init__(self, parent: Any) -> None:
        self.parent = parent
        self.group = twin(parent, "decentralized")
        self.worker = dist.get_rank(parent)
        self.num_workers = dist.get_world_size(parent)
        self._ours = backend.is_paceline(self.group)

    def reduce(
        self,
        vector: torch.Tensor,
        members: Sequence[int],
        number: int,
        *,
        mean: bool = True,
        addresses: Mapping[int, str] | None = None,  # noqa: ARG002  # ranks know each other
        timeout_s: float = 60.0,
    ) -> None:
        """Make a vector the members' mean, or sum, in place."""
        if len(members) > 1:
            within = timedelta(seconds=timeout_s)
            op = ReduceOp.AVG if mean else ReduceOp.SUM
            partial.partial_all_reduce(vector, members, op, self.group, number=number, timeout=within)

    def give_up(self, number: int, reason: str) -> None:
        """End an operation on all its members, on Paceline's groups."""
        if self._ours:
            partial.give_up(number, reason, self.group)

    def close(self) -> None:
        """Leave the group, unless it went with the default group."""
        if dist.is_initialized() and self.group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.group)


class OpenMesh(Mesh):
    """Workers that come and go, with no process group: the generator tells where each is. CPU tensors only."""

    def __init__(self, secret: bytes, capacity: int) -> None:
        self.worker = -1
        self.address = backend.open_address()
        self._secret, self._capacity = secret, capacity
        self._place: Any = None

    def join(self, worker: int) -> None:
        """Take the number that the generator has given this worker."""
        if worker != self.worker:
            self.close()
            self._place = backend.open_group(self._secret, worker, self._capacity, timedelta(minutes=5))
            self.worker = worker

    def reduce(
        self,
        vector: torch.Tensor,
        members: Sequence[int],
        number: int,
        *,
        mean: bool = True,
        addresses: Mapping[int, str] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """Make a vector the members' mean, or sum, in place."""
        for member, address in (addresses or {}).items():
            if member != self.worker:
                self._place.introduce(member, address)
        if len(members) > 1:
            op = ReduceOp(ReduceOp.AVG if mean else ReduceOp.SUM)
            within = timedelta(seconds=timeout_s)
            self._place.partial_allreduce(vector, list(members), number, op, within, asynchronous=False)

    def give_up(self, number: int, reason: str) -> None:
        """End an operation on all its members."""
        if self._place is not None:
            self._place.give_up(number, reason)

    def close(self) -> None:
        """Part from the others."""
        if self._place is not None:
            self._place.leave()
            self._place = None


def twin(parent: Any, purpose: str) -> Any:
    """Return a new group with a group's ranks and backend, for traffic that must not queue behind the user's."""
    return new_group(parent, dist.get_process_group_ranks(parent), purpose)


def new_group(parent: Any, ranks: Sequence[int], purpose: str, timeout: timedelta | None = None) -> Any:
    """Return a new group of some of a group's ranks, given by their global numbers; all ranks of the parent call it.

    A rank that is not in it gets None, or a group of itself alone. Where all ranks of the job call, torch numbers
    groups, so that a name is never used twice: Gloo needs that. Elsewhere it names a group by its ranks and by how many
    groups the process has, so all must have equally many.
    """
    everybody = dist.get_world_size(parent) == dist.get_world_size()
    if not everybody and dist.get_rank() not in ranks:
        ranks = [dist.get_rank()]
    group = dist.new_group(
        list(ranks),
        timeout=timeout,
        backend=dist.get_backend_config(parent),
        use_local_synchronization=not everybody,
        group_desc=f"paceline {purpose}",
        sort_ranks=False,
    )
    return None if group == dist.GroupMember.NON_GROUP_MEMBER else group
