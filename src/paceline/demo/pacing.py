"""Thin links where there are none: the kernel paces every TCP connection of this process, without any privilege.

It is a limit on a connection, not on a host: who sends to two peers at once sends twice as much. Rings send to one.
"""

from __future__ import annotations

import contextlib
import os
import socket

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python has no name for it


def pace_connections(bytes_per_s: int) -> int:
    """Let no TCP connection that is open now send faster than this; how many there are."""
    paced = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # gone by now
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                    own.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
                    paced += 1
    return paced
