"""The namespaces and links of one lab: made, changed and unmade."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import LabError
from paceline.ir.cluster import Cluster
from paceline.lab import keeper, links
from paceline.lab.available import tool
from paceline.lab.namespaces import Popen, popen_inside

_PATIENCE_S = 10.0  # for what takes the kernel milliseconds


@dataclass(frozen=True)
class PortBytes:
    """Bytes that have crossed a host's port, headers included. Packets dropped in a full queue do not count."""

    sent: int
    received: int


class Network:
    """A switch and the hosts of a cluster, from the moment this is made until :meth:`close`."""

    def __init__(self, cluster: Cluster, loss: float) -> None:
        num_hosts = len(cluster.hosts)
        command = [sys.executable, "-I", "-S", str(Path(keeper.__file__)), str(os.getpid()), str(num_hosts)]
        self._pidfds: list[int] = []  # the keeper's, who is the switch, and each host's
        self._keeper: Popen = subprocess.Popen(
            [*command, links.names(num_hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self.pids = self._read_pids()
            self._pidfds = [os.pidfd_open(pid) for pid in (self._keeper.pid, *self.pids)]
            self._make_links(cluster, loss)
        except BaseException:
            self.close()
            raise

    def popen(self, host: int, args: Sequence[str], started: Callable[[Popen], None], **options: Any) -> Popen:
        """Start a process inside a host."""
        try:
            return popen_inside(self._pidfds[1 + host], keeper.HOST_NAMESPACES, args, started=started, **options)
        except ProcessLookupError:
            raise LabError(f"host {host} is gone: somebody has killed the lab's keeper; make a new lab") from None

    def set_up_rate(self, host: int, bytes_per_s: float) -> None:
        """Shape what leaves a host."""
        self._finish(self._command(1 + host, "tc", links.shaping_line(links.INTERFACE, bytes_per_s)))

    def set_down_rate(self, host: int, bytes_per_s: float) -> None:
        """Shape what leaves the switch for a host."""
        self._finish(self._command(0, "tc", links.shaping_line(links.port(host), bytes_per_s)))

    def set_link(self, host: int, state: str) -> None:
        """Take the link of a host "down" or "up"."""
        self._finish(self._command(0, "ip", f"link set {links.port(host)} {state}\n"))

    def port_bytes(self) -> list[PortBytes]:
        """What has crossed each host's port so far, from the counters of the shapers."""
        ends = [self._ask_tc(place) for place in range(len(self.pids) + 1)]
        switch, *hosts = [self._answer(process) for process in ends]
        return [
            PortBytes(links.bytes_sent(said, links.INTERFACE), links.bytes_sent(switch, links.port(number)))
            for number, said in enumerate(hosts)
        ]

    def close(self) -> None:
        """End what still runs in the hosts, and the hosts. Processes we started must have been waited for."""
        for pipe in (self._keeper.stdin, self._keeper.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._keeper.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        while self._pidfds:
            os.close(self._pidfds.pop())

    def _read_pids(self) -> list[int]:
        report = self._keeper.stdout.readline().strip() if self._keeper.stdout else ""
        if not report or report.startswith("error"):
            reason = report.removeprefix("error ") or f"its keeper ended with {self._keeper.wait(_PATIENCE_S)}"
            raise LabError(
                f"the kernel does not let the lab make hosts ({reason}); run it as root outside of a container, "
                "or in one started with --privileged"
            )
        return [int(pid) for pid in report.split()]

    def _make_links(self, cluster: Cluster, loss: float) -> None:
        self._finish(self._command(0, "ip", links.switch_lines(self.pids)))
        down = [
            links.shaping_line(links.port(place), host.down_bytes_per_s) for place, host in enumerate(cluster.hosts)
        ]
        up = [links.shaping_line(links.INTERFACE, host.up_bytes_per_s) for host in cluster.hosts]
        tc = {0: "".join(down), **{1 + host: line + links.loss_lines(loss) for host, line in enumerate(up)}}
        ip = {1 + host: links.host_lines(host, lossy=loss > 0) for host in range(len(up))}
        for name, texts in (("ip", ip), ("tc", tc)):
            commands = [self._command(place, name, text) for place, text in texts.items()]
            for command in commands:
                self._finish(command)

    def _ask_tc(self, place: int) -> Popen:
        command = [tool("tc"), *links.COUNTERS]
        pipe = subprocess.PIPE
        return popen_inside(self._pidfds[place], keeper.CLONE_NEWNET, command, stdout=pipe, stderr=pipe, text=True)

    @staticmethod
    def _answer(process: Popen) -> str:
        said, problem = process.communicate(timeout=_PATIENCE_S)
        if process.returncode != 0:
            raise LabError(f"the lab cannot read its counters: {problem.strip()}")
        return str(said)

    def _command(self, place: int, name: str, text: str) -> Popen:
        """Start ``ip`` or ``tc``, fed with these lines, in the network of the switch (0) or a host (1 + its number)."""
        process = popen_inside(
            self._pidfds[place],
            keeper.CLONE_NEWNET,
            [tool(name), "-batch", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()
        process.stdin = None
        return process

    @staticmethod
    def _finish(process: Popen) -> None:
        try:
            _, problem = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            problem = "it took too long"
        if process.returncode != 0:
            raise LabError(
                f"the lab cannot set its links: {problem.strip()}; does this kernel have veth, bridge and tbf?"
            )
