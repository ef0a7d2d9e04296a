"""Pairwise exchange: the all-to-all that keeps every port busy with one partner at a time."""

from __future__ import annotations

import numpy as np

from paceline.algorithms.registry import Draft, algorithm
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers


@algorithm(Kind.ALL_TO_ALL, max_ranks=1024)
def pairwise(collective: Collective) -> Draft:
    """In step t, rank r sends to rank r + t what is meant for it.

    Any n up to 1024 (n^2 chunks). Steps: n - 1. Bytes a rank sends and receives: (n - 1)/n of its buffer, which is
    optimal. Lateness: only the messages from and to the late rank wait, but a port serves them in order.

    Source: Thakur, Rabenseifner and Gropp, 2005.
    """
    ranks = collective.num_ranks
    distance, rank = np.ogrid[1:ranks, :ranks]
    target = (rank + distance) % ranks
    return ranks * ranks, Transfers(step=distance, source=rank, destination=target, chunk=rank * ranks + target)
