"""Paceline: collectives that keep the pace when a worker is late, a host is slow or the network is thin.

An algorithm is data. Make a schedule, prove it, price it::

    from paceline import Cluster, Collective, Kind, plan

    collective = Collective(Kind.ALL_REDUCE, num_ranks=8)
    cluster = Cluster.preset("lan8").with_late({3: 0.5})
    best = plan(collective, cluster, 64e6, "stragglar")
    print(best.proof.num_messages, best.cost.exposed_s, best.cost.ratio)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.algorithms import ALGORITHMS, algorithm, prove
from paceline.backend import arrivals
from paceline.config import Options
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
    from paceline import hooks
    from paceline.collectives import all_reduce
    from paceline.partial import partial_all_reduce
    from paceline.train.dear.scaler import GradScaler
    from paceline.train.dear.wrapper import DataParallel
    from paceline.train.decentralized.wrapper import Decentralized

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Cluster",
    "Collective",
    "Cost",
    "DataParallel",
    "Decentralized",
    "FileFormatError",
    "GradScaler",
    "Host",
    "Kind",
    "Options",
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
    "all_reduce",
    "arrivals",
    "compare",
    "cost",
    "hooks",
    "load",
    "partial_all_reduce",
    "plan",
    "prove",
    "save",
    "verify",
]

_NEED_TORCH = {
    "DataParallel": "paceline.train.dear.wrapper:DataParallel",
    "Decentralized": "paceline.train.decentralized.wrapper:Decentralized",
    "GradScaler": "paceline.train.dear.scaler:GradScaler",
    "all_reduce": "paceline.collectives:all_reduce",
    "hooks": "paceline.hooks:",
    "partial_all_reduce": "paceline.partial:partial_all_reduce",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for: everything else works without waiting for that."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    from importlib import import_module

    where, _, what = _NEED_TORCH[name].partition(":")
    module = import_module(where)
    globals()[name] = getattr(module, what) if what else module
    return globals()[name]
