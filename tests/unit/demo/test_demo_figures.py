"""From what ranks say to the figures of the table."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from paceline.demo import figures
from paceline.demo.figures import Training, complement
from paceline.demo.messages import Finished, Step, Strategy
from paceline.demo.picture import panel_of
from paceline.demo.table import large_algorithms, results_table, same_accuracy
from paceline.draw.timelines import Activity


def _training(iterations: int = 12) -> Training:
    """Iterations of 1 s; rank 1 loads for 0.4 s and waits for 0.1 s, rank 0 waits for 0.5 s."""
    training = Training(Strategy.DDP, 2, late_rank=1)
    for number in range(iterations):
        for rank, (load_s, wait_s) in enumerate([(0.0, 0.5), (0.4, 0.1)]):
            began_s = 100.0 + number
            waits = [(began_s + 0.9 - wait_s, began_s + 0.9)]
            correct = 8 if number >= 5 else 4
            training.add(
                rank,
                Step(Strategy.DDP, number, began_s, began_s + load_s, began_s + 1, waits, [], correct, 8),
            )
    for rank in (0, 1):
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
    assert figures.recent_accuracy(_training(1)) == 0.5
    assert figures.recent_accuracy(_training(10)) == 0.75
    assert figures.recent_accuracy(training) == 1.0
    assert figures.reached_s(training, 0.75) == pytest.approx(10.0)
    assert figures.reached_s(training, 1.0) == pytest.approx(15.0)
    assert figures.reached_s(_training(12), 1.0) is None


def _decentralized(accuracy: float = 0.96) -> Training:
    """Rank 2 makes 10 steps of 1 s, of which it loads for 0.9 s; ranks 0 and 1 make 50 steps of 0.2 s."""
    training = Training(Strategy.DECENTRALIZED, 3, late_rank=2)
    for number in range(50):
        for rank in (0, 1):
            began_s = 100.0 + number / 5
            correct = 8 if number >= 25 else 4
            waits = [(began_s, began_s + 0.1)] if rank == 0 else []
            training.add(
                rank, Step(Strategy.DECENTRALIZED, number, began_s, began_s, began_s + 0.2, waits, [], correct, 8)
            )
    for number in range(10):
        began_s = 100.0 + number
        training.add(2, Step(Strategy.DECENTRALIZED, number, began_s, began_s + 0.9, began_s + 1, [], [], 8, 8))
    for rank, (waited_s, averages) in enumerate([(0.7, {2: 8, 3: 1}), (0.5, {2: 6, 3: 1}), (0.6, {2: 2, 3: 1})]):
        told = Finished(Strategy.DECENTRALIZED, 111.0, accuracy, 0.1, [], [], waited_s=waited_s, averages=averages)
        training.add(rank, told)
    return training


def test_figures_of_a_decentralised_training() -> None:
    training = _decentralized()
    assert figures.iteration_s(training) == pytest.approx(0.2)
    assert figures.images_per_s(training) == pytest.approx(110 * 8 / 11)
    assert figures.exposed_s(training) == 0.0  # rank 0 waits in each step, rank 1 in none
    assert figures.ending_s(training) == 0.5
    assert figures.num_averages(training) == {2: 8, 3: 1}
    rank, seconds = figures.latest(training)
    assert (rank, seconds) == (2, pytest.approx(0.9))


def test_accuracy_of_a_decentralised_training_is_that_of_all_ranks_steps_in_time() -> None:
    """Thirty steps are the last: those of about 2.7 s, at eleven a second. Ranks 0 and 1 read all right after 5 s."""
    training = _decentralized()
    assert figures.reached_s(training, 1.0) == pytest.approx(7.8)
    assert figures.reached_s(training, 0.5) == pytest.approx(2.8)


def test_a_decentralised_training_has_a_panel_of_the_late_ranks_iterations() -> None:
    panel = panel_of(_decentralized(), late_rank=2)
    assert "200 ms an iteration of a rank that is on time" in panel.title
    computing = [sum(bar.activity is Activity.COMPUTING for bar in row) for row in panel.bars]
    assert computing == [10, 10, 2]


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


def _ended(accuracy: float) -> Training:
    training = _training()
    training.add(0, Finished(Strategy.DDP, 112.0, accuracy, 0.0, [], []))
    return training


def test_accuracies_that_differ_are_noticed() -> None:
    assert same_accuracy([_ended(0.9), _ended(0.9)])
    assert not same_accuracy([_ended(0.9), _ended(0.8)])


def test_a_decentralised_training_may_differ_a_little() -> None:
    assert same_accuracy([_ended(0.97), _decentralized(0.96)])
    assert same_accuracy([_ended(0.97), _decentralized(0.99)])
    assert not same_accuracy([_ended(0.97), _decentralized(0.92)])
    assert same_accuracy([_ended(0.6), _decentralized(0.4)]), "too early to judge"
    assert not same_accuracy([_ended(0.97), _ended(0.96), _decentralized(0.96)])


def test_the_table_has_a_column_for_each_training_and_says_what_differs() -> None:
    out = StringIO()
    Console(file=out, width=140).print(results_table([_ended(0.97), _decentralized(0.96)]))
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:4]] for line in out.getvalue().splitlines()
            if len(cells := line.split("│")) == 5}  # fmt: skip
    assert rows["iteration of a rank on time"] == ["1 s", "200 ms"]
    assert rows["steps of late rank / of others"] == ["12 / 12", "10 / 50"]
    assert rows["images a second, all ranks"] == ["16", "80 (5.00x)"]
    assert rows["exposed comm. an iteration"] == ["100 ms", "0 s; 500 ms at the end"]
    assert rows["algorithms"] == ["Gloo's own", "averages: 8 of 2 ranks, 1 of 3 ranks"]
