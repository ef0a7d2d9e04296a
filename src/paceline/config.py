"""Settings of a process, the only reader of ``PACELINE_*`` variables, and what one group is told in code.

======================  ====================================================================================  =======
variable                meaning                                                                               default
======================  ====================================================================================  =======
PACELINE_ALGORITHM      which algorithm runs a collective: ``ring`` for all that can, or by collective,       chosen by
                        ``allreduce:ring,broadcast:chain``; ``stragglar/4`` is cut in 4 pieces; the same on   cost
                        all ranks
PACELINE_IFNAME         the network interface to listen on; GLOO_SOCKET_IFNAME is taken where it is not set   by name
                                                                                                              or route
PACELINE_TRANSPORT      ``auto``: ranks of one host share memory, others use TCP; ``tcp``: all use TCP        auto
PACELINE_HUGE_PAGES     ``auto``: large tensors that ranks of one host exchange again and again are moved     auto
                        to huge pages, at the same addresses, which makes large collectives faster; ``off``:
                        tensors stay as they were allocated
PACELINE_RATE           what a rank can send and receive, like ``10gbit``: measured where it is not set;      measured
                        rank 0's holds for all ranks of a group
PACELINE_LATENCY        what one message costs besides its bytes, like ``50us``; rank 0's, too                measured
PACELINE_LATE           ``auto``: ranks that arrive late are found, and large all-reduces planned around      auto
                        them; ``off``: never; ``3`` or ``2:400,5:1200``: always for these ranks of a group
                        (and milliseconds, where known)
PACELINE_DETERMINISTIC  ``1``: no decision depends on timing, so runs have the same bits. Links are not       0
                        measured: without PACELINE_RATE and PACELINE_LATENCY, algorithms are chosen for
                        ``10gbit`` and ``30us``. Late ranks are not searched for, and DataParallel keeps its
                        first bucket size and order, without early all-reduces. Rank 0's holds for all ranks
PACELINE_HOST_TIMEOUT   how long another host may leave packets unanswered before its ranks count as dead,    10s
                        like ``30s``; ``0s``: until the group's own timeout. A rank that is late, stopped
                        or swapped out is not affected: its kernel still answers
PACELINE_CONGESTION     TCP's congestion control between hosts, like ``bbr``, which keeps queues in switches  the
                        short, so that small collectives need not wait behind large ones                      system's
PACELINE_MULTICAST      ``on``: each group tries whether packets reach all its ranks, and uses multicast      auto
                        where it pays; ``auto``: only between hosts and where rank 0's PACELINE_ALGORITHM
                        or ``Options`` name an algorithm with multicasts; ``off``: never. Rank 0's holds
                        for all ranks, as for the next two
PACELINE_MCAST_ADDRESS  where multicast packets of all groups go, like ``239.193.1.2`` or ``ff15::1:2``       the
                                                                                                              group's
                                                                                                              own
PACELINE_MCAST_PORTS    to which UDP ports: each group takes one of them                                      47000-
                                                                                                              47999
PACELINE_SECRET_FILE    the file with the secret of a decentralised job, which its workers and ``paceline     none
                        generator`` share; only its owner may be able to read it
PACELINE_LOG            what the core says on standard error: debug, info, warning, error or off              warning
======================  ====================================================================================  =======
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from paceline.errors import UsageError
from paceline.ir.collective import MAX_RANKS, Kind
from paceline.policy.stragglers import parse
from paceline.units import parse_duration, parse_rate

_T = TypeVar("_T")

_log = logging.getLogger("paceline")

LOG_LEVELS = ("debug", "info", "warning", "error", "off")


@dataclass(frozen=True)
class Options:
    """Settings of one group: ``torch.distributed.new_group(..., pg_options=paceline.Options(algorithm="ring"))``.

    ``algorithm`` and ``late`` override PACELINE_ALGORITHM and PACELINE_LATE. ``in_turn=True`` is for groups with many
    collectives under way at once, whose results are needed in the order of the calls: between hosts a rank sends a
    collective only when at most one called before it is still under way there. All ranks of a group must pass the same.
    """

    algorithm: str | None = None
    late: str | None = None
    in_turn: bool = False


class Shared(NamedTuple):
    """The settings that all ranks of a group take from its rank 0."""

    deterministic: bool = False
    rate_bytes_per_s: float | None = None
    latency_s: float | None = None
    multicast: str = "auto"
    multicast_address: str = ""
    multicast_ports: tuple[int, int] = (47000, 47999)


@dataclass(frozen=True)
class Config:
    """What the variables say; see the table above."""

    algorithms: Mapping[Kind | None, str] = field(default_factory=dict)
    interface: str = ""
    use_shm: bool = True
    host_timeout_s: float = 10.0
    congestion: str = ""
    huge_pages: bool = True
    rate_bytes_per_s: float | None = None
    latency_s: float | None = None
    log_level: str = "warning"
    late: str = "auto"
    deterministic: bool = False
    in_turn: bool = False
    secret_file: Path | None = None
    multicast: str = "auto"
    multicast_address: str = ""
    multicast_ports: tuple[int, int] = (47000, 47999)

    def told(self, options: object) -> Config:
        """These settings, and what somebody has said in code for one group."""
        if options is None:
            return self
        if not isinstance(options, Options):
            raise UsageError(f"pg_options of a paceline group are paceline.Options, not {type(options).__name__}")
        algorithms = self.algorithms if options.algorithm is None else _parse_algorithms(options.algorithm)
        late = self.late if options.late is None else _parse_late(options.late)
        return replace(self, algorithms=algorithms, late=late, in_turn=options.in_turn)

    @property
    def shared(self) -> Shared:
        """The part of these settings that counts for all ranks, if this rank is rank 0."""
        return Shared(**{name: getattr(self, name) for name in Shared._fields})

    def following(self, of_rank_0: Shared) -> Config:
        """These settings with rank 0's in the place of this rank's own; logs a warning where they differ."""
        if of_rank_0 != self.shared:
            _warn_of_difference(self.shared, of_rank_0)
        return replace(self, **of_rank_0._asdict())

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Config:
        """Read the environment; nonsense gets a sentence that names the variable."""
        env = os.environ if environment is None else environment
        transport = env.get("PACELINE_TRANSPORT", "auto")
        if transport not in ("auto", "tcp"):
            raise UsageError(f"PACELINE_TRANSPORT is auto or tcp, not {transport!r}")
        huge_pages = env.get("PACELINE_HUGE_PAGES") or "auto"
        if huge_pages not in ("auto", "off"):
            raise UsageError(f"PACELINE_HUGE_PAGES is auto or off, not {huge_pages!r}")
        log_level = env.get("PACELINE_LOG", "warning").lower()
        if log_level not in LOG_LEVELS:
            raise UsageError(f"PACELINE_LOG is one of {', '.join(LOG_LEVELS)}, not {log_level!r}")
        deterministic = env.get("PACELINE_DETERMINISTIC") or "0"
        if deterministic not in ("0", "1"):
            raise UsageError(f"PACELINE_DETERMINISTIC is 0 or 1, not {deterministic!r}")
        multicast = env.get("PACELINE_MULTICAST") or "auto"
        if multicast not in ("auto", "on", "off"):
            raise UsageError(f"PACELINE_MULTICAST is auto, on or off, not {multicast!r}")
        host_timeout_s = _read(env, "PACELINE_HOST_TIMEOUT", parse_duration)
        return cls(
            algorithms=_read(env, "PACELINE_ALGORITHM", _parse_algorithms) or {},
            interface=env.get("PACELINE_IFNAME") or env.get("GLOO_SOCKET_IFNAME", ""),
            use_shm=transport == "auto",
            host_timeout_s=cls.host_timeout_s if host_timeout_s is None else host_timeout_s,
            congestion=env.get("PACELINE_CONGESTION", ""),
            huge_pages=huge_pages == "auto",
            rate_bytes_per_s=_read(env, "PACELINE_RATE", parse_rate),
            latency_s=_read(env, "PACELINE_LATENCY", parse_duration),
            log_level=log_level,
            late=_read(env, "PACELINE_LATE", _parse_late) or "auto",
            deterministic=deterministic == "1",
            secret_file=_read(env, "PACELINE_SECRET_FILE", Path),
            multicast=multicast,
            multicast_address=_read(env, "PACELINE_MCAST_ADDRESS", _parse_multicast_address) or "",
            multicast_ports=_read(env, "PACELINE_MCAST_PORTS", _parse_ports) or cls.multicast_ports,
        )


@functools.lru_cache  # each group would say the same
def _warn_of_difference(own: Shared, of_rank_0: Shared) -> None:
    _log.warning(
        "PACELINE_DETERMINISTIC, _RATE, _LATENCY or _MULTICAST differ between ranks; all take those of rank 0: "
        "%s, where this rank has %s. Set them alike on all ranks",
        _spelled(of_rank_0),
        _spelled(own),
    )


def _spelled(shared: Shared) -> str:
    rate = "not set" if shared.rate_bytes_per_s is None else f"{shared.rate_bytes_per_s:g} B/s"
    latency = "not set" if shared.latency_s is None else f"{shared.latency_s:g} s"
    first, last = shared.multicast_ports
    multicast = f"multicast {shared.multicast} at {shared.multicast_address or 'own addresses'}, ports {first}-{last}"
    return f"deterministic {int(shared.deterministic)}, rate {rate}, latency {latency}, {multicast}"


def variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that are set, for the records of what was measured."""
    env = os.environ if environment is None else environment
    return {name: value for name, value in sorted(env.items()) if name.startswith("PACELINE_")}


