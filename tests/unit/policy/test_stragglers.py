"""Who is late, whether that matters, and what to do about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective, Kind
from paceline.ir.cost import cost
from paceline.policy import stragglers
from paceline.policy.select import select
from paceline.policy.stragglers import Seen, decide, forecast, lateness, parse, rules, spell, within

LAN = Cluster.preset("lan8")
SIZE = 1 << 26
BUFFER_S = SIZE * stragglers.seconds_per_byte(LAN)
QUESTION = Collective(Kind.ALL_REDUCE, 8)


def seen(late: dict[int, float], jitter: float = 0.0, ranks: int = 8) -> Seen:
    """Ranks late by so many buffer times; the others jitter a little."""
    return Seen(BUFFER_S, [BUFFER_S * late.get(rank, jitter * (rank % 3) / 3) for rank in range(ranks)])


def follow(history: list[Seen], least_s: float = 0.0) -> list[dict[int, float]]:
    """The forecast after each collective."""
    told: list[dict[int, float]] = []
    for end in range(1, len(history) + 1):
        told.append(forecast(history[:end], told[-1] if told else {}, least_s))
    return told


def test_rules_say_who_waits() -> None:
    found = rules(LAN)
    assert found is not None
    assert 1 << 21 < found.least_bytes < 1 << 25
    assert found.most_late == 3
    assert found.patience_s_per_byte * SIZE == pytest.approx(0.6 * BUFFER_S)
    assert rules(LAN.resized(2)) is None
    assert rules(Cluster.preset("gpu8")) is None


@pytest.mark.parametrize("text", ["x", "3:", "3:x", "8", "3,3", "3:1.5", "-1", "3;4", "3:" + "9" * 30])
def test_choices_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="late"):
        parse(text, 8)


@given(st.dictionaries(st.integers(0, 7), st.integers(1, 100_000).map(lambda ms: ms / 1e3)))
def test_what_is_spelled_is_parsed(late_s: dict[int, float]) -> None:
    assert parse(spell(late_s), 8) == pytest.approx(late_s)


def test_a_choice_for_a_smaller_group() -> None:
    assert within("2:400,5,7:1", 6) == "2:400,5"
    assert within("7", 6) == ""


@examples(20)
@given(
    late=st.dictionaries(st.integers(0, 7), st.integers(1, 4000) | st.none(), max_size=3),
    size_bytes=st.integers(16, 27).map(lambda power: 1 << power),
)
def test_never_dearer_than_the_plain_plan(late: dict[int, int | None], size_bytes: int) -> None:
    plain = select(QUESTION, LAN, size_bytes)
    choice = ",".join(f"{rank}" if ms is None else f"{rank}:{ms}" for rank, ms in late.items())
    chosen = decide(QUESTION, LAN, size_bytes, choice, plain)
    if chosen is plain:
        return
    told = {rank: (chosen.cluster.late_s[rank] if ms is None else ms / 1e3) for rank, ms in late.items()}
    behind = LAN.with_late(told)
    assert cost(chosen.schedule, behind, size_bytes).exposed_s <= cost(plain.schedule, behind, size_bytes).exposed_s


def test_one_late_rank_gets_stragglar_and_a_little_lateness_the_ring() -> None:
    plain = select(QUESTION, LAN, SIZE)
    assert decide(QUESTION, LAN, SIZE, "3", plain).algorithm == "stragglar"
    assert decide(QUESTION, LAN, SIZE, "3", plain).parameters["late"] == 3
    assert decide(QUESTION, LAN, SIZE, f"3:{round(0.1e3 * BUFFER_S)}", plain) is plain
    assert decide(QUESTION, LAN, SIZE, f"3:{round(0.4e3 * BUFFER_S)}", plain).algorithm == "stragglar"
    assert decide(QUESTION, LAN, SIZE, "2,5", plain).algorithm == "late_ranks"
    assert decide(QUESTION, LAN, SIZE, "", plain) is plain
    gather = Collective(Kind.ALL_GATHER, 8)
    plain = select(gather, LAN, SIZE)
    assert decide(gather, LAN, SIZE, "3", plain) is plain


def test_late_behind_the_rest() -> None:
    assert lateness(seen({3: 1.0}, jitter=0.1), 0.2 * BUFFER_S) == pytest.approx({3: (1 - 0.2 / 3) * BUFFER_S})
    assert lateness(seen({3: 1.0, 5: 2.0}), 0.2 * BUFFER_S) == pytest.approx({3: BUFFER_S, 5: 2 * BUFFER_S})
    assert lateness(seen({}), 0.2 * BUFFER_S) == {}
    assert lateness(seen(dict.fromkeys(range(1, 8), 1.0)), 0.2 * BUFFER_S) == {}  # one early rank is no late one


def test_a_persistent_straggler_is_found_and_one_step_is_not() -> None:
    told = follow([seen({3: 1.0})] * 8)
    assert [set(late) for late in told] == [set()] * 3 + [{3}] * 5
    assert BUFFER_S / 1.5 < told[-1][3] <= BUFFER_S
    assert not any(follow([seen({3: 1.0} if step % 4 == 0 else {}) for step in range(40)]))


def test_a_straggler_that_changes_or_recovers() -> None:
    told = follow([seen({3: 1.0})] * 6 + [seen({5: 1.0})] * 6 + [seen({})] * 3)
    assert set(told[5]) == {3}
    assert set(told[11]) == {5}
    assert told[-1] == {}


def test_hysteresis() -> None:
    on_the_edge = [seen({3: 0.3 + 0.1 * (step % 2)}) for step in range(20)]
    assert not any(follow(on_the_edge))
    told = follow([seen({3: 0.6})] * 5 + on_the_edge)
    assert all(set(late) == {3} for late in told[4:])
    steady = follow([seen({3: 1.0 + 0.3 * (step % 3)}) for step in range(30)])
    assert len({late[3] for late in steady if late}) <= 2


def test_what_ranks_spent_tells_who_came_when() -> None:
    found = Seen.inside([0.5, 0.4, 0.1, 0.5])
    assert found.late_s == pytest.approx([0.0, 0.1, 0.4, 0.0])
    assert found.buffer_s == pytest.approx(0.1 * 4 / 6)


def test_two_at_once_each_by_its_own() -> None:
    told = follow([Seen(0.1, [0.0, 0.3, 0.0, 1.1, 0.0])] * 5)[-1]
    assert told.keys() == {1, 3}
    assert 0.3 / 1.5 < told[1] <= 0.3
    assert 1.1 / 1.5 < told[3] <= 1.1


def test_a_lateness_below_the_least_is_none_unless_it_was_one() -> None:
    late = [Seen(0.001, [0.0, 0.007, 0.0])] * 5
    assert follow(late)[-1].keys() == {1}
    assert follow(late, least_s=0.01)[-1] == {}
    assert forecast(late, {1: 0.007}, least_s=0.01) == {1: 0.007}
    assert forecast(late, {1: 0.007}, least_s=0.02) == {}


def test_when_most_are_late_nobody_is() -> None:
    assert follow([Seen(0.1, [0.0, 0.3, 0.3])] * 5)[-1] == {}
    assert follow([Seen(0.1, [0.0, 0.3])] * 5)[-1] == {}  # nothing is gained between two


@given(st.lists(st.lists(st.floats(0, 0.2), min_size=8, max_size=8), max_size=30))
def test_jitter_alone_never_counts(steps: list[list[float]]) -> None:
    history = [Seen(BUFFER_S, [BUFFER_S * late for late in step]) for step in steps]
    assert not any(follow(history))


@given(st.lists(st.lists(st.floats(0, 5), min_size=8, max_size=8), min_size=1, max_size=12))
def test_forecasts_are_few_ranks_and_whole_choices(steps: list[list[float]]) -> None:
    for late in follow([Seen(BUFFER_S, step) for step in steps]):
        assert len(late) <= 3
        assert all(0 < seconds <= 5 for seconds in late.values())
        assert parse(spell(late), 8) == pytest.approx(late, abs=5e-4)
