"""What the links between the hosts of a group can do: measured once for each set of hosts, agreed by all ranks.

The first rank of each host sends to the first rank of the next one while it receives from the one before: one byte for
the latency, half a megabyte for the rate, all hosts at the same time, as a collective would. Rank 0 collects what they
saw and publishes it, so that every rank decides by the same numbers. Later groups of the same hosts, or of some of
them, use these numbers again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import msgspec

_LATENCY_ROUNDS = 5
_RATE_ROUNDS = 2
_RATE_BYTES = 1 << 19

Exchange = Callable[[int, int, int], float]
"""``exchange(to, source, num_bytes)``: send to one rank and receive from another; seconds until both are done."""


class Store(Protocol):
    """What is used of torch.distributed's store."""

    def set(self, key: str, value: str) -> object:
        """Publish."""

    def get(self, key: str) -> bytes:
        """Read; waits until it is there."""


@dataclass(frozen=True)
class Links:
    """The latency of a message in seconds, and for each rank the rate of its host in bytes a second."""

    latency_s: float
    rate_bytes_per_s: tuple[float, ...]


class KnownLinks:
    """What a process has learned of hosts: of each, the latency of a message and its rate in bytes a second."""

    def __init__(self, of_host: Mapping[str, tuple[float, float]] | None = None) -> None:
        self._of_host = dict(of_host or {})

    def learn(self, hosts: Sequence[str], links: Links) -> None:
        """Keep what was found for the hosts of a group, given for each rank."""
        for host, rate_bytes_per_s in zip(hosts, links.rate_bytes_per_s, strict=True):
            self._of_host[host] = (links.latency_s, rate_bytes_per_s)

    def of(self, hosts: Sequence[str]) -> Links | None:
        """The links of a group's hosts, given for each rank; None unless all are known."""
        if not all(host in self._of_host for host in hosts):
            return None
        latency_s = median(self._of_host[host][0] for host in dict.fromkeys(hosts))
        return Links(latency_s, tuple(self._of_host[host][1] for host in hosts))

    def encode(self) -> str:
        """As text, for other ranks; empty where nothing is known."""
        return msgspec.json.encode(self._of_host).decode() if self._of_host else ""

    @classmethod
    def decode(cls, text: str) -> KnownLinks:
        """What another rank has encoded."""
        return cls(msgspec.json.decode(text, type=dict[str, tuple[float, float]]) if text else {})


def measure(rank: int, hosts: Sequence[str], exchange: Exchange, store: Store) -> Links:
    """What the links can do, by measuring; every rank of the group calls it at the same point."""
    leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if rank in leaders:
        place = leaders.index(rank)
        to, source = leaders[(place + 1) % len(leaders)], leaders[place - 1]
        exchange(to, source, 1)  # opens the connections
        latency_s = min(exchange(to, source, 1) for _ in range(_LATENCY_ROUNDS))
        transfer_s = min(exchange(to, source, _RATE_BYTES) for _ in range(_RATE_ROUNDS))
        seen = (latency_s, _RATE_BYTES / max(transfer_s - latency_s, 1e-6))
        store.set(f"links/{rank}", msgspec.json.encode(seen).decode())
    if rank == 0:
        told = [msgspec.json.decode(store.get(f"links/{leader}"), type=tuple[float, float]) for leader in leaders]
        rate_of = {hosts[leader]: rate for leader, (_, rate) in zip(leaders, told, strict=True)}
        links = Links(median(latency for latency, _ in told), tuple(rate_of[host] for host in hosts))
        store.set("links", msgspec.json.encode(links).decode())
    return msgspec.json.decode(store.get("links"), type=Links)
