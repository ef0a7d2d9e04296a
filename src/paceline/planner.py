"""What the C++ backend asks of one process group: programs for its requests, rules and forecasts for late ranks."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.config import Config
from paceline.executors.native import program
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective, Kind
from paceline.observe.arrivals import Arrival, Raw, arrival, lateness, news
from paceline.policy import stragglers
from paceline.policy.planning import Plan
from paceline.policy.select import cluster_of, select

if TYPE_CHECKING:
    from paceline._c10d import Program

_log = logging.getLogger("paceline")
_HISTORY = 64
_ALIKE = 1.5


class Planner:
    """The planner of one group on one rank. All ranks have the same cluster and settings, so all plan the same.

    ``multicast`` says that a packet can reach all members at once. Where it cannot, no algorithm with multicasts runs.
    """

    def __init__(self, config: Config, rank: int, cluster: Cluster, *, multicast: bool = False) -> None:
        self._config = config
        self._rank = rank
        self._cluster = replace(cluster, multicast=multicast)
        self._roughly = _roughly(cluster)
        self._always = "" if config.late in ("auto", "off") else stragglers.within(config.late, cluster.num_ranks)
        asked_for = Kind.ALL_REDUCE in config.algorithms or None in config.algorithms
        waits = config.late == "auto" and not config.deterministic and not asked_for
        self.rules = stragglers.rules(cluster) if waits else None
        self._history: deque[Arrival] = deque(maxlen=_HISTORY)
        self._late_s: dict[int, float] = {}
        self._known_late: frozenset[int] = frozenset()

    def __call__(
        self, kind: str, root: int, size_bytes: int, exact: bool, choice: str, members: Sequence[int] = ()
    ) -> Program:
        """This rank's program for a request. Of ``members``, if they are some only, it is one by its place there."""
        if members:
            collective = Collective(Kind(kind), len(members), root)
            chosen = select(collective, self._roughly.among(members), size_bytes, exact=exact)
            return program(chosen.proof, list(members).index(self._rank))
        collective = Collective(Kind(kind), self._cluster.num_ranks, root)
        plain = select(collective, self._cluster, size_bytes, exact=exact, wanted=self._config.algorithms)
        chosen = stragglers.decide(collective, self._cluster, size_bytes, choice or self._always, plain)
        in_turn = self._config.in_turn
        if chosen is plain:
            return program(plain.proof, self._rank, in_turn=in_turn)
        return program(chosen.proof, self._rank, name=_title(chosen), in_order=True, in_turn=in_turn)

    def forecast(self, records: Sequence[Raw]) -> str:
        """On rank 0, with what was seen since the last time: the choice for collectives to come."""
        self._history.extend(map(arrival, records))
        self._known_late, lines = news(self._known_late, lateness(list(self._history)))
        for line in lines:
            _log.warning(line)
        per_byte_s = stragglers.seconds_per_byte(self._cluster)
        seen = [stragglers.Seen(one.size_bytes * per_byte_s, one.late_s) for one in self._history]
        self._late_s = stragglers.forecast(seen, self._late_s)
        return stragglers.spell(self._late_s)


class PartialPlanner:
    """The planner of workers that come and go, who know nothing of each other's hosts: each counts as a host."""

    rules = None

    def __init__(self, worker: int) -> None:
        self._worker = worker

    def __call__(
        self, kind: str, root: int, size_bytes: int, exact: bool, _choice: str, members: Sequence[int] = ()
    ) -> Program:
        """Return this worker's program for an operation of some workers."""
        cluster = cluster_of([str(place) for place in range(len(members))])
        chosen = select(Collective(Kind(kind), len(members), root), cluster, size_bytes, exact=exact)
        return program(chosen.proof, list(members).index(self._worker))


def _roughly(cluster: Cluster) -> Cluster:
    """Hosts whose links were measured to differ by little are alike: then most teams have the same plan.

    A team has no multicast: packets would reach all of its group.
    """

    def steps(rate: float) -> float:
        return _ALIKE ** round(math.log(rate, _ALIKE))

    hosts = [
        replace(host, up_bytes_per_s=steps(host.up_bytes_per_s), down_bytes_per_s=steps(host.down_bytes_per_s))
        for host in cluster.hosts
    ]
    return replace(cluster, hosts=tuple(hosts), multicast=False)


def _title(plan: Plan) -> str:
    """Like "stragglar(late=3, pieces=16)"."""
    shown = {name: value for name, value in plan.parameters.items() if name != "arrivals"}
    return f"{plan.algorithm}({', '.join(f'{name}={value}' for name, value in shown.items())})"
