"""The machines a collective runs on: hosts, their ports, the ranks on them, and how late each rank is.

The model is alpha-beta with ports: a message between two hosts takes ``latency`` plus its bytes over the
slower of the sender's up rate and the receiver's down rate; ranks of one host share its port. Messages inside
a host cost ``local_latency`` plus bytes over ``local_rate``. Each rank sends one message at a time and
receives one at a time.

A cluster comes from a preset name, a TOML or JSON file (the fields of :class:`Host`, times ``count``), or code::

    multicast = true                # do the switches replicate?

    [[hosts]]
    count = 8                       # eight like this one
    ranks = 4                       # ranks on each of them, or a list: [0, 5]
    up = "10Gbit/s"
    down = "10Gbit/s"
    latency = "30us"

    [late]                          # seconds behind the first rank
    3 = "500ms"
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.errors import FileFormatError, UsageError
from paceline.ir.collective import MAX_RANKS
from paceline.ir.reading import plain, read_at_most
from paceline.units import parse_duration, parse_rate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FloatArray = npt.NDArray[np.float64]

ETHERNET_WIRE_FACTOR = 1514 / 1448
"""Bytes on the wire a byte of payload: TCP over Ethernet at MTU 1500."""

LOCAL_RATE_BYTES_PER_S = 4e9
LOCAL_LATENCY_S = 5e-6
"""Ranks of one host, where nothing was measured: what a core copies, and what a frame costs."""

_MAX_CLUSTER_FILE_BYTES = 1 << 20
_LONGEST_S = 1e9
_MOST_DOTS = 50  # a TOML parser needs memory without measure for a key of thousands of dotted parts


@dataclass(frozen=True)
class Host:
    """One machine: its network port and what moves inside it. Rates are bytes a second."""

    up_bytes_per_s: float = 1.25e9
    down_bytes_per_s: float = 1.25e9
    latency_s: float = 30e-6
    local_bytes_per_s: float = 8e9
    local_latency_s: float = 2e-6

    def __post_init__(self) -> None:
        """Refuse rates and latencies that mean nothing."""
        rates = (self.up_bytes_per_s, self.down_bytes_per_s, self.local_bytes_per_s)
        if not all(1 <= rate <= 1e18 for rate in rates):
            raise UsageError(f"the rates of a host are 1 to 1e18 bytes a second, not {rates}")
        if not all(0 <= latency <= _LONGEST_S for latency in (self.latency_s, self.local_latency_s)):
            raise UsageError(f"the latencies of a host are 0 to {_LONGEST_S:g} seconds")


@dataclass(frozen=True)
class Cluster:
    """Hosts, the host of each rank, and the lateness of each rank in seconds (0 for all when left out).

    >>> Cluster.uniform(8, Host(up_bytes_per_s=62.5e6, down_bytes_per_s=62.5e6)).with_late({3: 0.5})
    """

    hosts: tuple[Host, ...]
    host_of: tuple[int, ...]
    late_s: tuple[float, ...] = ()
    name: str = "cluster"
    wire_factor: float = 1.0
    multicast: bool = False
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Check that ranks, hosts and lateness fit together."""
        if not 1 <= len(self.host_of) <= MAX_RANKS:
            raise UsageError(f"a cluster has 1 to {MAX_RANKS} ranks, not {len(self.host_of)}")
        if not self.late_s:
            object.__setattr__(self, "late_s", (0.0,) * len(self.host_of))
        if len(self.late_s) != len(self.host_of):
            raise UsageError(f"lateness is given for {len(self.late_s)} ranks of {len(self.host_of)}")
        if set(self.host_of) != set(range(len(self.hosts))):
            raise UsageError(f"each of the {len(self.hosts)} hosts needs at least one rank, and each rank a host")
        if not all(0 <= late <= _LONGEST_S for late in self.late_s):
            raise UsageError(f"lateness is 0 to {_LONGEST_S:g} seconds")
        if not 1 <= self.wire_factor <= 1000:
            raise UsageError(f"wire_factor is bytes on the wire a byte of payload, 1 to 1000, not {self.wire_factor}")

    @classmethod
    def uniform(cls, num_hosts: int, host: Host | None = None, *, ranks_per_host: int = 1, **fields: Any) -> Cluster:
        """Equal hosts with equally many ranks, in rank order."""
        if not 1 <= num_hosts * ranks_per_host <= MAX_RANKS:
            raise UsageError(f"a cluster has 1 to {MAX_RANKS} ranks, not {num_hosts * ranks_per_host}")
        host_of = tuple(rank // ranks_per_host for rank in range(num_hosts * ranks_per_host))
        return cls((host or Host(),) * num_hosts, host_of, **fields)

    @classmethod
    def preset(cls, name: str) -> Cluster:
        """One of :data:`PRESETS`."""
        if name not in PRESETS:
            raise UsageError(f"there is no cluster {name!r}; presets are {', '.join(PRESETS)}; or name a file")
        return PRESETS[name]()

    @classmethod
    def named(cls, name: str) -> Cluster:
        """One of :data:`PRESETS`, or the cluster of a .toml or .json file."""
        if name in PRESETS:
            return cls.preset(name)
        if Path(name).suffix in (".toml", ".json") or os.path.exists(name):
            return cls.load(name)
        raise UsageError(
            f"there is no cluster {name!r}: presets are {', '.join(PRESETS)}; or name a .toml or .json file"
        )

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """A cluster from a .toml or .json file."""
        path = Path(path)
        data = read_at_most(path, _MAX_CLUSTER_FILE_BYTES)
        try:
            text = data.decode()
            if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
                raise UsageError("a line has more dots than a cluster file needs")
            content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
            return cls.from_mapping(content, name=path.stem)
        except (ValueError, OverflowError, RecursionError) as error:
            raise FileFormatError(f"{path} is not a cluster file: {plain(str(error))}") from None

    @classmethod
    def from_mapping(cls, content: Mapping[str, Any], *, name: str = "cluster") -> Cluster:
        """A cluster from what a file says."""
        _only(content, {"name", "multicast", "wire_factor", "hosts", "late"}, "the top of the file")
        hosts: list[Host] = []
        members: list[list[int]] = []
        num_ranks = 0
        for entry in _typed(content, "hosts", list, []):
            host = _host(entry)
            for ranks in _ranks_of_hosts(entry, num_ranks):
                hosts.append(host)
                members.append(ranks)
                num_ranks += len(ranks)
        if not hosts:
            raise UsageError("there are no [[hosts]] in it")
        host_of = [host for rank, host in sorted((rank, h) for h, ranks in enumerate(members) for rank in ranks)]
        if sorted(rank for ranks in members for rank in ranks) != list(range(len(host_of))):
            raise UsageError(f"the hosts' lists of ranks must name each rank from 0 to {len(host_of) - 1} once")
        late = {}
        for rank, text in _typed(content, "late", dict, {}).items():
            if not str(rank).isdecimal() or not isinstance(text, str):
                raise UsageError(f'late takes a rank and a duration, like 3 = "500ms", not {rank!r} = {text!r}')
            late[int(rank)] = parse_duration(text)
        cluster = cls(
            tuple(hosts),
            tuple(host_of),
            name=plain(_typed(content, "name", str, name), 100),
            wire_factor=float(_typed(content, "wire_factor", (int, float), 1.0)),
            multicast=_typed(content, "multicast", bool, False),
        )
        return cluster.with_late(late)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.host_of)

    @property
    def last_arrival_s(self) -> float:
        """When the last rank arrives."""
        return max(self.late_s)

    def with_late(self, late_s: Mapping[int, float] | Sequence[float]) -> Cluster:
        """The same cluster with these ranks late; ranks not named keep their lateness."""
        if isinstance(late_s, Mapping):
            for rank in late_s:
                if not 0 <= rank < self.num_ranks:
                    raise UsageError(f"rank {rank} cannot be late: the ranks are 0 to {self.num_ranks - 1}")
            late_s = [late_s.get(rank, late) for rank, late in enumerate(self.late_s)]
        return replace(self, late_s=tuple(map(float, late_s)))

    def among(self, members: Sequence[int]) -> Cluster:
        """Some of the ranks, on their hosts, in this order."""
        kept = list(dict.fromkeys(self.host_of[rank] for rank in members))
        return replace(
            self,
            hosts=tuple(self.hosts[host] for host in kept),
            host_of=tuple(kept.index(self.host_of[rank]) for rank in members),
            late_s=tuple(self.late_s[rank] for rank in members),
        )

    def resized(self, num_ranks: int) -> Cluster:
        """The same kind of cluster with another number of ranks, for sweeps: hosts are added or dropped in turn.

        Lateness goes with the rank; the latest rank stays latest even when its number is dropped.
        """
        per_host = [self.host_of.count(host) for host in range(len(self.hosts))]
        hosts: list[Host] = []
        host_of: list[int] = []
        while len(host_of) < num_ranks:
            template = len(hosts) % len(self.hosts)
            host_of += [len(hosts)] * min(per_host[template], num_ranks - len(host_of))
            hosts.append(self.hosts[template])
        late = [*self.late_s[:num_ranks], *[0.0] * (num_ranks - self.num_ranks)]
        if max(late) < self.last_arrival_s:
            late[-1] = self.last_arrival_s
        return replace(self, hosts=tuple(hosts), host_of=tuple(host_of), late_s=tuple(late))

    @cached_property
    def arrays(self) -> ClusterArrays:
        """The same facts per rank, as arrays, wire overhead included."""
        hosts = [self.hosts[host] for host in self.host_of]
        return ClusterArrays(
            host=np.array(self.host_of, np.int64),
            up=np.array([host.up_bytes_per_s for host in hosts]) / self.wire_factor,
            down=np.array([host.down_bytes_per_s for host in hosts]) / self.wire_factor,
            latency=np.array([host.latency_s for host in hosts]),
            local_rate=np.array([host.local_bytes_per_s for host in hosts]),
            local_latency=np.array([host.local_latency_s for host in hosts]),
            arrival=np.array(self.late_s, np.float64),
        )


