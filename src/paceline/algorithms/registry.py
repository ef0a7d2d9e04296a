"""How an algorithm becomes known: a decorator, a table, and one door through which only proofs come out.

An algorithm is a pure function of the collective and whole-number parameters. It knows no rates and no clock:
what depends on a cluster is passed in by :mod:`paceline.policy.planning`. Parameter names mean one thing each:

- ``pieces``: into how many parts each chunk of the plainest form is cut, for pipelining;
- ``late``: the rank that arrives last;
- ``arrivals``: for each rank, how many messages the first ranks could send before it arrives;
- ``hosts``: the host of each rank;
- ``chains``: how many roots multicast at the same time.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np

from paceline.errors import UnsupportedError, UsageError
from paceline.ir.collective import MAX_RANKS, ROOTED, Collective, Kind
from paceline.ir.schedule import MAX_MOVES, Schedule
from paceline.ir.transfers import Transfers
from paceline.ir.verify import Proof, verify

Draft = tuple[int, Transfers]
"""What an algorithm returns: the number of chunks, and the transfers."""


@dataclass(frozen=True)
class Algorithm:
    """A named algorithm. Calling it gives a schedule; :func:`prove` gives a proven one.

    ``multicast`` says that its transfers have many destinations, so it pays only where the network replicates packets.
    """

    name: str
    kinds: frozenset[Kind]
    min_ranks: int
    max_ranks: int
    num_moves: Callable[[Collective, int], int]
    draft: Callable[..., Draft]
    multicast: bool = False

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of what can be passed besides the collective."""
        return tuple(inspect.signature(self.draft).parameters)[1:]

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (self.draft.__doc__ or "").strip().partition("\n")[0]

    def serves(self, collective: Collective) -> bool:
        """Whether it has a schedule for this collective."""
        in_range = self.min_ranks <= collective.num_ranks <= self.max_ranks
        return collective.kind in self.kinds and in_range and self.num_moves(collective, 1) <= MAX_MOVES

    def check(self, collective: Collective, parameters: Mapping[str, Any]) -> None:
        """Raise UsageError unless the algorithm serves the collective and has these parameters."""
        if collective.kind not in self.kinds:
            kinds = ", ".join(sorted(self.kinds))
            raise UnsupportedError(f"{self.name} is an algorithm for {kinds}, not for {collective.kind}")
        if collective.num_ranks < self.min_ranks:
            raise UnsupportedError(f"{self.name} needs at least {self.min_ranks} ranks, not {collective.num_ranks}")
        if collective.num_ranks > self.max_ranks:
            raise UnsupportedError(f"{self.name} serves at most {self.max_ranks} ranks, not {collective.num_ranks}")
        for name, value in parameters.items():
            if name not in self.parameters:
                known = ", ".join(self.parameters) or "none"
                raise UsageError(f"{self.name} has no parameter {name!r}; its parameters: {known}")
            least = {"pieces": 1, "chains": 1, "late": 0}.get(name)
            if least is not None and (not isinstance(value, (int, np.integer)) or value < least):
                raise UsageError(f"{name} must be a whole number, {least} or more, not {value!r}")
        num_moves = self.num_moves(collective, parameters.get("pieces", 1))
        if num_moves > MAX_MOVES:
            raise UnsupportedError(
                f"{self.name} for {collective.num_ranks} ranks would move about {num_moves:.1e} chunks, and a schedule "
                f"moves at most {MAX_MOVES:.1e}: take fewer ranks or pieces"
            )

    def __call__(self, collective: Collective, **parameters: Any) -> Schedule:
        """Make the schedule."""
        self.check(collective, parameters)
        if collective.num_ranks == 1:
            return Schedule(collective, 1, Transfers.none(), self.name)
        num_chunks, transfers = self.draft(collective, **parameters)
        return Schedule(collective, num_chunks, transfers, self.name)


ALGORITHMS: dict[str, Algorithm] = {}
"""All algorithms by name, in the order of their registration."""


def _usual_moves(collective: Collective, pieces: int) -> int:
    """Trees for what has a root, and a chunk for each rank, everywhere, for the rest."""
    ranks = collective.num_ranks
    if collective.kind in ROOTED or collective.kind is Kind.BARRIER:
        return ranks * ranks.bit_length() * pieces
    return 2 * ranks * ranks * pieces


def algorithm(
    *kinds: Kind,
    min_ranks: int = 1,
    max_ranks: int = MAX_RANKS,
    num_moves: Callable[[Collective, int], int] = _usual_moves,
    multicast: bool = False,
) -> Callable[[Callable[..., Draft]], Algorithm]:
    """Register a function as an algorithm for these collectives, under its own name.

    ``num_moves(collective, pieces)`` says roughly how many chunks arrive somewhere, so that a schedule that is too
    large is refused before it is built. ``multicast`` says that its transfers have many destinations.
    """

    def register(draft: Callable[..., Draft]) -> Algorithm:
        taken = ALGORITHMS.get(draft.__name__)
        if taken is not None and taken.draft.__module__ != draft.__module__:
            raise UsageError(f"{draft.__name__} is taken by {taken.draft.__module__}: give your algorithm another name")
        entry = Algorithm(draft.__name__, frozenset(kinds), min_ranks, max_ranks, num_moves, draft, multicast)
        ALGORITHMS[entry.name] = entry
        return entry

    return register


def find(name: str) -> Algorithm:
    """The algorithm of this name."""
    if name not in ALGORITHMS:
        raise UsageError(f"there is no algorithm {name!r}; there are {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def serving(collective: Collective) -> list[Algorithm]:
    """All algorithms with a schedule for this collective."""
    return [entry for entry in ALGORITHMS.values() if entry.serves(collective)]


def build(name: str, collective: Collective, **parameters: Any) -> Schedule:
    """Make a schedule, which is not proven yet: to price it, or to look at it. Cached."""
    key = _key(name, collective, parameters)
    return _schedules.get(key, lambda: find(name)(collective, **parameters), size=_num_bytes)


def prove(name: str, collective: Collective, **parameters: Any) -> Proof:
    """Make and prove a schedule. Cached.

    >>> prove("stragglar", Collective(Kind.ALL_REDUCE, 8), late=3, pieces=4)
    """
    key = _key(name, collective, parameters)
    return _proofs.get(
        key, lambda: verify(build(name, collective, **parameters)), size=lambda proof: _num_bytes(proof.schedule)
    )


_Key = tuple[Algorithm, Collective, tuple[tuple[str, Any], ...]]
_T = TypeVar("_T")


def _key(name: str, collective: Collective, parameters: dict[str, Any]) -> _Key:
    lists = (list, np.ndarray)
    frozen = {name: tuple(value) if isinstance(value, lists) else value for name, value in parameters.items()}
    return find(name), collective, tuple(sorted(frozen.items()))


def _num_bytes(schedule: Schedule) -> int:
    return 40 * len(schedule.transfers.destination) + 1000


class _Cache(Generic[_T]):
    """The least recently used go first when all together have more bytes than a limit."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._entries: OrderedDict[_Key, tuple[_T, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: _Key, make: Callable[[], _T], size: Callable[[_T], int]) -> _T:
        """What was made for this key before, or what ``make`` makes now."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
        made = make()
        num_bytes = size(made)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = made, num_bytes
                self._bytes += num_bytes
            while self._bytes > self._most_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self._bytes -= freed
        return made


_schedules: _Cache[Schedule] = _Cache(most_bytes=256 << 20)
_proofs: _Cache[Proof] = _Cache(most_bytes=256 << 20)
