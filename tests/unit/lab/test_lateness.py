"""Lateness: what --late and PACELINE_LAB_LATE may say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.lab import late_s
from paceline.lab.lateness import format_late, parse_late


def test_nobody_is_late_unless_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_LAB_LATE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert late_s() == 0.0
    monkeypatch.setenv("PACELINE_LAB_LATE", "")
    assert late_s() == 0.0


def test_a_rank_knows_how_late_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LAB_LATE", "3:500ms, 5:1.5s")
    for rank, expected in ((0, 0.0), (3, 0.5), (5, 1.5)):
        monkeypatch.setenv("RANK", str(rank))
        assert late_s() == expected


@pytest.mark.parametrize("text", ["3", "3:", "3:500", "x:5s", "-1:5s", "3:5s,,", "3:5s,3:6s", "3 500ms"])
def test_nonsense_is_refused_by_its_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LAB_LATE", text)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UsageError, match="PACELINE_LAB_LATE makes no sense: "):
        late_s()


@pytest.mark.parametrize("rank", ["", "three"])
def test_a_process_without_a_rank_is_told(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LAB_LATE", "3:500ms")
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(UsageError, match="start it with paceline lab or torchrun"):
        late_s()


@given(st.dictionaries(st.integers(0, 999), st.integers(1, 10**10)))
def test_what_is_written_is_read(late_us: dict[int, int]) -> None:
    late = {rank: microseconds / 1e6 for rank, microseconds in late_us.items()}
    assert parse_late(format_late(late)) == pytest.approx(late)