@dataclass(frozen=True)
class ClusterArrays:
    """One entry a rank; rates in payload bytes a second."""

    host: npt.NDArray[np.int64]
    up: FloatArray
    down: FloatArray
    latency: FloatArray
    local_rate: FloatArray
    local_latency: FloatArray
    arrival: FloatArray


def _ranks_of_hosts(entry: Mapping[str, Any], first: int) -> list[list[int]]:
    """The ranks of each host that an entry stands for: given by number, they follow on those before."""
    count, ranks = _typed(entry, "count", int, 1), _typed(entry, "ranks", (int, list), 1)
    if isinstance(ranks, list):
        if count != 1 or not all(isinstance(rank, int) for rank in ranks):
            raise UsageError("ranks is a number or a list of rank numbers, and a list is for one host only")
        return [ranks]
    if count < 1 or ranks < 1 or first + count * ranks > MAX_RANKS:
        raise UsageError(f"count and ranks are at least 1, and a cluster has at most {MAX_RANKS} ranks")
    return [list(range(first + host * ranks, first + (host + 1) * ranks)) for host in range(count)]


def _host(entry: Mapping[str, Any]) -> Host:
    _only(entry, {"count", "ranks", *_HOST_KEYS}, "[[hosts]]")
    values = {field: parse(_typed(entry, key, str, "")) for key, (field, parse) in _HOST_KEYS.items() if key in entry}
    return Host(**values)


