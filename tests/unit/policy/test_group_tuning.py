"""The best group size and the rates of links, learnt from what workers report."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.group_tuning import GroupSizeSearch, LinkRates
from paceline.policy.grouping import choose_group_size


def _feed(search: GroupSizeSearch, current: int, requests: int, step_s: float, all_reduce_s: float) -> int:
    for _ in range(requests):
        search.observe(step_s, all_reduce_s * (current - 1) / current, current)
        current = search.choose(current, 16)
    return current


def test_the_size_follows_what_is_measured() -> None:
    search = GroupSizeSearch()
    assert _feed(search, 2, 200, step_s=0.1, all_reduce_s=0.02) == 16
    assert _feed(search, 16, 400, step_s=0.01, all_reduce_s=0.02) == 2
    assert _feed(search, 2, 400, step_s=0.017, all_reduce_s=0.02) == choose_group_size(0.017, 0.02, 16) == 4


def test_the_size_stays_without_measurements_or_others() -> None:
    search = GroupSizeSearch()
    for _ in range(100):
        search.observe(0.1, 0.0, 0)
        assert search.choose(4, 16) == 4
    for _ in range(100):
        search.observe(None, 0.1, 4)
        assert search.choose(4, 1) == 4


@given(st.integers(0, 2**32))
def test_outliers_and_a_short_change_do_not_move_the_size(seed: int) -> None:
    rng, search = random.Random(seed), GroupSizeSearch()
    size = _feed(search, 2, 200, step_s=0.1, all_reduce_s=0.02)
    for _ in range(200):
        liar = rng.random() < 0.3
        search.observe(rng.choice([1e-9, 1e9]) if liar else 0.1, rng.choice([1e-9, 1e9]) if liar else 0.01, 2)
        assert search.choose(size, 16) == size


def test_the_best_of_a_hosts_last_rates_counts() -> None:
    rates = LinkRates()
    rates.observe("a", average_s=1.0, average_bytes=1e9, group_size=4)  # 1.5 GB each
    rates.observe("a", average_s=3.0, average_bytes=1e9, group_size=4)
    assert rates.rate_bytes_per_s == {"a": 1.5e9}
    for _ in range(8):
        rates.observe("a", average_s=2.0, average_bytes=1e9, group_size=2)
    assert rates.rate_bytes_per_s == {"a": 0.5e9}


def test_a_rate_that_was_told_is_not_learnt() -> None:
    rates = LinkRates()
    rates.tell("a", 1e9)
    rates.observe("a", average_s=1.0, average_bytes=1e12, group_size=2)
    assert rates.rate_bytes_per_s == {"a": 1e9}
    rates.forget("a")
    assert rates.rate_bytes_per_s == {}


def test_averages_that_say_nothing_are_left_out() -> None:
    rates = LinkRates()
    for average_s, average_bytes, group_size in ((0.0, 1e9, 2), (1.0, 0.0, 2), (1.0, 1e9, 1), (1.0, 1e9, 0)):
        rates.observe("a", average_s, average_bytes, group_size)
    assert rates.rate_bytes_per_s == {}
    assert rates.changed(4) is None


def test_only_another_class_is_a_change() -> None:
    rates = LinkRates()
    rates.tell("a", 1e9)
    rates.tell("b", 0.9e9)
    assert rates.changed(4) == {"a": 1e9, "b": 0.9e9}
    for _ in range(100):
        rates.tell("b", 0.8e9)
        assert rates.changed(4) is None
    changes = 0
    for _ in range(100):
        rates.tell("b", 0.1e9)
        changes += rates.changed(4) is not None
    assert changes == 1
