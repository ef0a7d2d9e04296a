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
        """Leave the group."""
        dist.destroy_process_group(self.group)


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
