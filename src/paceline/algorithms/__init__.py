"""Collective algorithms, one a file: pure functions from a collective to a schedule.

Importing this package registers all of them; :data:`ALGORITHMS` is the table.
"""

from paceline.algorithms import (  # noqa: F401  (each registers itself)
    binomial,
    bruck,
    chain,
    direct,
    dissemination,
    doubling,
    halving_doubling,
    hierarchical,
    late_ranks,
    multicast,
    multicast_ring,
    one_shot,
    pairwise,
    pat,
    ring,
    stragglar,
    stragglar_multicast,
)
from paceline.algorithms.registry import ALGORITHMS, Algorithm, algorithm, build, find, prove, serving

__all__ = ["ALGORITHMS", "Algorithm", "algorithm", "build", "find", "prove", "serving"]
