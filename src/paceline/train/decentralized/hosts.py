"""Which host a worker is on, and where others reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_name() -> str:
    """Return a name of this host, the same for processes that share its network."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.exists() else ""
    return f"{os.uname().nodename}/{kernel[:8]}/{os.stat('/proc/self/ns/net').st_ino}"


def own_address() -> str:
    """Return the address of this host that the job's first rank would see: other ranks reach it there.

    Without MASTER_ADDR the job is on this host alone, and the address is loopback's.
    """
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it only chooses a route
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
