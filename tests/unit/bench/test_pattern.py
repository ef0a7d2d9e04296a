"""The expected results, against what the collective means, computed the slow way from all inputs."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.bench.rank_process.pattern import Values, expected, given

COUNT = 3 * 5000  # longer than the pattern, and shared by three


def _meaning(operation: str, rank: int, inputs: list[Values]) -> Values:
    num_ranks = len(inputs)
    if operation == "allgather":
        return np.concatenate(inputs)
    if operation == "broadcast":
        return inputs[0]
    if operation == "sendrecv":
        return inputs[(rank - 1) % num_ranks]
    parts = [np.split(one, num_ranks) for one in inputs]
    if operation == "alltoall":
        return np.concatenate([part[rank] for part in parts])
    total = np.sum(inputs, axis=0)
    return total if operation == "allreduce" else np.split(total, num_ranks)[rank]


@pytest.mark.parametrize("operation", ["allreduce", "allgather", "reducescatter", "broadcast", "alltoall", "sendrecv"])
def test_expected_is_what_the_collective_means(operation: str) -> None:
    inputs = [given(operation, rank, 3, COUNT) for rank in range(3)]
    for rank in range(3):
        np.testing.assert_array_equal(expected(operation, rank, 3, COUNT), _meaning(operation, rank, inputs))


def test_ranks_differ_and_values_are_exact_in_small_types() -> None:
    rows = [given("allreduce", rank, 8, COUNT) for rank in range(8)]
    assert all((rows[0] != row).any() for row in rows[1:])
    assert expected("allreduce", 0, 8, COUNT).max() <= 127
