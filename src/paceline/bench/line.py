"""The controller's end of the connection to one rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.bench.rank_process.messages import Answer, Order

_ANSWERS = msgspec.json.Decoder(Answer)


@dataclass(eq=False)
class Line:
    """The connection to one rank."""

    socket: socket.socket
    rank: int = -1
    received: bytes = b""

    def __str__(self) -> str:
        """``rank 3``."""
        return f"rank {self.rank}" if self.rank >= 0 else "a rank"

    @property
    def pid(self) -> int:
        """The rank's process, as numbered here."""
        credentials = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int.from_bytes(credentials[:4], sys.byteorder)

    def send(self, order: Order) -> None:
        """Give an order; that the rank is gone is noticed when it does not answer."""
        with contextlib.suppress(OSError):
            self.socket.sendall(msgspec.json.encode(order) + b"\n")

    def hang_up(self) -> None:
        """Say that no order will follow: the rank ends, whatever it is doing."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Hang up, and kill a rank that keeps its side open all the same: it is stopped or stuck."""
        self.hang_up()
        self.socket.settimeout(0.5)
        try:
            while self.socket.recv(1 << 20):
                pass
        except TimeoutError:
            os.kill(self.pid, signal.SIGKILL)
        except OSError:
            pass
        self.socket.close()

    def shared_memory(self) -> Iterator[Path]:
        """Files that the rank shares with others through memory."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
                _, slash, name = line.partition(" /dev/shm/")
                if slash and not name.endswith("(deleted)"):
                    yield Path("/dev/shm", name)

    def read(self) -> Answer | None:
        """The answer, once it is complete; EOFError if the rank is gone."""
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self.received += data
        if not self.received.endswith(b"\n"):
            return None
        text, self.received = self.received, b""
        answer: Answer = _ANSWERS.decode(text)
        return answer
