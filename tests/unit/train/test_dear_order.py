"""Order of use and the agreement of a step."""

from __future__ import annotations

import pytest

from paceline.train.dear.control import Agreement, Decision, Standing, agreement, words
from paceline.train.dear.order import learnt, out_of_order, worth_learning


def test_order_is_that_of_first_uses() -> None:
    assert learnt([3, 1, 3, 0], 5) == [3, 1, 0, 2, 4]
    assert learnt([], 3) == [0, 1, 2]


def test_buckets_that_are_not_needed_are_no_offence() -> None:
    assert not out_of_order([0, 1, 4])
    assert not out_of_order([])
    assert out_of_order([0, 2, 1])


def test_patience_doubles() -> None:
    assert next(streak for streak in range(20) if worth_learning(streak, 1)) == 3
    assert next(streak for streak in range(20) if worth_learning(streak, 2)) == 6
    assert next(streak for streak in range(20) if worth_learning(streak, 3)) == 12


def test_ranks_agree_on_the_union_and_on_rank_0s_decision() -> None:
    goes_on, drops = Standing(4, False), Standing(4, True)
    ranks = [
        words([True, False, False], [False, True], Decision(threshold_bytes=7_000_000), [goes_on, None, None]),
        words([True, True, False], [False, False], None, [None, drops, None]),
        words([True, False, False], [False, True], None, [None, None, goes_on]),
    ]
    sums = [sum(column) for column in zip(*ranks, strict=True)]
    agreed = agreement(sums, 3, 3)
    assert agreed.used == (True, True, False)
    assert agreed.residual == (False, True)
    assert agreed.decision == Decision(False, 7_000_000)
    assert agreed.standings == (goes_on, drops, goes_on)
    for alone in (Decision(learn_order=True), Decision(num_early=0), Decision(num_early=3), Decision()):
        assert agreement(words([True], [False], alone, [Standing(0, False)]), 1, 1).decision == alone


@pytest.mark.parametrize(
    ("standings", "said"),
    [
        ([(4, False), (4, False)], None),
        ([(4, True), (4, True)], None),
        ([(4, False), (4, True), (4, True)], "no rank has made step 5, as rank 1, 2 dropped its gradients"),
        ([(4, False), (4, False), (3, False)], "rank 2 has made 3 steps and rank 0 4"),
        ([(3, True), (4, False), (4, False)], "rank 1 has made 4 steps and rank 0 3"),
    ],
)
def test_ranks_that_do_different_things_are_named(standings: list[tuple[int, bool]], said: str | None) -> None:
    found = Agreement((), (), Decision(), tuple(Standing(*one) for one in standings)).quarrel
    assert found is None if said is None else said in str(found)
