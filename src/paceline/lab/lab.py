"""A lab: a cluster's hosts on this machine, with the cluster's rates on their links.

    with Lab.preset("lan8", late={3: 0.5}) as lab:
        worst = lab.run(["python", "train.py"])          # on every host, as torchrun would start it
        server = lab.hosts[0].popen(["python", "server.py"])
        lab.cut(5)                                       # host 5 loses its link

Everything started in a lab ends with it, and the lab ends with this process, however that ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from paceline.errors import LabError, UsageError
from paceline.ir.cluster import ETHERNET_WIRE_FACTOR, Cluster, Host
from paceline.lab import links
from paceline.lab.available import require
from paceline.lab.lateness import VARIABLE, format_late
from paceline.lab.namespaces import Popen
from paceline.lab.network import Network
from paceline.lab.running import run_everywhere
from paceline.units import parse_rate

MAX_HOSTS = 254
MASTER_PORT = 29500
_LATENCY_S = 100e-6  # what the presets of the lab assume, too


@dataclass(frozen=True)
class LabHost:
    """One host of a running lab. ``pid`` is its first process: ``nsenter --all --target PID`` leads inside."""

    rank: int
    address: str
    address6: str
    pid: int
    lab: Lab = field(repr=False)
    interface: str = links.INTERFACE

    @property
    def name(self) -> str:
        """The host's name, which all hosts can resolve."""
        return f"host{self.rank}"

    @property
    def namespace(self) -> str:
        """The file of its network namespace: ``nsenter --net=FILE``."""
        return f"/proc/{self.pid}/ns/net"

    def popen(self, args: Sequence[str], **options: Any) -> Popen:
        """``subprocess.Popen`` inside this host, with :meth:`Lab.environment`; ``env`` adds to that or overrides it.

        It is a child of this process like any other, and is killed when the lab ends.
        """
        return self.lab._popen(self.rank, args, **options)


class Lab:
    """Emulated hosts, one rank each, joined by a switch; use it in a ``with`` statement.

    ``hosts``, ``up`` and ``down`` (like "500mbit", or bytes a second) describe equal hosts; ``cluster`` describes any
    instead of them. ``loss`` is the share of packets lost on the way to a host; ``late`` says by how many seconds a
    rank is late, for programs that ask :func:`paceline.lab.late_s`.
    """

    def __init__(
        self,
        hosts: int = 8,
        up: str | float = "500mbit",
        down: str | float = "500mbit",
        *,
        loss: float = 0.0,
        late: Mapping[int, float] | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        if cluster is None:
            if not 1 <= hosts <= MAX_HOSTS:
                raise UsageError(f"a lab has 1 to {MAX_HOSTS} hosts, not {hosts}")
            host = Host(_rate(up), _rate(down), latency_s=_LATENCY_S)
            fixed: dict[str, Any] = {"wire_factor": ETHERNET_WIRE_FACTOR, "multicast": True}
            cluster = Cluster.uniform(hosts, host, name=f"lab of {hosts}", **fixed)
        if cluster.host_of != tuple(range(cluster.num_ranks)) or cluster.num_ranks > MAX_HOSTS:
            raise UsageError(f"{cluster.name} cannot be a lab, which has 1 to {MAX_HOSTS} hosts with one rank each")
        if not 0 <= loss < 1:
            raise UsageError(f"loss is a share of the packets, from 0 to less than 1, not {loss}")
        self.cluster = cluster.with_late(late or {})
        self.loss = loss
        self._hosts: tuple[LabHost, ...] = ()
        self._network: Network | None = None
        self._started: list[Popen] = []
        self._starting = threading.Lock()

    @classmethod
    def preset(cls, name: str, *, loss: float = 0.0, late: Mapping[int, float] | None = None) -> Lab:
        """The lab of a cluster preset: lan8, lan4 or uplink8."""
        return cls(cluster=Cluster.preset(name), loss=loss, late=late)

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """The hosts, in order of their ranks."""
        self._running()
        return self._hosts

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would set for this rank, the interface to use, and who is late. Merge it with os.environ."""
        num_ranks = str(self.cluster.num_ranks)
        late = format_late(dict(enumerate(self.cluster.late_s)))
        return {
            "MASTER_ADDR": links.address(0),
            "MASTER_PORT": str(MASTER_PORT),
            **dict.fromkeys(("RANK", "GROUP_RANK", "ROLE_RANK"), str(self._checked(rank))),
            **dict.fromkeys(("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"), num_ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "TORCHELASTIC_RUN_ID": f"paceline-lab-{os.getpid()}",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "GLOO_SOCKET_IFNAME": links.INTERFACE,
            "PACELINE_IFNAME": links.INTERFACE,
            VARIABLE: late,
        }

    def run(self, args: Sequence[str], timeout_s: float | None = None, *, grace_s: float = 3.0) -> int:
        """Run a command on every host, with its output streamed behind the rank; the worst exit code.

        When a rank fails, the others have ``grace_s`` seconds to end by themselves; then they are ended, and the
        error of the rank that failed first is repeated. After ``timeout_s`` all are ended and the code is 124.
        """
        return run_everywhere([host.popen for host in self.hosts], args, timeout_s=timeout_s, grace_s=grace_s)

    def cut(self, rank: int) -> None:
        """Take the host's link down, as if its cable were pulled. What is on its way is lost."""
        self._running().set_link(self._checked(rank), "down")

    def mend(self, rank: int) -> None:
        """Bring the host's link up again."""
        self._running().set_link(self._checked(rank), "up")

    def set_rate(self, rank: int, *, up: str | float | None = None, down: str | float | None = None) -> None:
        """Change the rates of a host's link, also while processes run; what is not given stays."""
        network, old = self._running(), self.cluster.hosts[self._checked(rank)]
        new = replace(
            old,
            up_bytes_per_s=old.up_bytes_per_s if up is None else _rate(up),
            down_bytes_per_s=old.down_bytes_per_s if down is None else _rate(down),
        )
        network.set_up_rate(rank, new.up_bytes_per_s)
        network.set_down_rate(rank, new.down_bytes_per_s)
        hosts = tuple(new if number == rank else host for number, host in enumerate(self.cluster.hosts))
        self.cluster = replace(self.cluster, hosts=hosts)

    def __enter__(self) -> Lab:
        """Make the hosts and the links."""
        require()
        if self._network is not None:
            raise LabError("this lab is running already; make another one")
        self._network = Network(self.cluster, self.loss)
        self._hosts = tuple(
            LabHost(rank, links.address(rank), links.address6(rank), pid, self)
            for rank, pid in enumerate(self._network.pids)
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
            network, self._network, self._hosts = self._network, None, ()
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
        with self._starting:
            return self._running().popen(rank, args, self._started.append, env=environment, **options)

    def _running(self) -> Network:
        if self._network is None:
            raise LabError("the lab is not running; use it in a with statement: with Lab.preset('lan8') as lab")
        return self._network

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.cluster.num_ranks:
            raise UsageError(f"the lab has no host {rank}; its hosts are 0 to {self.cluster.num_ranks - 1}")
        return rank


def _rate(rate: str | float) -> float:
    return parse_rate(rate) if isinstance(rate, str) else float(rate)
