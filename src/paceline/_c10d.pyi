"""The engine and the c10d backend, in C++ (csrc/)."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import Backend as TorchBackend
from torch._C._distributed_c10d import ReduceOp, Store, Work

from paceline.planner import Planner

class Program:
    """What one rank does in a schedule."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        num_chunks: int,
        digest: int,
        name: str,
        rows: npt.NDArray[np.int64],
        in_order: bool = False,
        in_turn: bool = False,
        spreads: Sequence[tuple[int, int, Sequence[int]]] = (),
    ) -> None: ...
    @property
    def name(self) -> str: ...

class Engine:
    """The progress thread and the listening sockets of a process."""

    def __init__(
        self, interface: str, use_shm: bool, huge_pages: bool, host_timeout_s: int, congestion: str, master: str
    ) -> None: ...
    @property
    def tcp_address(self) -> str: ...
    def address(self, host: str) -> str: ...

class Backend(TorchBackend):
    """One rank's membership in a process group."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        engine: Engine,
        host: str,
        known_links: Callable[[], str],
        make_planner: Callable[
            [int, Any, Sequence[str], str, Callable[[int, int, int], float], Callable[[str, int, int, int, int], str]],
            Planner,
        ],
    ) -> None: ...
    def arrivals(self) -> list[tuple[int, int, int, str, tuple[float, ...]]]: ...
    def partial_allreduce(
        self,
        tensor: torch.Tensor,
        members: Sequence[int],
        number: int,
        op: ReduceOp | ReduceOp.RedOpType,
        timeout: timedelta,
        asynchronous: bool,
    ) -> Work | None: ...
    def give_up(self, number: int, reason: str) -> None: ...
    @staticmethod
    def open(
        shared: bytes, worker: int, capacity: int, timeout: timedelta, engine: Engine, host: str, planner: Any
    ) -> Backend: ...
    def introduce(self, peer: int, address: str) -> None: ...
    def leave(self) -> None: ...
    def failure(self) -> str: ...
    def multicast_counters(self) -> dict[str, int] | None: ...
    def chosen(self) -> list[str]: ...

def set_log_level(level: int) -> None: ...
def instruction_set() -> str: ...
