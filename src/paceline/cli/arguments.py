"""What several verbs ask for: collectives, clusters, late ranks, sizes."""

from __future__ import annotations

import re

from paceline.errors import UsageError
from paceline.ir.cluster import PRESETS, Cluster
from paceline.ir.collective import Collective, Kind
from paceline.policy.planning import late_enough_s
from paceline.units import parse_duration, parse_size

_LATE = re.compile(r"([0-9]{1,6})(?::(.+))?")

CLUSTER_HELP = f"A preset ({', '.join(PRESETS)}) or a TOML/JSON file. Default: --ranks hosts with 10 GbE."
LATE_HELP = "RANK or RANK:DURATION, like 3:500ms; several times, or with commas. No duration: as late as matters."
SIZE_HELP = "Size of the buffer, like 64MB or 4KiB."
RANKS_HELP = "Number of ranks. Default: 8, or all of the cluster's."


def read_cluster(cluster: str | None, ranks: int | None) -> Cluster:
    """The cluster asked for, checked against the number of ranks asked for."""
    if cluster is None:
        return Cluster.uniform(8 if ranks is None else ranks, name="10 GbE", multicast=True)
    found = Cluster.named(cluster)
    if ranks is not None and ranks != found.num_ranks:
        raise UsageError(
            f"{found.name} has {found.num_ranks} ranks, not {ranks}; leave --ranks out or change the cluster"
        )
    return found


def read_late(late: list[str] | None, collective: Collective, cluster: Cluster, size_bytes: int) -> Cluster:
    """The cluster with the ranks late that --late names."""
    if not late:
        return cluster
    lateness: dict[int, float] = {}
    for entry in ",".join(late).split(","):
        match = _LATE.fullmatch(entry.strip())
        if match is None:
            raise UsageError(f"--late takes RANK or RANK:DURATION, like 3 or 3:500ms, not {entry!r}")
        duration = match.group(2)
        rank = int(match.group(1))
        if rank in lateness:
            raise UsageError(f"--late names rank {rank} twice")
        lateness[rank] = parse_duration(duration) if duration else late_enough_s(collective, cluster, size_bytes)
    return cluster.with_late(lateness)


def read_share(text: str, option: str) -> float:
    """A share that an option takes, like 1% or 0.01."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise UsageError(f"{option} is a share from 0 to less than 100%, like 1% or 0.01, not {text!r}")
    return share


def read_question(
    kind: str, ranks: int | None, cluster: str | None, late: list[str] | None, size: str, root: int = 0
) -> tuple[Collective, Cluster, int]:
    """The collective, the cluster with its late ranks, and the size in bytes."""
    size_bytes = parse_size(size)
    found = read_cluster(cluster, ranks)
    collective = Collective(Kind.parse(kind), found.num_ranks, root)
    return collective, read_late(late, collective, found, size_bytes), size_bytes
