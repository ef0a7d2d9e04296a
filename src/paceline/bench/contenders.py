"""Who is measured: a torch.distributed backend or an MPI, and how its ranks are started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from paceline import config
from paceline.bench import peers
from paceline.bench.rank_process.messages import Setup

if TYPE_CHECKING:
    from paceline.lab import Lab

RANK_PROGRAM = Path(__file__).parent / "rank_process"
PEERS = ("gloo", *peers.MPI_PEERS)
"""Whom a subject is measured against."""

_FIRST_LAB_PORT = 29500  # hosts of a lab are their own: nobody else listens there


@dataclass(frozen=True)
class Contender:
    """A backend by name, and the variables that its ranks have beside torchrun's.

    One that is not called by its backend's name has that as ``backend``. With ``messages`` it is Paceline over the
    backend's messages (:func:`paceline.all_reduce`).
    """

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    backend: str = ""
    messages: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The ``PACELINE_*`` variables in force: those this process hands down, and its own."""
        return config.variables({**os.environ, **self.environment})

    @property
    def pieces(self) -> int | None:
        """In how many pieces its algorithm is cut, if it is told."""
        _, _, pieces = self.environment.get("PACELINE_ALGORITHM", "").partition("/")
        return int(pieces) if pieces else None

    @property
    def is_mpi(self) -> bool:
        """Whether an MPI launcher starts the ranks."""
        return self.name in peers.MPI_PEERS

    def setup(self, rank: int, num_ranks: int, port: int, lab: Lab | None) -> Setup:
        """What a rank must know to join its group, whose first rank listens at the port."""
        if self.is_mpi:
            return Setup("mpi", num_ranks, self.environment)
        place = lab.environment(rank) if lab else _one_host(rank, num_ranks)
        environment = {**place, "MASTER_PORT": str(port), **self.environment}
        return Setup(self.backend or self.name, num_ranks, environment, self.messages)

    def start(
        self, num_ranks: int, program: Path, address: Path, log: IO[bytes], lab: Lab | None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start all ranks, which then connect to the address: a process a rank, or an MPI's launcher."""
        environment = {**os.environ, **peers.MPI_VARIABLES, "OMP_NUM_THREADS": "1"}
        how: dict[str, Any] = {"env": environment, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        how["start_new_session"] = True  # Ctrl-C reaches the controller alone, and it can end them in order
        if self.is_mpi:
            command = peers.launch_command(self.name, num_ranks)
            yield subprocess.Popen([*command, str(program), str(address), "-1"], **how)
            return
        for rank in range(num_ranks):
            command = [sys.executable, str(program), str(address), str(rank)]
            yield lab.ranks[rank].popen(command, **how) if lab else subprocess.Popen(command, **how)


def free_port(index: int, lab: Lab | None) -> int:
    """A port for the group of the run's contender with this index."""
    if lab:
        return _FIRST_LAB_PORT + index
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _one_host(rank: int, num_ranks: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
