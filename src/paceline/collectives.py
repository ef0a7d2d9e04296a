"""``paceline.all_reduce``: Paceline's schedules in a process group of any backend.

>>> paceline.all_reduce(gradient, late=3)                   # rank 3 keeps arriving after the others
>>> paceline.all_reduce(gradient, late={3: 0.2, 5: 0.4})    # seconds after the others
>>> work = paceline.all_reduce(gradient, async_op=True)

Every rank of the group calls it with the same arguments, as with any collective; ``late`` too. Where they differ, no
sum is wrong: messages of different schedules do not meet, and at the group's timeout an error says what each called.
"""

from __future__ import annotations

import math
import socket
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import PrefixStore

from paceline.config import Config
from paceline.errors import MessageError, UsageError
from paceline.executors import torch_p2p
from paceline.executors.handles import Beside, Pending
from paceline.executors.messages import MessageProgram, message_program
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective, Kind
from paceline.policy.planning import late_enough_s
from paceline.policy.select import cluster_of, select

Late: TypeAlias = int | Iterable[int] | Mapping[int, float] | None
"""Who arrives after the others, by rank of the group; a mapping says by how many seconds."""

_MOST_PROGRAMS = 256

_MOST_PARTS, _PART_BYTES = 4, 16 << 20
"""A large buffer in processor memory is reduced in parts side by side, of at least so many bytes: faster on Gloo, by a
guess because one part keeps the links busy while another waits for a message."""

_TAGS = 1 << 30
_CALLS_TOLD_APART = 1 << 10
_DIAGNOSIS_S = 2.0


