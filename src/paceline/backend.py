"""Registers the c10d backend, nothing else: ``torch.distributed.init_process_group("paceline")``.

PyTorch calls :func:`register` by itself through the ``torch.backends`` entry point, so no import is needed. The C++
module is loaded when the first group is made.
"""

from __future__ import annotations

import functools
import hmac
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, KeysView, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.config import LOG_LEVELS, Config, Shared
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline._c10d import Backend, Engine
    from paceline.ir.cluster import Cluster
    from paceline.observe.arrivals import Arrival
    from paceline.observe.links import Exchange, KnownLinks
    from paceline.planner import Planner

    TryMulticast = Callable[[str, int, int, int, int], str]

_log = logging.getLogger("paceline")

_engines: dict[tuple[str, bool, bool, int, str, int], Engine] = {}
_known_links: dict[str, KnownLinks] = {}  # by the interface that groups were told to use
_lock = threading.Lock()

_SHARE_OF_PACKETS = 0.97
"""Of a link's rate: the rest is for what ranks tell each other."""


class _Published(NamedTuple):
    """What all ranks of a group take from its rank 0, so that none decides by itself what ranks do together."""

    shared: Shared
    links: str = ""
    asks_for_multicast: bool = False


_ID_BYTES, _SECRET_BYTES, _EPOCH_BYTES = 16, 32, 8
"""What the members of a group share (csrc/c10d/rendezvous.h)."""


def register() -> None:
    """Make ``paceline`` a backend of torch.distributed for CPU tensors."""
    import torch.distributed as dist

    if dist.is_available() and "paceline" not in dist.Backend.backend_list:
        dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu"])
        dist.Backend._plugins = _Plugins(dist.Backend._plugins)
        # torch looks a backend's name up here, and with a single device the two names mean the same.
        setattr(dist.Backend, "CPU:PACELINE", "paceline")
        _teach_set_pg_timeout()


def _teach_set_pg_timeout() -> None:
    """Make torch's ``_set_pg_timeout`` work on Paceline's groups: torch 2.13 knows the names Gloo and NCCL only."""
    import torch
    from torch.distributed import distributed_c10d

    of_torch = distributed_c10d._set_pg_timeout

    @functools.wraps(of_torch)
    def set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        group = group or distributed_c10d._get_default_group()
        devices = getattr(group, "_device_types", [])
        cpu = torch.device("cpu")
        ours = cpu in devices and group._get_backend(cpu).name() == "paceline"
        if ours:
            group._get_backend(cpu).set_timeout(timeout)
        if not ours or len(devices) > 1:
            of_torch(timeout, group)

    distributed_c10d._set_pg_timeout = set_pg_timeout


class _Plugins(dict[str, Any]):
    """torch's table of backends that are plugins, where Paceline is found by its name only.

    torch 2.13 asks for the first of ``keys()`` when a name has devices in it ("cpu:gloo"), compares it with the names
    of the group's backends in another case, and leaves the group without a default backend. So "cpu:gloo" would change
    as soon as Paceline is installed.
    """

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """The other plugins, as torch would see them without Paceline."""
        return {name: None for name in self if name != "PACELINE"}.keys()


def _create(options: Any, told: Any) -> Backend:
    """What init_process_group and new_group call for each group."""
    host = socket.gethostname()
    try:
        from paceline._c10d import Backend, set_log_level

        config = Config.from_environment().told(told)
        set_log_level(LOG_LEVELS.index(config.log_level))
        _import_planner()
        engine = _engine(config, options.store)
    except Exception as error:
        _refuse(options.store, options.group_rank, host, str(error))
        raise
    timeout = options.timeout if isinstance(options.timeout, timedelta) else timedelta(seconds=options.timeout)
    return Backend(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        timeout=timeout,
        engine=engine,
        host=host,
        known_links=lambda: _published(config),
        make_planner=lambda *group: _planner(config, *group),
    )


def open_address() -> str:
    """Return where other processes reach this one: what they give to ``introduce``."""
    import torch.distributed  # noqa: F401  # the module needs its libraries

    return _engine(Config.from_environment(), None).address(socket.gethostname())


