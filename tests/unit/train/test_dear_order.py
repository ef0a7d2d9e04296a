"""Order of use and the agreement of a step."""

from __future__ import annotations

from paceline.train.dear.control import Decision, agreement, words
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
    ranks = [
        words([True, False, False], [False, True], Decision(threshold_bytes=7_000_000)),
        words([True, True, False], [False, False], None),
        words([True, False, False], [False, True], None),
    ]
    sums = [sum(column) for column in zip(*ranks, strict=True)]
    agreed = agreement(sums, 3)
    assert agreed.used == (True, True, False)
    assert agreed.residual == (False, True)
    assert agreed.decision == Decision(False, 7_000_000)
    assert agreement(words([True], [False], Decision(learn_order=True)), 1).decision.learn_order
