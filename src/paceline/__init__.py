"""Paceline: collectives that keep the pace when a worker is late, a host is slow or the network is thin.

An algorithm is data. Make a schedule, prove it, price it::

    from paceline import Cluster, Collective, Kind, plan

    collective = Collective(Kind.ALL_REDUCE, num_ranks=8)
    cluster = Cluster.preset("lan8").with_late({3: 0.5})
    best = plan(collective, cluster, 64e6, "stragglar")
    print(best.proof.num_messages, best.cost.exposed_s, best.cost.ratio)
"""

from typing import TYPE_CHECKING, Any

from paceline.algorithms import ALGORITHMS, algorithm, prove
from paceline.backend import arrivals
from paceline.errors import (
    FileFormatError,
    PacelineError,
    ProofError,
    ScheduleError,
    UnsupportedError,
    UsageError,
)
from paceline.ir.cluster import Cluster, Host
from paceline.ir.collective import Collective, Kind
from paceline.ir.cost import Cost, cost
from paceline.ir.files import load, save
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfer, Transfers
from paceline.ir.verify import Proof, verify
from paceline.policy.planning import Plan, compare, plan

if TYPE_CHECKING:
    from paceline.train.dear.wrapper import DataParallel

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Cluster",
    "Collective",
    "Cost",
    "DataParallel",
    "FileFormatError",
    "Host",
    "Kind",
    "PacelineError",
    "Plan",
    "Proof",
    "ProofError",
    "Schedule",
    "ScheduleError",
    "Transfer",
    "Transfers",
    "UnsupportedError",
    "UsageError",
    "algorithm",
    "arrivals",
    "compare",
    "cost",
    "load",
    "plan",
    "prove",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    """``DataParallel`` is imported when it is first asked for: it needs torch, and nothing else here does."""
    if name == "DataParallel":
        from paceline.train.dear.wrapper import DataParallel

        return DataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
