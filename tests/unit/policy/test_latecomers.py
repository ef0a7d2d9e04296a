from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.latecomers import latecomers, lateness_s


def _spent(late_s: list[list[float]], transfer_s: float = 0.1) -> list[list[float]]:
    """What ranks spend that come so late in each step: until the last is there, and the transfer."""
    last = [max(step) for step in zip(*late_s, strict=True)]
    return [[end - late + transfer_s for end, late in zip(last, of_rank, strict=True)] for of_rank in late_s]


def test_a_rank_that_keeps_being_late() -> None:
    spent = _spent([[0.0] * 8, [0.004] * 8, [0.3, 0.3, 0.3, 0.0, 0.3, 0.3, 0.3, 0.3], [0.0] * 8])
    assert latecomers(spent, {}) == {2: 0.25}
    assert lateness_s(spent) == pytest.approx([0.0, 0.004, 0.3, 0.0])


def test_a_rank_that_is_late_now_and_then_is_not() -> None:
    assert latecomers(_spent([[0.0] * 4, [0.3, 0.3, 0.0, 0.0], [0.0] * 4]), {}) == {}


def test_two_at_once_each_by_its_own() -> None:
    assert latecomers(_spent([[0.0] * 4, [0.3] * 4, [0.0] * 4, [1.1] * 4, [0.0] * 4]), {}) == {1: 0.25, 3: 1.0}


def test_less_than_a_tenth_of_the_transfer_is_nothing() -> None:
    late = [[0.0] * 4, [0.05] * 4, [0.0] * 4]
    assert latecomers(_spent(late, transfer_s=1.0), {}) == {}
    assert latecomers(_spent(late, transfer_s=0.1), {}) == {1: 2.0**-5}
    assert latecomers(_spent(late, transfer_s=0.1), {}, least_s=0.1) == {}


def test_it_takes_more_to_become_late_than_to_stay_so() -> None:
    late = [[0.0] * 4, [0.007] * 4, [0.0] * 4]
    assert latecomers(_spent(late), {}, least_s=0.01) == {}
    assert latecomers(_spent(late), {1: 0.007}, least_s=0.01) == {1: 0.007}
    assert latecomers(_spent([[0.0] * 4] * 3), {1: 0.007}, least_s=0.01) == {}


@pytest.mark.parametrize(("late", "wanted"), [(0.4, 0.5), (0.9, 0.5), (1.4, 0.5), (1.6, 1.0), (0.3, 0.25)])
def test_what_was_decided_stays_while_lateness_wanders(late: float, wanted: float) -> None:
    assert latecomers(_spent([[0.0] * 4, [late] * 4, [0.0] * 4]), {1: 0.5}) == {1: wanted}


def test_when_most_are_late_nobody_is() -> None:
    assert latecomers(_spent([[0.0] * 4, [0.3] * 4, [0.3] * 4]), {}) == {}
    assert latecomers(_spent([[0.0] * 4, [0.3] * 4]), {}) == {1: 0.25}


@given(st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=6))
def test_never_all_and_never_nothing(spent: list[list[float]]) -> None:
    found = latecomers(spent, {})
    assert 2 * len(found) <= len(spent)
    assert all(0 < seconds <= 10 for seconds in found.values())
