"""A lab: a cluster's hosts on this machine, with the cluster's rates on their links.

    with Lab.preset("lan8", late={3: 0.5}) as lab:
        worst = lab.run(["python", "train.py"])          # once a rank, as torchrun would start it
        server = lab.hosts[0].popen(["python", "server.py"])
        lab.cut(5)                                       # host 5 loses its link

A host runs one rank or several. Ranks of one host share its memory and its link.
Everything started in a lab ends with it, and the lab ends with this process, however that ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from paceline.errors import LabError, UsageError
from paceline.ir.cluster import ETHERNET_WIRE_FACTOR, LOCAL_LATENCY_S, LOCAL_RATE_BYTES_PER_S, Cluster, Host
from paceline.lab import links
from paceline.lab.available import require
from paceline.lab.hosts import LabHost, LabRank
from paceline.lab.lateness import VARIABLE, format_late
from paceline.lab.namespaces import Popen
from paceline.lab.network import Network, PortBytes
from paceline.lab.running import run_everywhere
from paceline.units import parse_rate

MAX_HOSTS = 254
MAX_RANKS = 256
"""Each rank is a process on this machine."""

MASTER_PORT = 29500
_LATENCY_S = 100e-6  # what the presets of the lab assume, too


class Lab:
    """Emulated hosts, joined by a switch; use it in a ``with`` statement.

    ``hosts``, ``up``, ``down`` (like "500mbit", or bytes a second) and ``ranks_per_host`` describe equal hosts, whose
    ranks are numbered host by host; ``cluster`` describes any instead of them. ``loss`` is the share of packets lost on
    the way to a host; ``late`` says by how many seconds a rank is late, for programs that ask
    :func:`paceline.lab.late_s`.
    """

    def __init__(
        self,
        hosts: int = 8,
        up: str | float = "500mbit",
        down: str | float = "500mbit",
        *,
        ranks_per_host: int = 1,
        loss: float = 0.0,
        late: Mapping[int, float] | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        if cluster is None:
            cluster = _equal_hosts(hosts, ranks_per_host, _rate(up), _rate(down))
        elif ranks_per_host != 1:
            raise UsageError(f"{cluster.name} says how many ranks its hosts have; leave ranks_per_host out")
        elif len(cluster.hosts) > MAX_HOSTS or cluster.num_ranks > MAX_RANKS:
            raise UsageError(
                f"{cluster.name} has {len(cluster.hosts)} hosts with {cluster.num_ranks} ranks in all, and a lab at "
                f"most {MAX_HOSTS} hosts with {MAX_RANKS} ranks; take fewer"
            )
        if not 0 <= loss < 1:
            raise UsageError(f"loss is a share of the packets, from 0 to less than 1, not {loss}")
        self.cluster = cluster.with_late(late or {})
        self.loss = loss
        self._members = tuple(  # the ranks of each host
            tuple(rank for rank, host in enumerate(cluster.host_of) if host == number)
            for number in range(len(cluster.hosts))
        )
        self._hosts: tuple[LabHost, ...] = ()
        self._ranks: tuple[LabRank, ...] = ()
        self._network: Network | None = None
        self._started: list[Popen] = []
        self._starting = threading.Lock()

    @classmethod
    def preset(cls, name: str, *, loss: float = 0.0, late: Mapping[int, float] | None = None) -> Lab:
        """The lab of a cluster preset: lan8, lan4, uplink8, lan4x2 or lan2x4."""
        return cls(cluster=Cluster.preset(name), loss=loss, late=late)

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """The hosts, in order of their numbers."""
        self._running()
        return self._hosts

    @property
    def ranks(self) -> tuple[LabRank, ...]:
        """The ranks, in order of their numbers."""
        self._running()
        return self._ranks

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set for this rank, the interface to use, and who is late. Merge it with os.environ."""
        if not 0 <= rank < self.cluster.num_ranks:
            raise UsageError(f"the lab has no rank {rank}; its ranks are 0 to {self.cluster.num_ranks - 1}")
        host_of, num_ranks = self.cluster.host_of, str(self.cluster.num_ranks)
        neighbours = self._members[host_of[rank]]
        return {
            "MASTER_ADDR": links.address(host_of[0]),
            "MASTER_PORT": str(MASTER_PORT),
            **dict.fromkeys(("RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), num_ranks),
            "LOCAL_RANK": str(neighbours.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(neighbours)),
            "GROUP_RANK": str(host_of[rank]),
            "GROUP_WORLD_SIZE": str(len(self.cluster.hosts)),
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": f"paceline-lab-{os.getpid()}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "GLOO_SOCKET_IFNAME": links.INTERFACE,
            "PACELINE_IFNAME": links.INTERFACE,
            VARIABLE: format_late(dict(enumerate(self.cluster.late_s))),
        }

    def run(self, args: Sequence[str], timeout_s: float | None = None, *, grace_s: float = 3.0) -> int:
        """Run a command once for each rank, with its output streamed behind the rank; the worst exit code.

        When a rank fails, the others have ``grace_s`` seconds to end by themselves; then they are ended, and the
        error of the rank that failed first is repeated. After ``timeout_s`` all are ended and the code is 124.
        """
        return run_everywhere([rank.popen for rank in self.ranks], args, timeout_s=timeout_s, grace_s=grace_s)

    def cut(self, host: int) -> None:
        """Take the host's link down, as if its cable were pulled. What is on its way is lost."""
        self._running().set_link(self._checked(host), "down")

    def mend(self, host: int) -> None:
        """Bring the host's link up again."""
        self._running().set_link(self._checked(host), "up")

    def set_rate(self, host: int, *, up: str | float | None = None, down: str | float | None = None) -> None:
        """Change the rates of a host's link, also while processes run; what is not given stays."""
        network, old = self._running(), self.cluster.hosts[self._checked(host)]
        new = replace(
            old,
            up_bytes_per_s=old.up_bytes_per_s if up is None else _rate(up),
            down_bytes_per_s=old.down_bytes_per_s if down is None else _rate(down),
        )
        network.set_up_rate(host, new.up_bytes_per_s)
        network.set_down_rate(host, new.down_bytes_per_s)
        hosts = tuple(new if number == host else other for number, other in enumerate(self.cluster.hosts))
        self.cluster = replace(self.cluster, hosts=hosts)

    def port_bytes(self) -> list[PortBytes]:
        """What each host has sent and received since the lab began, headers included, also what was lost on its way."""
        return self._running().port_bytes()

    def __enter__(self) -> Lab:
        """Make the hosts and the links."""
        require()
        if self._network is not None:
            raise LabError("this lab is running already; make another one")
        self._network = Network(self.cluster, self.loss)
        self._hosts = tuple(
            LabHost(number, ranks, links.address(number), links.address6(number), pid, self)
            for number, (ranks, pid) in enumerate(zip(self._members, self._network.pids, strict=True))
        )
        self._ranks = tuple(
            LabRank(rank, self._members[host].index(rank), self._hosts[host])
            for rank, host in enumerate(self.cluster.host_of)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything."""
        self.close()

    def close(self) -> None:
        """End everything that runs in the lab, and the lab. Twice does no harm."""
        with self._starting:
            network, self._network = self._network, None
            self._hosts, self._ranks = (), ()
            started, self._started = self._started, []
        for process in started:
            if process.poll() is None:
                process.kill()
        for process in started:
            process.wait()
        if network is not None:
            network.close()

    def _popen(self, rank: int, args: Sequence[str], **options: Any) -> Popen:
        environment = {**os.environ, **self.environment(rank), **(options.pop("env", None) or {})}
        environment.setdefault("OMP_NUM_THREADS", "1")  # hosts share this machine's cores; torchrun does the same
        environment.setdefault("PYTHONUNBUFFERED", "1")  # lines should show when they are printed
        host = self.cluster.host_of[rank]
        with self._starting:
            return self._running().popen(host, args, self._started.append, env=environment, **options)

    def _running(self) -> Network:
        if self._network is None:
            raise LabError("the lab is not running; use it in a with statement: with Lab.preset('lan8') as lab")
        return self._network

    def _checked(self, host: int) -> int:
        if not 0 <= host < len(self.cluster.hosts):
            raise UsageError(f"the lab has no host {host}; its hosts are 0 to {len(self.cluster.hosts) - 1}")
        return host


def _equal_hosts(num_hosts: int, ranks_per_host: int, up_bytes_per_s: float, down_bytes_per_s: float) -> Cluster:
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise UsageError(f"a lab has 1 to {MAX_HOSTS} hosts, not {num_hosts}")
    if ranks_per_host < 1:
        raise UsageError(f"a host of the lab has at least 1 rank, not {ranks_per_host}")
    if num_hosts * ranks_per_host > MAX_RANKS:
        raise UsageError(
            f"a lab has at most {MAX_RANKS} ranks, since each is a process on this machine, and not "
            f"{num_hosts * ranks_per_host}, which are {ranks_per_host} on each of {num_hosts} hosts"
        )
    return Cluster.uniform(
        num_hosts,
        Host(up_bytes_per_s, down_bytes_per_s, _LATENCY_S, LOCAL_RATE_BYTES_PER_S, LOCAL_LATENCY_S),
        ranks_per_host=ranks_per_host,
        name=f"lab of {num_hosts}" + (f"x{ranks_per_host}" if ranks_per_host > 1 else ""),
        wire_factor=ETHERNET_WIRE_FACTOR,
        multicast=True,
    )


def _rate(rate: str | float) -> float:
    return parse_rate(rate) if isinstance(rate, str) else float(rate)
