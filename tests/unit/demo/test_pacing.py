"""Connections are slowed down without any privilege, and nothing is left open."""

from __future__ import annotations

import os
import socket

from paceline.demo.pacing import SO_MAX_PACING_RATE, pace_connections


def test_tcp_connections_are_paced_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, plain = socket.socketpair()
        with other, plain:
            before = set(os.listdir("/proc/self/fd"))
            assert pace_connections(1_000_000) >= 2
            assert set(os.listdir("/proc/self/fd")) == before
            assert one.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == 1_000_000
            assert plain.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) != 1_000_000