def open_group(secret: bytes, worker: int, capacity: int, timeout: timedelta) -> Backend:
    """Return one of ``capacity`` places for workers that come and go: no process group, and only partial operations.

    All workers know the secret. Each is told where the others are by ``introduce``.
    """
    from paceline._c10d import Backend
    from paceline.planner import PartialPlanner

    shared = b"".join(
        hmac.digest(secret, purpose, "sha256")[:size]
        for purpose, size in ((b"paceline open group", _ID_BYTES), (b"paceline open secret", _SECRET_BYTES))
    )
    engine = _engine(Config.from_environment(), None)
    return Backend.open(
        shared + bytes(_EPOCH_BYTES), worker, capacity, timeout, engine, socket.gethostname(), PartialPlanner(worker)
    )


def _refuse(store: Any, rank: int, host: str, why: str) -> None:
    """Tell the other ranks that this one cannot join, where they look for its address (csrc/c10d/rendezvous.cc)."""
    from torch._C._distributed_c10d import PrefixStore

    times = store.add(f"paceline/groups/{rank}", 1)
    part = PrefixStore(f"paceline/{times}", store)
    if rank == 0:
        part.set("group", f"!{host}\n{why}")
    part.set(f"rank/{rank}", f"!{host}\n{why}")


def _import_planner() -> None:
    """Import what makes plans: if that fails, the other ranks must not wait for this one."""
    import paceline.observe.links
    import paceline.planner
    import paceline.policy.select  # noqa: F401


def _known(config: Config) -> KnownLinks:
    from paceline.observe.links import KnownLinks

    return _known_links.setdefault(config.interface, KnownLinks())


def _published(config: Config) -> str:
    """On rank 0: what all ranks of a group take from it, see `_Published`."""
    import msgspec

    from paceline.algorithms import ALGORITHMS

    algorithms = [ALGORITHMS.get(name.partition("/")[0]) for name in config.algorithms.values()]
    asks = any(entry is not None and entry.multicast for entry in algorithms)
    return msgspec.json.encode(_Published(config.shared, _known(config).encode(), asks)).decode()


def _engine(config: Config, store: Any) -> Engine:
    """One engine a process; another only for groups that are told to listen elsewhere.

    A forked child makes its own. Its parent's stays in the table: it must not be ended from there.
    """
    from paceline._c10d import Engine

    host_timeout_s = math.ceil(config.host_timeout_s)
    key = (config.interface, config.use_shm, config.huge_pages, host_timeout_s, config.congestion, os.getpid())
    with _lock:
        if key not in _engines:
            _engines[key] = Engine(*key[:-1], master=_master(store))
        return _engines[key]


