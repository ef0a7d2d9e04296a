"""How close a lab's links come to their rates on this machine: ``python -m paceline.lab.probe lan8 lan4``.

Plain sockets carry 64 MB from host 0 to host 1, then around a ring of all hosts at once. A share is the time that the
bytes, headers included, would take on the link, over the time from the first byte to the last. Below 1 by much, the
machine is too busy for this lab; above 1 by more than the bucket of a link allows (0.4%) would be a mistake of ours.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import LabError
from paceline.lab import flow
from paceline.lab.lab import Lab
from paceline.lab.namespaces import Popen

SIZE_BYTES = 64_000_000
ROUNDS = 4


def shares(lab: Lab, flows: Sequence[tuple[int, int]], size_bytes: int, rounds: int) -> list[float]:
    """The share of the limit in each round of these flows (from host, to host) at once; one a port at most."""
    to = dict(flows)
    parts = [
        _part(lab, host, size_bytes, host in to.values(), to.get(host))
        for host in range(len(lab.cluster.hosts))
        if host in to or host in to.values()
    ]
    hosts, on_the_wire_bytes = lab.cluster.hosts, size_bytes * lab.cluster.wire_factor
    limit_s = max(on_the_wire_bytes / min(hosts[one].up_bytes_per_s, hosts[two].down_bytes_per_s) for one, two in flows)
    _hear(parts)
    _tell(parts)
    _hear(parts)
    found = []
    for _ in range(rounds):
        _tell(parts)
        times = [tuple(map(float, line.split())) for line in _hear(parts)]
        found.append(limit_s / (max(end for _, end in times) - min(start for start, _ in times)))
    for part in parts:
        part.communicate()
    return found


def _part(lab: Lab, host: int, size_bytes: int, receives: bool, send_to: int | None) -> Popen:
    address = "" if send_to is None else lab.hosts[send_to].address
    return lab.hosts[host].popen(
        [sys.executable, "-I", "-S", str(Path(flow.__file__)), str(size_bytes), "yes" if receives else "no", address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _tell(parts: list[Popen]) -> None:
    for part in parts:
        assert part.stdin is not None
        part.stdin.write("go\n")
        part.stdin.flush()


def _hear(parts: list[Popen]) -> list[str]:
    lines = [part.stdout.readline() for part in parts if part.stdout is not None]
    if not all(lines):
        raise LabError("a part of the probe has failed; its error is above")
    return lines


def main(presets: Sequence[str]) -> None:
    """Print a line for each preset and kind of flow."""
    for preset in presets or ("lan8", "lan4"):
        num_hosts = len(Lab.preset(preset).cluster.hosts)
        ring = [(host, (host + 1) % num_hosts) for host in range(num_hosts)]
        for words, flows in (("one flow", ring[:1]), (f"ring of {num_hosts} at once", ring)):
            with Lab.preset(preset) as lab:
                found = shares(lab, flows, SIZE_BYTES, ROUNDS)
            sys.stdout.write(f"{preset:8} {words:18} {min(found):.4f} - {max(found):.4f} of the limit\n")


if __name__ == "__main__":
    main(sys.argv[1:])
