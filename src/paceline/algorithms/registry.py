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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.errors import UnsupportedError, UsageError
from paceline.ir.collective import Collective, Kind
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfers
from paceline.ir.verify import Proof, verify

Draft = tuple[int, Transfers]
"""What an algorithm returns: the number of chunks, and the transfers."""


@dataclass(frozen=True)
class Algorithm:
    """A named algorithm. Calling it gives a schedule; :func:`prove` gives a proven one."""

    name: str
    kinds: frozenset[Kind]
    min_ranks: int
    draft: Callable[..., Draft]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of what can be passed besides the collective."""
        return tuple(inspect.signature(self.draft).parameters)[1:]

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (self.draft.__doc__ or "").strip().partition("\n")[0]

    def serves(self, collective: Collective) -> bool:
        """Whether it has a schedule for this collective."""
        return collective.kind in self.kinds and (collective.num_ranks >= self.min_ranks)

    def __call__(self, collective: Collective, **parameters: Any) -> Schedule:
        """Make the schedule."""
        if collective.kind not in self.kinds:
            kinds = ", ".join(sorted(self.kinds))
            raise UnsupportedError(f"{self.name} is an algorithm for {kinds}, not for {collective.kind}")
        if collective.num_ranks < self.min_ranks:
            raise UnsupportedError(f"{self.name} needs at least {self.min_ranks} ranks, not {collective.num_ranks}")
        for name, value in parameters.items():
            if name not in self.parameters:
                known = ", ".join(self.parameters) or "none"
                raise UsageError(f"{self.name} has no parameter {name!r}; its parameters: {known}")
            if name in ("pieces", "chains") and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number, 1 or more, not {value!r}")
        if collective.num_ranks == 1:
            return Schedule(collective, 1, Transfers.none(), self.name)
        num_chunks, transfers = self.draft(collective, **parameters)
        return Schedule(collective, num_chunks, transfers, self.name)


ALGORITHMS: dict[str, Algorithm] = {}
"""All algorithms by name, in the order of their registration."""


def algorithm(*kinds: Kind, min_ranks: int = 1, name: str | None = None) -> Callable[[Callable[..., Draft]], Algorithm]:
    """Register a function as an algorithm for these collectives, under its own name unless told otherwise."""

    def register(draft: Callable[..., Draft]) -> Algorithm:
        entry = Algorithm(name or draft.__name__, frozenset(kinds), min_ranks, draft)
        ALGORITHMS[entry.name] = entry
        return entry

    return register


def find(name: str) -> Algorithm:
    """The algorithm of this name."""
    if name not in ALGORITHMS:
        raise UsageError(f"there is no algorithm {name!r}; there are {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


def serving(collective: Collective) -> Iterable[Algorithm]:
    """All algorithms with a schedule for this collective."""
    return [entry for entry in ALGORITHMS.values() if entry.serves(collective)]


@lru_cache(maxsize=32)
def _prove(entry: Algorithm, collective: Collective, parameters: tuple[tuple[str, Any], ...]) -> Proof:
    return verify(entry(collective, **dict(parameters)))


def prove(name: str, collective: Collective, **parameters: Any) -> Proof:
    """Make and prove a schedule; the same request is answered from a small cache.

    >>> prove("stragglar", Collective(Kind.ALL_REDUCE, 8), late=3, pieces=4)
    """
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in parameters.items()}
    return _prove(find(name), collective, tuple(sorted(frozen.items())))
