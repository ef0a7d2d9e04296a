"""What each rank puts in and what must come out: small whole numbers, exact in every dtype.

A rank's data repeats a row of its own whose length is a prime, so that data that lands in the wrong place, or is
added twice, shows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]

PERIOD = 4099
POISON = 77
"""What receive buffers hold before: no result has this value everywhere."""


def given(operation: str, rank: int, num_ranks: int, count: int) -> Values:
    """The input of a rank."""
    return _run(_row(rank), 0, count // num_ranks if operation == "allgather" else count)


def expected(operation: str, rank: int, num_ranks: int, count: int) -> Values:
    """The result a rank must have."""
    share = count // num_ranks
    everyone = range(num_ranks)
    if operation == "allreduce":
        return _run(_sum(num_ranks), 0, count)
    if operation == "reducescatter":
        return _run(_sum(num_ranks), rank * share, share)
    if operation == "allgather":
        return np.concatenate([_run(_row(source), 0, share) for source in everyone])
    if operation == "alltoall":
        return np.concatenate([_run(_row(source), rank * share, share) for source in everyone])
    return _run(_row(0 if operation == "broadcast" else (rank - 1) % num_ranks), 0, count)


def _row(rank: int) -> Values:
    return np.random.default_rng(rank).integers(0, 4, PERIOD).astype(np.float32)


def _sum(num_ranks: int) -> Values:
    total: Values = np.stack([_row(rank) for rank in range(num_ranks)]).sum(axis=0, dtype=np.float32)
    return total


def _run(row: Values, start: int, length: int) -> Values:
    return np.resize(np.roll(row, -start), length)
