"""How many buckets are all-reduced in backpropagation: the search, and when rank 0 searches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.policy.early import SLACK, Trial, next_num_early
from paceline.train.dear.lookout import LOOK_AGAIN_STEPS, STEPS_PER_TRIAL, WARM_UP_STEPS, Lookout

ITERATION_S = 1.0


@given(st.lists(st.floats(0.0, 0.1), min_size=1, max_size=60))
def test_the_search_finds_the_most_that_does_not_lag(steps_s: list[float]) -> None:
    lags_s = [sum(steps_s[: number + 1]) for number in range(len(steps_s))]
    trials = [Trial(0, lags_s[0], ITERATION_S)]
    while (chosen := next_num_early(trials, len(lags_s) - 1)) not in [trial.num_early for trial in trials]:
        trials.append(Trial(chosen, lags_s[chosen], ITERATION_S))
    allowed = [number for number, lag_s in enumerate(lags_s) if lag_s <= lags_s[0] + SLACK * ITERATION_S]
    assert chosen == max(allowed)
    assert len(trials) <= 1 + len(lags_s).bit_length()


@given(st.integers(0, 60), st.data())
def test_a_search_ends_whatever_it_sees(most: int, data: st.DataObject) -> None:
    trials = [Trial(0, 0.5, ITERATION_S)]
    while (chosen := next_num_early(trials, most)) not in [trial.num_early for trial in trials]:
        assert 0 < chosen <= most
        trials.append(Trial(chosen, data.draw(st.floats(0.0, 1.0)), ITERATION_S))
    assert len(trials) <= 1 + most.bit_length()


class Links:
    """A step takes a second; more than this many early buckets make reductions lag."""

    def __init__(self, fit: int) -> None:
        self.fit = fit
        self.now_s = 0.0

    def run(self, lookout: Lookout, steps: int) -> list[int]:
        """The number in force in each step; what is decided in one holds from the next on."""
        ran, num_early = [], lookout._num_early
        for _ in range(steps):
            self.now_s += ITERATION_S
            ran.append(num_early)
            decided = lookout.next_num_early()
            lookout.saw(0.01 if num_early <= self.fit else 0.2)
            num_early = num_early if decided is None else decided
        return ran


def test_rank_0_tries_keeps_what_it_found_and_looks_again() -> None:
    links = Links(fit=13)
    lookout = Lookout(20, clock=lambda: links.now_s)
    search_steps = (1 + STEPS_PER_TRIAL) * (1 + (20).bit_length())
    ran = links.run(lookout, WARM_UP_STEPS + 2 + search_steps)
    assert set(ran[:WARM_UP_STEPS]) == {0}
    assert ran[-1] == 13
    links.fit = 2
    assert set(links.run(lookout, LOOK_AGAIN_STEPS - search_steps)) == {13}
    again = links.run(lookout, 3 * search_steps)
    assert 0 in again
    assert again[-1] == 2


def test_one_bucket_is_never_all_reduced() -> None:
    links = Links(fit=0)
    assert set(links.run(Lookout(1, clock=lambda: links.now_s), 50)) == {0}
