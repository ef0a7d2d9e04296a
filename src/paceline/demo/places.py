"""Where the ranks live: on hosts of the lab, or on this host's loopback with every connection paced."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from paceline.lab import Lab
from paceline.units import format_rate


class Place(str, Enum):
    """What ``--place`` takes."""

    AUTO = "auto"
    LAB = "lab"
    LOOPBACK = "loopback"


@dataclass(frozen=True)
class Stage:
    """How to start a rank, what its connections must be paced to (0: the links do that), and a sentence about it."""

    popen: Callable[..., subprocess.Popen[Any]]
    pace_bytes_per_s: int
    words: str


@contextmanager
def open_stage(place: Place, num_ranks: int, rate_bytes_per_s: float) -> Iterator[Stage]:
    """A place for the ranks; when it is left, nothing of a lab remains."""
    rate = format_rate(rate_bytes_per_s)
    if place is Place.LOOPBACK:
        yield Stage(
            _start_here,
            int(rate_bytes_per_s),
            f"{num_ranks} ranks on one host that send by paced TCP, {rate} each; Paceline is kept to rings, "
            "as Gloo is; late ranks are planned around between hosts only",
        )
        return
    with Lab(num_ranks, rate_bytes_per_s, rate_bytes_per_s) as lab:
        yield Stage(
            lambda rank, args, **options: lab.ranks[rank].popen(args, **options),
            0,
            f"{num_ranks} emulated hosts on links of {rate} each way, one rank each",
        )


_ON_LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "PACELINE_IFNAME": "lo",
    "PACELINE_TRANSPORT": "tcp",
    "PACELINE_ALGORITHM": "allreduce:ring,reducescatter:ring,allgather:ring",
    "OMP_NUM_THREADS": "1",
}


def _start_here(_rank: int, args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    return subprocess.Popen(args, env={**os.environ, **_ON_LOOPBACK}, **options)