def all_reduce(
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    late: Late = None,
    algorithm: str | None = None,
    async_op: bool = False,
) -> Pending | None:
    """Reduce the tensor in place, so that all ranks of the group have the same result, bit for bit.

    ``late`` names ranks *of the group* that arrive after the others: one, several, or a mapping to seconds. The others
    then do what they can without them before they come. Without it the algorithm is the cheapest for ranks that come
    together. Either way the price decides, on links of ``PACELINE_RATE`` and ``PACELINE_LATENCY`` (by default, those
    of 10 Gbit/s Ethernet); ``algorithm`` (or ``PACELINE_ALGORITHM``) names one instead.

    The first call in a group waits for all of its ranks, to learn who is on which host. With ``async_op`` it returns a
    handle with ``wait()``, ``is_completed()`` and ``get_future()``.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise UsageError("there is no process group: call torch.distributed.init_process_group first")
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise UsageError("this process is not in the process group: pass a group it belongs to")
    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor of layout {tensor.layout} cannot be reduced: make it dense with to_dense()")
    name = torch_p2p.op_name(op)
    late_s = read_late(late, group.size())
    state = _state(group)
    act = state.prepare(tensor.detach(), name, group, late_s, algorithm)
    if async_op:
        return state.beside.start(act, tensor)
    with torch.no_grad():
        act()
    return None


def read_late(late: Late, num_ranks: int) -> dict[int, float]:
    """Seconds by rank, infinite where none are said; nonsense gets a sentence."""
    if late is None:
        return {}
    given = isinstance(late, Mapping)
    if isinstance(late, Mapping):
        pairs = list(late.items())
    else:
        ranks = [late] if isinstance(late, int) else list(late)
        pairs = [(rank, math.inf) for rank in ranks]
    found: dict[int, float] = {}
    for rank, seconds in pairs:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < num_ranks:
            raise UsageError(f"late names ranks of the group, 0 to {num_ranks - 1}, and {rank!r} is none")
        if rank in found:
            raise UsageError(f"late names rank {rank} twice")
        if not isinstance(seconds, (int, float)) or not seconds >= 0 or (given and math.isinf(seconds)):
            raise UsageError(f"rank {rank} is late by seconds, 0 or more, not {seconds!r}")
        found[rank] = float(seconds)
    found = {rank: seconds for rank, seconds in found.items() if seconds > 0}
    if len(found) == num_ranks:
        raise UsageError(f"all {num_ranks} ranks are late, which is the same as none: name those who follow the others")
    return found


class _State:
    """What is kept for a group: its cluster, programs made so far, and how many calls there were."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), group.size()
        config = Config.from_environment()
        said: list[Any] = [(socket.gethostname(), config.shared)]
        if self.num_ranks > 1:
            said = [None] * self.num_ranks
            dist.all_gather_object(said, (socket.gethostname(), config.shared), group=group)
        hosts = [host for host, _ in said]
        config = config.following(said[0][1])
        self.deterministic = config.deterministic
        self.wanted = config.algorithms
        self.cluster: Cluster = cluster_of(hosts, rate_bytes_per_s=config.rate_bytes_per_s, latency_s=config.latency_s)
        self.programs: dict[tuple[Any, ...], MessageProgram] = {}
        self.calls = 0
        self.lock = threading.Lock()
        self.beside = Beside()

    def program(
        self, size_bytes: int, exact: bool, late_s: Mapping[int, float], algorithm: str | None
    ) -> MessageProgram:
        """This rank's messages, made once for each power of two of the size and each lateness."""
        size_bytes = 1 << max(size_bytes - 1, 0).bit_length()
        key = (size_bytes, exact, tuple(sorted(late_s.items())), algorithm)
        with self.lock:
            if key not in self.programs:
                collective = Collective(Kind.ALL_REDUCE, self.num_ranks)
                enough_s = late_enough_s(collective, self.cluster, size_bytes)
                seconds = {rank: enough_s if math.isinf(late) else late for rank, late in late_s.items()}
                wanted: Mapping[Kind | None, str] = {Kind.ALL_REDUCE: algorithm} if algorithm else self.wanted
                chosen = select(collective, self.cluster.with_late(seconds), size_bytes, exact=exact, wanted=wanted)
                if len(self.programs) == _MOST_PROGRAMS:
                    self.programs.pop(next(iter(self.programs)))
                self.programs[key] = message_program(chosen.proof, self.rank)
            return self.programs[key]

    def prepare(
        self,
        tensor: torch.Tensor,
        op: str,
        group: dist.ProcessGroup,
        late_s: Mapping[int, float],
        algorithm: str | None,
    ) -> Callable[[], None]:
        """The whole call, ready to run in any thread; its number in the group is taken now."""
        exact = not (tensor.is_floating_point() or tensor.is_complex()) or op in ("MIN", "MAX")
        size_bytes = tensor.numel() * tensor.element_size()
        parts = max(1, min(_MOST_PARTS, size_bytes // _PART_BYTES)) if tensor.device.type == "cpu" else 1
        program = self.program(size_bytes // parts, exact, late_s, algorithm)
        with self.lock:
            self.calls += 1
            call = self.calls
        told = f"{program.algorithm} of {tensor.numel()} {tensor.dtype}, {op}, {_late_words(late_s)}"
        per_call = _TAGS // _CALLS_TOLD_APART
        sameness = zlib.crc32(f"{told} {program.digest}".encode()) % (per_call // _MOST_PARTS)
        tag = _TAGS + call % _CALLS_TOLD_APART * per_call + sameness * _MOST_PARTS
        wires = [torch_p2p.GroupWire(group, tag + part) for part in range(parts)]

        def act() -> None:
            try:
                torch_p2p.reduce_in_place(program, tensor, op, exact, wires)
            except MessageError as error:
                raise _explained(error, group, call, told) from error

        return act


def deterministic(group: dist.ProcessGroup) -> bool:
    """Whether no decision may depend on timing, by the settings of rank 0. Every rank of the group must call it."""
    return _state(group).deterministic


_states: WeakKeyDictionary[dist.ProcessGroup, _State] = WeakKeyDictionary()


def _state(group: dist.ProcessGroup) -> _State:
    if group not in _states:
        _states[group] = _State(group)
    return _states[group]


def _late_words(late_s: Mapping[int, float]) -> str:
    if not late_s:
        return "nobody late"
    said = [f"{rank}" if math.isinf(late) else f"{rank} by {late:g} s" for rank, late in sorted(late_s.items())]
    return f"late: {', '.join(said)}"


def _explained(error: MessageError, group: dist.ProcessGroup, call: int, told: str) -> Exception:
    """The error, or a better one if the ranks have not called the same."""
    rank, ranks = dist.get_rank(group), range(group.size())
    calls: dict[int, str] = {}
    with suppress(Exception):  # the store may be gone with its rank, and then nobody knows better
        store = PrefixStore(f"paceline/{call}", group.get_group_store())
        store.set(str(rank), told)
        with suppress(Exception):
            store.wait([str(other) for other in ranks], timedelta(seconds=_DIAGNOSIS_S))
        calls = {other: store.get(str(other)).decode() for other in ranks if store.check([str(other)])}
    if len(set(calls.values())) < 2:
        return error
    said = "; ".join(f"rank {other}: {words}" for other, words in calls.items())
    return UsageError(f"call {call} of paceline.all_reduce in this group is not the same on all ranks: {said}")
