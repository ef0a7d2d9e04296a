"""One host's part in :mod:`paceline.lab.probe`: sends and receives as often as told on standard input.

``flow.py SIZE_BYTES RECEIVES SEND_TO`` prints when a round's first byte went and its last one came. Hosts share the
machine's monotonic clock, so these times compare. Runs as a script, with the standard library alone.
"""

from __future__ import annotations

import socket
import sys
import threading
import time

PORT = 7000


def _send(connection: socket.socket, size_bytes: int) -> None:
    piece = bytes(1 << 20)
    for first in range(0, size_bytes, len(piece)):
        connection.sendall(piece[: size_bytes - first])


def _receive(connection: socket.socket, size_bytes: int) -> None:
    piece = bytearray(1 << 18)
    while size_bytes > 0:
        got = connection.recv_into(piece, min(size_bytes, len(piece)))
        if got == 0:
            raise ConnectionError("the other end has left")
        size_bytes -= got


def main(size_bytes: int, receives: bool, send_to: str) -> None:
    """Listen, connect and take part in rounds; each waits for a line on standard input."""
    server = socket.create_server(("", PORT))
    _say("listening")
    sys.stdin.readline()
    outgoing = socket.create_connection((send_to, PORT)) if send_to else None
    incoming = server.accept()[0] if receives else None
    _say("connected")
    for _ in sys.stdin:
        start = time.monotonic()
        sender = threading.Thread(target=_send, args=(outgoing, size_bytes)) if outgoing else None
        if sender is not None:
            sender.start()
        if incoming is not None:
            _receive(incoming, size_bytes)
        end = time.monotonic()
        if sender is not None:
            sender.join()
        _say(f"{start} {end}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "yes", sys.argv[3])
