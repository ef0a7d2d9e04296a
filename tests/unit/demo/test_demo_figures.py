"""From what ranks say to the figures of the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.demo import figures
from paceline.demo.figures import Training, complement
from paceline.demo.messages import Finished, Step, Strategy
from paceline.demo.picture import panel_of
from paceline.demo.table import large_algorithms, same_accuracy
from paceline.draw.timelines import Activity


def _training(iterations: int = 12) -> Training:
    """Iterations of 1 s; rank 1 loads for 0.4 s and waits for 0.1 s, rank 0 waits for 0.5 s."""
    training = Training(Strategy.DDP, 2)
    for rank, (load_s, wait_s) in enumerate([(0.0, 0.5), (0.4, 0.1)]):
        for number in range(iterations):
            began_s = 100.0 + number
            waits = [(began_s + 0.9 - wait_s, began_s + 0.9)]
            correct = 8 if number >= 5 else 4
            training.add(
                rank,
                Step(Strategy.DDP, number, began_s, began_s + load_s, began_s + 1, waits, [], correct, 8),
            )
        training.add(rank, Finished(Strategy.DDP, 100.0 + iterations, 0.9, 0.0, [], []))
    return training


def test_figures_of_a_training() -> None:
    training = _training()
    assert training.num_iterations == 12
    assert figures.iteration_s(training) == pytest.approx(1.0)
    assert figures.total_s(training) == pytest.approx(12.0)
    assert figures.exposed_s(training) == pytest.approx(0.1)
    rank, seconds = figures.latest(training)
    assert (rank, seconds) == (1, pytest.approx(0.2))  # of two ranks, the median is between them


def test_accuracy_is_that_of_the_last_ten_iterations() -> None:
    training = _training(20)
    assert figures.running_accuracy(training, 0) == 0.5
    assert figures.running_accuracy(training, 9) == 0.75
    assert figures.reached_s(training, 0.75) == pytest.approx(10.0)
    assert figures.reached_s(training, 1.0) == pytest.approx(15.0)
    assert figures.reached_s(_training(12), 1.0) is None


def test_a_panel_shows_two_iterations_of_all_ranks() -> None:
    panel = panel_of(_training(), late_rank=1)
    assert panel.marks_s == pytest.approx([0.0, 1.0])
    length_s = [
        {kind: sum(bar.end_s - bar.begin_s for bar in row if bar.activity is kind) for kind in Activity}
        for row in panel.bars
    ]
    assert length_s[0] == pytest.approx(
        {Activity.LOADING: 0, Activity.COMPUTING: 1.0, Activity.WAITING: 1.0, Activity.COMMUNICATING: 0}
    )
    assert length_s[1] == pytest.approx(
        {Activity.LOADING: 0.8, Activity.COMPUTING: 1.0, Activity.WAITING: 0.2, Activity.COMMUNICATING: 0}
    )


def test_a_short_training_has_a_panel_too() -> None:
    for iterations in (1, 2, 3):
        assert any(panel_of(_training(iterations), late_rank=1).bars)


@given(st.lists(st.tuples(st.integers(-5, 25), st.integers(0, 10)).map(lambda gap: (gap[0], gap[0] + gap[1]))))
def test_complement_and_gaps_make_up_the_whole(gaps: list[tuple[float, float]]) -> None:
    parts = complement(0, 20, gaps)
    for moment in range(20):
        inside = any(begin <= moment < end for begin, end in gaps)
        assert inside != any(begin <= moment < end for begin, end in parts)


def test_only_algorithms_of_gradients_are_shown() -> None:
    lines = [
        "allreduce up to 8388608 bytes, late 3:181: stragglar(late=3, pieces=4)",
        "allreduce up to 8388608 bytes, late 3: stragglar(late=3, pieces=4)",
        "allreduce up to 8388608 bytes: ring",
        "allreduce up to 64 bytes: one_shot",
        "broadcast up to 8388608 bytes: chain",
        "allreduce up to 8388608 bytes, late 1:20,3:181: late_ranks(late=(1, 3))",
    ]
    assert large_algorithms(lines) == [
        "allreduce, rank 3 late: stragglar",
        "allreduce: ring",
        "allreduce, rank 1 and 3 late: late_ranks",
    ]


def test_accuracies_that_differ_are_noticed() -> None:
    one, other = _training(), _training()
    assert same_accuracy([one, other])
    other.add(0, Finished(Strategy.DDP, 112.0, 0.8, 0.0, [], []))
    assert not same_accuracy([one, other])