_HOST_KEYS: dict[str, tuple[str, Callable[[str], float]]] = {
    "up": ("up_bytes_per_s", parse_rate),
    "down": ("down_bytes_per_s", parse_rate),
    "latency": ("latency_s", parse_duration),
    "local": ("local_bytes_per_s", parse_rate),
    "local_latency": ("local_latency_s", parse_duration),
}
"""How a file names the fields of a host, and how it writes them."""


def _only(content: Mapping[str, Any], known: set[str], where: str) -> None:
    if not isinstance(content, Mapping):
        raise UsageError(f"{where} must be a table of names and values")
    unknown = sorted(set(content) - known)
    if unknown:
        raise UsageError(f"{where} has no {unknown[0]!r}; it knows {', '.join(sorted(known))}")


def _typed(content: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any) -> Any:
    value = content.get(key, default)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)
        raise UsageError(f"{key} must be of type {names}, not {value!r:.100}")
    return value


def _lan(num_hosts: int, up: str, down: str, name: str, note: str, *, ranks_per_host: int = 1) -> Callable[[], Cluster]:
    host = Host(parse_rate(up), parse_rate(down), 100e-6, LOCAL_RATE_BYTES_PER_S, LOCAL_LATENCY_S)
    fixed: dict[str, Any] = {"name": name, "note": note, "wire_factor": ETHERNET_WIRE_FACTOR, "multicast": True}
    fixed["ranks_per_host"] = ranks_per_host
    return lambda: Cluster.uniform(num_hosts, host, **fixed)


_SHARED = "1 Gbit/s each way; 4 GB/s and 5 us a message inside a host are assumed"

PRESETS: dict[str, Callable[[], Cluster]] = {
    "lan8": _lan(8, "500mbit", "500mbit", "lan8", "the lab: 8 hosts, 500 Mbit/s each way"),
    "lan4": _lan(4, "1gbit", "1gbit", "lan4", "the lab: 4 hosts, 1 Gbit/s each way"),
    "uplink8": _lan(8, "100mbit", "500mbit", "uplink8", "the lab: 8 hosts, 100 Mbit/s up and 500 down"),
    "lan4x2": _lan(4, "1gbit", "1gbit", "lan4x2", f"the lab: 4 hosts of 2 ranks, {_SHARED}", ranks_per_host=2),
    "lan2x4": _lan(2, "1gbit", "1gbit", "lan2x4", f"the lab: 2 hosts of 4 ranks, {_SHARED}", ranks_per_host=4),
    "gpu8": lambda: Cluster.uniform(
        1,
        Host(local_bytes_per_s=450e9, local_latency_s=5e-6),
        ranks_per_host=8,
        name="gpu8",
        note="8 GPUs in a server; 450 GB/s each way and 5 us a message are assumed",
    ),
    "eth64": lambda: Cluster.uniform(
        16,
        Host(1.25e9, 1.25e9, latency_s=50e-6, local_bytes_per_s=10e9, local_latency_s=10e-6),
        ranks_per_host=4,
        name="eth64",
        wire_factor=ETHERNET_WIRE_FACTOR,
        note="64 ranks on 16 hosts with 10 GbE; latencies are assumed",
    ),
    "fattree188": lambda: Cluster.uniform(
        188,
        Host(7e9, 7e9, latency_s=2e-6),
        name="fattree188",
        multicast=True,
        note="188 hosts on a fat tree without contention; 56 Gbit/s and 2 us are assumed",
    ),
}
"""Named clusters. The lab's rates are set by the lab; what is assumed is said in the note."""
