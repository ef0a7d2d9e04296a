"""What the links between the hosts of a group can do: measured once for each set of hosts, agreed by all ranks.

The first rank of each host sends to the first rank of the next one while it receives from the one before: one byte for
the latency, half a megabyte for the rate, all hosts at the same time, as a collective would. Rank 0 collects what they
saw and publishes it, so that every rank decides by the same numbers. Later groups of the same hosts, or of some of
them, use these numbers again.

A rate found like this is the slower one of sending and receiving. Multicast needs to know what a host can receive from
several at once. So where it is wanted, hosts also take turns in receiving from up to seven others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import msgspec

_LATENCY_ROUNDS = 5
_RATE_ROUNDS = 2
_RATE_BYTES = 1 << 19

_DOWN_BYTES = 1 << 20
"""From all senders together. More than above: here a rate that is too high would be paid for with lost packets."""

_MOST_SENDERS = 7
"""So many hosts at most send to one at the same time: more connections would be opened for this alone."""

Exchange = Callable[[int, int, int], float]
"""``exchange(to, source, num_bytes)``: send to one rank and receive from another; seconds until both are done.

Nothing is sent to, or received from, rank -1 (``NOBODY``).
"""

NOBODY = -1


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def set(self, key: str, value: str) -> object:
        """Publish."""

    def get(self, key: str) -> bytes:
        """Read; waits until it is there."""


@dataclass(frozen=True)
class Links:
    """The latency of a message in seconds, and for each rank the rate of its host in bytes a second.

    ``down_bytes_per_s`` is what the host can receive from several at once; empty where that was not measured.
    """

    latency_s: float
    rate_bytes_per_s: tuple[float, ...]
    down_bytes_per_s: tuple[float, ...] = ()


class KnownLinks:
    """What a process has learned of hosts: of each, the latency of a message and its rates in bytes a second.

    The second rate is that of receiving from several hosts; 0 where it was not measured.
    """

    def __init__(self, of_host: Mapping[str, tuple[float, float, float]] | None = None) -> None:
        self._of_host = dict(of_host or {})

    def learn(self, hosts: Sequence[str], links: Links) -> None:
        """Keep what was found for the hosts of a group, given for each rank."""
        down_bytes_per_s = links.down_bytes_per_s or (0.0,) * len(hosts)
        for host, *rates in zip(hosts, links.rate_bytes_per_s, down_bytes_per_s, strict=True):
            self._of_host[host] = (links.latency_s, rates[0], rates[1])

    def of(self, hosts: Sequence[str], *, down: bool = False) -> Links | None:
        """The links of a group's hosts, given for each rank; None unless all are known, with ``down`` in full."""
        if not all(host in self._of_host for host in hosts):
            return None
        latency_s = median(self._of_host[host][0] for host in dict.fromkeys(hosts))
        rates, down_rates = (tuple(self._of_host[host][column] for host in hosts) for column in (1, 2))
        complete = min(down_rates) > 0
        return None if down and not complete else Links(latency_s, rates, down_rates if complete else ())

    def encode(self) -> str:
        """As text, for other ranks; empty where nothing is known."""
        return msgspec.json.encode(self._of_host).decode() if self._of_host else ""

    @classmethod
    def decode(cls, text: str) -> KnownLinks:
        """What another rank has encoded."""
        return cls(msgspec.json.decode(text, type=dict[str, tuple[float, float, float]]) if text else {})


def measure(rank: int, hosts: Sequence[str], exchange: Exchange, store: Store, *, down: bool = False) -> Links:
    """What the links can do, by measuring; every rank of the group calls it at the same point.

    ``down`` has it measure what each host can receive from several others, too.
    """
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if rank in leaders:
        place = leaders.index(rank)
        to, source = leaders[(place + 1) % len(leaders)], leaders[place - 1]
        exchange(to, source, 1)  # opens the connections
        latency_s = min(exchange(to, source, 1) for _ in range(_LATENCY_ROUNDS))
        transfer_s = min(exchange(to, source, _RATE_BYTES) for _ in range(_RATE_ROUNDS))
        rate_bytes_per_s = _RATE_BYTES / max(transfer_s - latency_s, 1e-6)
        down_bytes_per_s = max(rate_bytes_per_s, _measure_down(place, leaders, exchange)) if down else 0.0
        seen = (latency_s, rate_bytes_per_s, down_bytes_per_s)
        store.set(f"links/{rank}", msgspec.json.encode(seen).decode())
    if rank == 0:
        seen_by = tuple[float, float, float]
        told = {hosts[leader]: msgspec.json.decode(store.get(f"links/{leader}"), type=seen_by) for leader in leaders}
        latency_s = median(latency_s for latency_s, _, _ in told.values())
        rates, down_rates = (tuple(told[host][column] for host in hosts) for column in (1, 2))
        links = Links(latency_s, rates, down_rates if down else ())
        store.set("links", msgspec.json.encode(links).decode())
    return msgspec.json.decode(store.get("links"), type=Links)


def _measure_down(place: int, leaders: Sequence[int], exchange: Exchange) -> float:
    """Bytes a second that this leader, at this place among them, can receive from several at once.

    Leaders form parties of at most ``_MOST_SENDERS`` + 1. In each, one after the other receives from all the rest. The
    start counts, so what is found is rather too low.
    """
    num_parties = -(-len(leaders) // (_MOST_SENDERS + 1))
    party = leaders[place % num_parties :: num_parties]
    senders = [leader for leader in party if leader != leaders[place]]
    turns = [1, *[_DOWN_BYTES // len(senders)] * _RATE_ROUNDS]  # the first opens the connections
    found = 0.0
    for receiver in party:
        if receiver == leaders[place]:
            with ThreadPoolExecutor(len(senders)) as pool:
                times_s = [_receive_from_all(senders, num_bytes, exchange, pool) for num_bytes in turns]
            found = turns[-1] * len(senders) / max(min(times_s[1:]), 1e-6)
            continue
        for num_bytes in turns:
            exchange(NOBODY, receiver, 1)  # it is ready
            exchange(receiver, NOBODY, num_bytes)
    return found


def _receive_from_all(senders: Sequence[int], num_bytes: int, exchange: Exchange, pool: Executor) -> float:
    """Seconds until all of them, told to begin, have sent so many bytes each."""
    began_s = time.perf_counter()
    list(pool.map(lambda sender: exchange(sender, NOBODY, 1), senders))
    list(pool.map(lambda sender: exchange(NOBODY, sender, num_bytes), senders))
    return time.perf_counter() - began_s
