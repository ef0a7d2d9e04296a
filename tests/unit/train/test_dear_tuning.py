"""The search for a fusion threshold, on curves whose best point is known, and its file."""

from __future__ import annotations

import itertools
import logging
import math
from pathlib import Path

import pytest

from paceline.errors import FileFormatError, UsageError
from paceline.policy.fusion import TRIALS, Trial, best, next_threshold
from paceline.train.dear.laps import STEPS_PER_TRIAL, Laps
from paceline.train.dear.tuning import HIGH_BYTES, LOW_BYTES, Tuner, load, make_tuner, save


def _iteration_s(threshold_bytes: float, best_bytes: float) -> float:
    """Start-up costs of small buckets on the one side, lost overlap of large ones on the other."""
    distance = math.log2(threshold_bytes / best_bytes)
    return 0.3 + 0.01 * distance**2 if distance > 0 else 0.3 + 0.02 * distance**2


def test_a_trial_that_was_fast_by_chance_is_not_the_best() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    slope = [Trial(size * 1_000_000, 1.0 + 0.02 * number) for number, size in enumerate(sizes)]
    lucky = Trial(64_000_000, 0.99)
    trials = [*slope[:6], lucky, *slope[6:]]
    assert best(trials).threshold_bytes <= 4_000_000
    assert best(trials, use_library=False) is lucky


@pytest.mark.parametrize("best_bytes", [2e6, 8e6, 25e6, 70e6, 200e6])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_the_search_ends_within_three_percent_of_a_grid(best_bytes: float, noise: float) -> None:
    trials: list[Trial] = []
    for number in range(TRIALS):
        threshold = next_threshold(trials, LOW_BYTES, HIGH_BYTES) if trials else 25_000_000
        trials.append(Trial(threshold, _iteration_s(threshold, best_bytes) * (1 + noise * math.sin(7.0 * number))))
    grid = [LOW_BYTES * (HIGH_BYTES / LOW_BYTES) ** (step / 11) for step in range(12)]
    found_s = _iteration_s(best(trials).threshold_bytes, best_bytes)
    assert found_s <= 1.03 * min(_iteration_s(point, best_bytes) for point in grid)


def test_without_the_library_the_range_is_covered() -> None:
    trials: list[Trial] = []
    for _ in range(TRIALS):
        trials.append(Trial(next_threshold(trials, LOW_BYTES, HIGH_BYTES, use_library=False), 1.0))
    points = sorted(math.log(trial.threshold_bytes / LOW_BYTES) for trial in trials)
    gaps = [right - left for left, right in itertools.pairwise(points)]
    assert max(gaps) < 0.3 * math.log(HIGH_BYTES / LOW_BYTES)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_tuner_stays_within_sixty_iterations_and_saves(tmp_path: Path) -> None:
    clock, path = Clock(), tmp_path / "a" / "fusion.json"
    tuner = Tuner(25_000_000, searching=True, path=path, laps=Laps(clock))
    iterations = 0
    while tuner.searching:
        iterations += 1
        clock.now_s += _iteration_s(tuner.threshold_bytes, 5e6)
        chosen = tuner.next_threshold_bytes()
        if chosen:
            tuner.follow(chosen)
    assert iterations <= 60
    assert len(tuner.trials) == TRIALS
    assert iterations >= TRIALS * STEPS_PER_TRIAL
    assert load(path) == tuner.threshold_bytes == best(tuner.trials).threshold_bytes
    again = make_tuner("auto", path, 10**9)
    assert (again.threshold_bytes, again.searching) == (tuner.threshold_bytes, False)


def test_a_small_model_is_searched_from_a_hundredth_on() -> None:
    model_bytes, clock = 20_000_000, Clock()
    tuner = make_tuner("auto", None, model_bytes)
    tuner._laps = Laps(clock)
    while tuner.searching:
        clock.now_s += _iteration_s(tuner.threshold_bytes, 5e5)
        if chosen := tuner.next_threshold_bytes():
            tuner.follow(chosen)
    tried = [trial.threshold_bytes for trial in tuner.trials]
    assert min(tried) >= model_bytes // 100
    assert max(tried) <= model_bytes
    assert tuner.threshold_bytes < 1_000_000


def test_a_large_model_has_no_more_than_twenty_buckets_by_default() -> None:
    assert make_tuner(None, None, 100_000_000).threshold_bytes == 25_000_000
    assert make_tuner(None, None, 1_344_929_032).threshold_bytes == 67_246_451
    assert not make_tuner(None, None, 10**9).searching


def test_without_clocks_there_is_no_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.dear")
    path = tmp_path / "fusion.json"
    for model_bytes in (1_000_000, 10**9):
        tuner = make_tuner("auto", path, model_bytes, may_search=False)
        assert tuner.threshold_bytes == make_tuner(None, None, model_bytes).threshold_bytes
        assert not tuner.searching
    assert [line.getMessage() for line in caplog.records] == [
        "fusion: no search, as PACELINE_DETERMINISTIC is set: 25 MB are fused",
        "fusion: no search, as PACELINE_DETERMINISTIC is set: 50 MB are fused",
    ]
    save(path, 7_000_000, [])
    assert make_tuner("auto", path, 10**9, may_search=False).threshold_bytes == 7_000_000
    assert make_tuner(3, None, 10**9, may_search=False).threshold_bytes == 3_000_000


def test_files_and_arguments_that_make_no_sense(tmp_path: Path) -> None:
    for number, text in enumerate(['{"threshold_bytes": "x"}', "[]", "x", '{"threshold_bytes": -1}']):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(FileFormatError, match="delete"):
            load(path)
    with pytest.raises(UsageError, match="megabytes"):
        make_tuner("much", None, 10)
    with pytest.raises(UsageError, match="positive"):
        make_tuner(float("nan"), None, 10)
