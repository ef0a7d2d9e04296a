"""How many buckets are all-reduced in backpropagation: the search, and when rank 0 searches."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.early import MOST_TRIALS, Trial, early_buckets, next_num_early
from paceline.train.dear.laps import STEPS_PER_TRIAL, Laps
from paceline.train.dear.lookout import LOOK_AGAIN_STEPS, WARM_UP_STEPS, Lookout

SEARCH_STEPS = STEPS_PER_TRIAL * MOST_TRIALS


@given(st.integers(0, 60), st.data())
def test_a_search_ends_with_the_best_it_has_seen(most: int, data: st.DataObject) -> None:
    trials: list[Trial] = []
    while (chosen := next_num_early(trials, most)) not in [trial.num_early for trial in trials]:
        assert 0 <= chosen <= most
        trials.append(Trial(chosen, data.draw(st.floats(0.1, 1.0))))
    assert len(trials) <= MOST_TRIALS
    assert Trial(chosen, min(trial.iteration_s for trial in trials)) in trials
    assert {0, most} <= {trial.num_early for trial in trials}


@pytest.mark.parametrize("best", range(23))
def test_a_valley_is_found(best: int) -> None:
    trials: list[Trial] = []
    while (chosen := next_num_early(trials, 22)) not in [trial.num_early for trial in trials]:
        trials.append(Trial(chosen, 1.0 + 0.01 * abs(chosen - best)))
    assert abs(chosen - best) <= 1


class Links:
    """An iteration takes a second, less a little for each early bucket up to a number, and more for each beyond."""

    def __init__(self, fit: int) -> None:
        self.fit = fit
        self.now_s = 0.0
        self.num_early = 0

    def run(self, lookout: Lookout, steps: int) -> list[int]:
        """The number in force in each iteration; what is decided at its end holds from the next on."""
        ran = []
        for _ in range(steps):
            ran.append(self.num_early)
            self.now_s += 1.0 + 0.01 * abs(self.num_early - self.fit)
            decided = lookout.next_num_early()
            self.num_early = self.num_early if decided is None else decided
        return ran


def test_rank_0_tries_keeps_what_it_found_and_looks_again() -> None:
    links = Links(fit=13)
    lookout = Lookout(21, Laps(lambda: links.now_s))
    ran = links.run(lookout, WARM_UP_STEPS + SEARCH_STEPS + 2)
    assert set(ran[:WARM_UP_STEPS]) == {0}
    found = ran[-1]
    assert abs(found - 13) <= 1
    links.fit = 2
    assert set(links.run(lookout, LOOK_AGAIN_STEPS - SEARCH_STEPS)) == {found}
    again = links.run(lookout, 3 * SEARCH_STEPS)
    assert 0 in again
    assert abs(again[-1] - 2) <= 1


def test_one_bucket_is_never_all_reduced() -> None:
    links = Links(fit=0)
    assert set(links.run(Lookout(1, Laps(lambda: links.now_s)), 100)) == {0}


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 8, 23])
def test_early_buckets_are_as_many_as_asked_and_spread(num_buckets: int) -> None:
    for num_early in range(num_buckets):
        early = early_buckets(num_early, num_buckets)
        assert len(early) == num_buckets
        assert sum(early) == num_early
        assert not early[0]
        places = [number for number, one in enumerate(early) if one]
        assert all(b - a <= -(-(num_buckets - 1) // num_early) for a, b in itertools.pairwise(places))
