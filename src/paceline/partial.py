"""``paceline.partial_all_reduce``: some ranks of a group reduce a tensor, without a group of their own.

>>> paceline.partial_all_reduce(weights, members=[0, 3, 5])      # on ranks 0, 3 and 5; the others do not call it

On a Paceline group it is an operation of the engine: any ranks, any number of them at once, and what goes wrong with
one, be it a member that died, ends that operation on its members and leaves the group as it is. On any other backend
it runs over point-to-point messages.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from paceline import backend
from paceline.errors import UsageError
from paceline.executors import torch_p2p
from paceline.executors.handles import Beside
from paceline.executors.messages import MessageProgram, message_program
from paceline.ir.collective import Collective, Kind
from paceline.policy.select import cluster_of, select

_COUNTED = 1 << 62
"""From here on, numbers that were counted; below, those that callers gave."""

_TAGS = 1 << 29
"""Tags of messages, for as many operations; those of ``paceline.all_reduce`` begin at twice this."""


def partial_all_reduce(
    tensor: torch.Tensor,
    members: Iterable[int],
    op: Any = ReduceOp.AVG,
    group: dist.ProcessGroup | None = None,
    *,
    number: int | None = None,
    timeout: timedelta | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce the tensor in place among ``members``: ranks of the group, in any order. They alone call it.

    By default members find each other by the order of their calls: the third call of ranks 0, 3 and 5 on one of them
    belongs to the third on the others. If some members may give up a call that others make, give each operation a
    ``number`` below 2**62, the same on its members and never used again in this group. After ``timeout`` (by default,
    the group's) it ends with an error that names the missing ranks.

    With ``async_op`` it returns a handle with ``wait()``, ``is_completed()`` and ``get_future()``.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise UsageError("there is no process group: call torch.distributed.init_process_group first")
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise UsageError("this process is not in the process group: pass a group it belongs to")
    ranks = _checked(members, group)
    if number is not None and not 0 <= number < _COUNTED:
        raise UsageError(f"number is 0 or more and below 2**62, not {number}")
    team = _team(group)
    number = team.count(ranks) if number is None else number
    if backend.is_paceline(group):
        within = timedelta(milliseconds=-1) if timeout is None else timeout  # -1: the group's own
        return backend.of_group(group).partial_allreduce(tensor, ranks, number, op, within, async_op)
    act = team.prepare(tensor.detach(), ranks, torch_p2p.op_name(op), group, number)
    if async_op:
        return team.beside.start(act, tensor)
    with torch.no_grad():
        act()
    return None


def give_up(number: int, reason: str, group: dist.ProcessGroup | None = None) -> None:
    """End a partial operation on all its members with a reason, called yet or not. On Paceline's groups only."""
    backend.of_group(group).give_up(number, reason)


def _checked(members: Iterable[int], group: dist.ProcessGroup) -> tuple[int, ...]:
    ranks = tuple(sorted(members))
    size, rank = group.size(), dist.get_rank(group)
    if not ranks or ranks[0] < 0 or ranks[-1] >= size or len(set(ranks)) < len(ranks):
        raise UsageError(f"members are ranks of the group, 0 to {size - 1}, each once, not {list(ranks)}")
    if rank not in ranks:
        raise UsageError(f"rank {rank} is not one of the members {list(ranks)}: members alone call it")
    return ranks


class _Team:
    """What is kept for a group: how many calls each set of members has made, and on other backends programs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.calls: Counter[tuple[int, ...]] = Counter()
        self.programs: dict[tuple[int, int, int, bool], MessageProgram] = {}
        self.lock = threading.Lock()
        self.beside = Beside()

    def count(self, ranks: tuple[int, ...]) -> int:
        """A number for the next call of these members."""
        with self.lock:
            self.calls[ranks] += 1
            return _COUNTED + (zlib.crc32(repr(ranks).encode()) << 28) + self.calls[ranks] % (1 << 28)

    def program(self, ranks: tuple[int, ...], size_bytes: int, exact: bool) -> MessageProgram:
        """This rank's messages, made once for each number of members and power of two of the size.

        Nothing is known of hosts and links that the members alone could agree on: each counts as a host.
        """
        index, size_bytes = ranks.index(self.rank), 1 << max(size_bytes - 1, 0).bit_length()
        key = (len(ranks), index, size_bytes, exact)
        with self.lock:
            if key not in self.programs:
                cluster = cluster_of([str(rank) for rank in range(len(ranks))])
                chosen = select(Collective(Kind.ALL_REDUCE, len(ranks)), cluster, size_bytes, exact=exact)
                self.programs[key] = message_program(chosen.proof, index)
            return self.programs[key]

    def prepare(
        self, tensor: torch.Tensor, ranks: tuple[int, ...], op: str, group: dist.ProcessGroup, number: int
    ) -> Callable[[], None]:
        """The whole call, ready to run in any thread."""
        exact = not (tensor.is_floating_point() or tensor.is_complex()) or op in ("MIN", "MAX")
        program = self.program(ranks, tensor.numel() * tensor.element_size(), exact).among(ranks)
        wire = torch_p2p.GroupWire(group, _TAGS + number % _TAGS)

        return lambda: torch_p2p.reduce_in_place(program, tensor, op, exact, [wire])


_teams: WeakKeyDictionary[dist.ProcessGroup, _Team] = WeakKeyDictionary()


def _team(group: dist.ProcessGroup) -> _Team:
    if group not in _teams:
        _teams[group] = _Team(group)
    return _teams[group]