def _read(env: Mapping[str, str], name: str, parse: Callable[[str], _T]) -> _T | None:
    """A variable's value, or None where it is not set or empty."""
    if not env.get(name):
        return None
    try:
        return parse(env[name])
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def _parse_multicast_address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        address = None
    if address is None or not address.is_multicast:
        raise UsageError(f"a multicast address is one like 239.193.1.2 or ff15::1:2, not {text!r}")
    return str(address)


def _parse_ports(text: str) -> tuple[int, int]:
    """``47000-47999``, or one port."""
    first, dash, last = (part.strip() for part in text.partition("-"))
    ends = [first, last] if dash else [first, first]
    if not all(end.isdecimal() and 0 < int(end) < 1 << 16 for end in ends) or int(ends[0]) > int(ends[1]):
        raise UsageError(f"ports are written FIRST-LAST, from 1 to 65535, not {text!r}")
    return int(ends[0]), int(ends[1])


def _parse_late(text: str) -> str:
    """``auto``, ``off``, or late ranks as a choice has them."""
    late = text.strip().lower().replace(" ", "")
    if late not in ("auto", "off"):
        parse(late, MAX_RANKS)
    return late


def _parse_algorithms(text: str) -> dict[Kind | None, str]:
    """``ring`` for all collectives (key None), or ``allreduce:ring,broadcast:chain``."""
    chosen: dict[Kind | None, str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        kind, colon, name = entry.rpartition(":")
        chosen[Kind.parse(kind) if colon else None] = name.strip().lower()
    return chosen
