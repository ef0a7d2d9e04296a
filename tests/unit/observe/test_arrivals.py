"""What is said of each rank's arrivals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.observe.arrivals import Arrival, arrival, lateness, metrics, news


def steps(*late_s: tuple[float, ...]) -> list[Arrival]:
    return [Arrival(seq, 1 << 20, "", late) for seq, late in enumerate(late_s, start=1)]


def test_the_line_people_read() -> None:
    seen = steps(*[(0.0, 0.001, 0.002, 0.213)] * 19, (0.0, 0.001, 0.002, 0.003))
    assert str(lateness(seen)[3]) == "rank 3 arrives 212 ms late in 19 of 20 steps"
    assert lateness(seen)[3].mostly
    assert not any(one.mostly for one in lateness(seen)[:3])
    assert lateness(seen)[0].times_late == 0


def test_news_only_when_something_changes() -> None:
    late, on_time = (0.0, 0.0, 0.5), (0.0, 0.0, 0.0)
    seen = steps(*[late] * 10)
    known, lines = news(frozenset(), lateness(seen))
    assert (known, lines) == (frozenset({2}), ["rank 2 arrives 500 ms late in 10 of 10 steps"])
    known, lines = news(known, lateness(seen + steps(late)))
    assert lines == []
    known, lines = news(known, lateness(seen + steps(*[on_time] * 7)))
    assert (known, lines) == (frozenset({2}), [])  # not late mostly, but often enough
    known, lines = news(known, lateness(steps(*[on_time] * 20)))
    assert (known, lines) == (frozenset(), ["rank 2 arrives in time again"])


def test_too_few_steps_are_no_news() -> None:
    assert news(frozenset(), lateness(steps(*[(0.0, 0.0, 0.5)] * 4))) == (frozenset(), [])
    assert lateness([]) == []


def test_numbers_for_metrics() -> None:
    seen = [arrival((7, 9, 4096, "2:100", (0.0, 0.0, 0.1))), arrival((8, 10, 4096, "", (0.0, 0.0, 0.3)))]
    numbers = metrics(seen)
    assert numbers["paceline_decisions_total"] == 2
    assert numbers["paceline_decisions_for_late_ranks_total"] == 1
    assert numbers['paceline_late_seconds{rank="2"}'] == pytest.approx(0.2)
    assert numbers['paceline_late_share{rank="2"}'] == 1


@given(st.lists(st.tuples(*[st.floats(0, 100)] * 4), min_size=1, max_size=40))
def test_spread_holds_the_middle(late_s: list[tuple[float, ...]]) -> None:
    for one in lateness(steps(*late_s)):
        assert one.low_s <= one.high_s
        assert 0 <= one.times_late <= one.steps == min(20, len(late_s))
