"""Registers the c10d backend, nothing else: ``torch.distributed.init_process_group("paceline")``.

PyTorch calls :func:`register` by itself through the ``torch.backends`` entry point, so no import is needed. The C++
module is loaded when the first group is made.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.config import LOG_LEVELS, Config

if TYPE_CHECKING:
    from paceline._c10d import Backend, Engine, Program

_engines: dict[tuple[str, bool], Engine] = {}
_lock = threading.Lock()


def register() -> None:
    """Make ``paceline`` a backend of torch.distributed for CPU tensors."""
    import torch.distributed as dist

    if dist.is_available() and "paceline" not in dist.Backend.backend_list:
        dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu"])


def _create(options: Any, _backend_options: Any) -> Backend:
    """What init_process_group and new_group call for each group."""
    from paceline._c10d import Backend, set_log_level

    config = Config.from_environment()
    set_log_level(LOG_LEVELS.index(config.log_level))
    timeout = options.timeout if isinstance(options.timeout, timedelta) else timedelta(seconds=options.timeout)
    return Backend(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=timeout,
        engine=_engine(config),
        host=socket.gethostname(),
        make_planner=lambda rank, size, store, hosts: _planner(config, rank, size, hosts),
    )


def _engine(config: Config) -> Engine:
    """One engine a process; another only for groups that are told to listen elsewhere."""
    from paceline._c10d import Engine

    key = (config.interface, config.use_shm)
    with _lock:
        if key not in _engines:
            _engines[key] = Engine(interface=config.interface, hostname="", use_shm=config.use_shm)
        return _engines[key]


def _planner(config: Config, rank: int, size: int, hosts: Sequence[str]) -> Callable[[str, int, int, bool], Program]:
    """Turns a request of the backend into the program of this rank."""
    from paceline.executors.native import program
    from paceline.ir.collective import Collective, Kind
    from paceline.policy.select import cluster_of, select

    cluster = cluster_of(hosts)

    def plan(kind: str, root: int, size_bytes: int, exact: bool) -> Program:
        collective = Collective(Kind(kind), size, root)
        chosen = select(collective, cluster, size_bytes, exact=exact, wanted=config.algorithms)
        return program(chosen.proof, rank)

    return plan
