"""Several late ranks: proven for any pattern of arrivals, and as short as the construction's own record."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from paceline.algorithms import find
from paceline.algorithms.late_ranks import finish, round_bound
from paceline.algorithms.stragglar import num_rounds
from paceline.ir.collective import Collective, Kind
from paceline.ir.verify import verify


def _together(n: int, m: int, num_chunks: int) -> np.ndarray:
    """The early ranks have reduce-scattered; m late ranks come together."""
    parts = np.zeros((num_chunks, n), np.bool_)
    parts[np.arange(num_chunks), np.arange(num_chunks) % (n - m)] = True
    parts[:, n - m :] = True
    return parts


# rounds / chunks for n ranks of which m come together, pieces = 1 and 4
RECORD = {
    (4, 2): (1.5, 1.25),
    (6, 3): (1.667, 1.417),
    (8, 2): (1.5, 1.219),
    (8, 4): (1.75, 1.375),
    (12, 3): (1.5, 1.25),
    (16, 8): (1.813, 1.5),
}


@pytest.mark.parametrize(("n", "m"), RECORD)
def test_finish_is_as_short_as_recorded(n: int, m: int) -> None:
    for pieces, ratio in zip((1, 4), RECORD[n, m], strict=True):
        parts = _together(n, m, pieces * n)
        rounds = finish(parts).num_steps
        assert rounds / (pieces * n) == pytest.approx(ratio, abs=5e-4)
        assert rounds >= round_bound(parts)


@given(data=st.data(), n=st.integers(2, 14), pieces=st.integers(1, 3))
@examples(60)
def test_any_pattern_proves_with_least_traffic_and_one_port(data: st.DataObject, n: int, pieces: int) -> None:
    arrivals = data.draw(st.lists(st.integers(0, 3 * n * pieces), min_size=n, max_size=n))
    schedule = find("late_ranks")(Collective(Kind.ALL_REDUCE, n), arrivals=tuple(arrivals), pieces=pieces)
    proof = verify(schedule)
    assert (proof.most_sends_at_once, proof.most_receives_at_once) == (1, 1)
    assert len(schedule.transfers) == 2 * (n - 1) * schedule.num_chunks  # the least possible


@pytest.mark.parametrize("n", [3, 4, 6, 8, 11])
def test_ranks_a_buffer_time_apart_end_as_one_late_rank_does(n: int) -> None:
    """Absorbed one by one, only the last one counts: the round-optimal exchange."""
    pieces = 2
    for m in (2, 3):
        if m >= n:
            continue
        arrivals = [0] * (n - m) + [2 * pieces * n * (i + 1) for i in range(m)]
        schedule = find("late_ranks")(Collective(Kind.ALL_REDUCE, n), arrivals=tuple(arrivals), pieces=pieces)
        verify(schedule)
        last = n - 1
        table = schedule.transfers
        first_use = int(table.step[(table.source == last) | (table.destination == last)].min())
        buffer_times = (schedule.num_steps - first_use) / schedule.num_chunks
        assert buffer_times <= num_rounds(n, pieces) / (pieces * (n - 1))