def _master(store: Any) -> str:
    """The host that the store was reached at, which other hosts reach, too; empty where it is not known."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else ""


def _planner(
    config: Config,
    rank: int,
    store: Any,
    hosts: Sequence[str],
    published: str,
    exchange: Exchange,
    try_multicast: TryMulticast,
) -> Planner:
    """Makes what turns requests of the backend into programs of this rank.

    Links between hosts are measured, unless they are given, rank 0 knows them all from groups before, or nothing may
    depend on timing. That is asked of what rank 0 has published, never of this rank's own settings: all ranks measure,
    or none. A group of one rank has nothing published.
    """
    import msgspec

    from paceline.observe.links import KnownLinks, measure
    from paceline.planner import Planner
    from paceline.policy.select import cluster_of

    of_rank_0 = _Published(config.shared)
    if published:
        of_rank_0 = msgspec.json.decode(published, type=_Published)
        config = config.following(of_rank_0.shared)
    rate_bytes_per_s: float | Sequence[float] | None = config.rate_bytes_per_s
    latency_s = config.latency_s
    down_bytes_per_s: Sequence[float] = ()
    given = rate_bytes_per_s is not None and latency_s is not None
    wants_multicast = _wants_multicast(config.multicast, hosts, asks=of_rank_0.asks_for_multicast)
    if len(set(hosts)) > 1 and not given and not config.deterministic:
        down = wants_multicast and rate_bytes_per_s is None
        known = KnownLinks.decode(of_rank_0.links).of(hosts, down=down)
        links = known or measure(rank, hosts, exchange, store, down=down)
        _known(config).learn(hosts, links)
        if rate_bytes_per_s is None:
            rate_bytes_per_s, down_bytes_per_s = links.rate_bytes_per_s, links.down_bytes_per_s
        latency_s = links.latency_s if latency_s is None else latency_s
    cluster = cluster_of(
        hosts, rate_bytes_per_s=rate_bytes_per_s, down_bytes_per_s=down_bytes_per_s, latency_s=latency_s
    )
    multicast = wants_multicast and _has_multicast(config, rank, cluster, try_multicast)
    return Planner(config, rank, cluster, multicast=multicast)


def _wants_multicast(setting: str, hosts: Sequence[str], *, asks: bool) -> bool:
    """Whether it is to be tried, by what rank 0 has published: ``asks`` for an algorithm that needs it."""
    if setting == "auto":
        return asks and len(set(hosts)) > 1
    return setting == "on" and len(hosts) > 1


def _has_multicast(config: Config, rank: int, cluster: Cluster, try_multicast: TryMulticast) -> bool:
    """Try it, at a rate that every host can receive; rank 0 says why it cannot be had.

    What was measured is what TCP moved, so its headers come on top; some is left for frames beside the packets.
    """
    up_bytes_per_s = cluster.hosts[cluster.host_of[rank]].up_bytes_per_s
    down_bytes_per_s = min(host.down_bytes_per_s for host in cluster.hosts)
    wire = 1.0 if config.rate_bytes_per_s is not None else cluster.wire_factor
    rates = [int(rate * wire * _SHARE_OF_PACKETS) for rate in (up_bytes_per_s, down_bytes_per_s)]
    why_not = try_multicast(config.multicast_address, *config.multicast_ports, *rates)
    if why_not and config.deterministic:
        raise UsageError(
            f"multicast cannot be used: {why_not}. With PACELINE_DETERMINISTIC=1 nothing else is done in its place, "
            "as the next run might differ: set PACELINE_MULTICAST=off"
        )
    if why_not and rank == 0:
        _log.warning("multicast cannot be used, and each transfer goes to one rank: %s", why_not)
    return not why_not


def chosen_algorithms(group: Any = None) -> list[str]:
    """Which algorithm runs each kind of collective a process group has used so far, one line each."""
    return of_group(group).chosen()


def multicast_counters(group: Any = None) -> dict[str, int] | None:
    """What this rank sent and received by multicast in a process group, and what had to be sent again.

    None where packets do not reach all its ranks, or were not wanted (PACELINE_MULTICAST).
    """
    return of_group(group).multicast_counters()


def failure(group: Any = None) -> str:
    """Why a process group has failed, in the words its next call will raise; an empty string while it has not."""
    return of_group(group).failure()


def arrivals(group: Any = None) -> list[Arrival]:
    """Who arrived when at the last (about 1000) large all-reduces of a process group; empty but on its rank 0.

    :func:`paceline.observe.arrivals.lateness` and ``metrics`` make numbers of it.
    """
    from paceline.observe.arrivals import arrival

    return [arrival(record) for record in of_group(group).arrivals()]


def is_paceline(group: Any = None) -> bool:
    """Whether a process group's CPU tensors are Paceline's business."""
    try:
        return type(_found(group)).__module__ == "paceline._c10d"
    except RuntimeError:  # it has nothing for them
        return False


def of_group(group: Any = None) -> Backend:
    """The C++ backend of a process group that runs on Paceline."""
    backend = _found(group)
    if not is_paceline(group):
        raise UsageError(f"this process group runs on {backend.name()}, not on paceline")
    return backend  # type: ignore[no-any-return]


def _found(group: Any) -> Any:
    import torch
    import torch.distributed as dist

    backend = (group or dist.distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
