"""Strangers who connect to a listening port: with random bytes, with nothing at all, and with one byte at a time."""

from __future__ import annotations

import os
import random
import re
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_LISTENING = "0A"
_AT_ONCE = 200  # connections held open at a time; the rest are closed, half of them with a reset
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, zero seconds: close sends RST


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process listens, from the kernel's tables."""
    inodes = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(file)))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == _LISTENING and columns[9] in inodes:
                ports.add(int(columns[1].rsplit(":", 1)[1], 16))
    return sorted(ports)


@contextmanager
def besiege(ports: Sequence[int], connections: int, seed: int) -> Iterator[None]:
    """Make so many hostile connections; inside the block all have been made, and slow writers still dribble."""
    dice = random.Random(seed)
    held: list[socket.socket] = []
    slow: list[socket.socket] = []
    over = threading.Event()

    def dribble() -> None:
        while not over.wait(0.05):
            for stranger in slow:
                with suppress(OSError):
                    stranger.send(bytes([dice.randrange(256)]))

    writer = threading.Thread(target=dribble)
    writer.start()
    try:
        for turn in range(connections):
            stranger = _connect(ports[turn % len(ports)])
            if stranger is None:
                continue
            held.append(stranger)
            kind = turn % 3
            if kind == 0:
                with suppress(OSError):
                    stranger.sendall(dice.randbytes(dice.randrange(4096)))
            elif kind == 1:
                slow.append(stranger)
            if len(held) > _AT_ONCE:
                _leave(held.pop(dice.randrange(len(held))), slow, reset=dice.random() < 0.5)
        yield
    finally:
        over.set()
        writer.join()
        for stranger in held:
            stranger.close()


def _connect(port: int) -> socket.socket | None:
    """A connection that never blocks for long; None if the other side refuses, which is its right."""
    for address in ("127.0.0.1", "::1"):
        with suppress(OSError):
            return socket.create_connection((address, port), timeout=1.0)
    return None


def _leave(stranger: socket.socket, slow: list[socket.socket], *, reset: bool) -> None:
    if stranger in slow:
        slow.remove(stranger)
    if reset:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    stranger.close()
