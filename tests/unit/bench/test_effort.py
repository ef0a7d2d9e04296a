from __future__ import annotations

import pytest

from paceline.bench.contenders import Contender
from paceline.bench.figures import Operation
from paceline.bench.measure import Effort, Question, Samples, check_lab
from paceline.errors import UsageError
from paceline.lab import PortBytes


def _spent(effort: Effort, iteration_s: float) -> list[int]:
    """The blocks of a contender that always needs so long."""
    samples, blocks = Samples(), []
    for _ in range(effort.rounds):
        block = effort.block(samples, iteration_s)
        samples.rounds.append([iteration_s] * block)
        samples.loop_s += block * iteration_s
        blocks.append(block)
    return blocks


def test_blocks_fill_the_time_within_bounds() -> None:
    assert _spent(Effort(seconds=2.0, rounds=4), 1 / 64) == [32] * 4
    assert sum(_spent(Effort(seconds=2.0, rounds=5), 10.0)) == 5
    assert sum(_spent(Effort(seconds=2.0, rounds=2), 10.0)) >= 5
    assert sum(_spent(Effort(seconds=2.0, rounds=5), 1e-7)) == 50_000


def test_a_block_follows_what_was_spent() -> None:
    assert Effort(seconds=2.0, rounds=2).block(Samples([[0.5]], loop_s=1.5), 0.01) == 50


def test_iterations_are_exactly_so_many() -> None:
    assert sum(_spent(Effort(iterations=17, rounds=5), 100.0)) == 17


def test_ratios_compare_round_with_round() -> None:
    ratio = Samples([[2.0, 2.0], [40.0, 40.0]], loop_s=80.0).over(Samples([[1.0], [10.0]], loop_s=10.0))
    assert (ratio.least, ratio.most) == (2.0, 4.0)
    assert ratio.of_medians == pytest.approx(21 / 5.5)
    assert ratio.of_means == pytest.approx(20 / 5)


@pytest.mark.parametrize("wrong", [{"seconds": 0}, {"rounds": 0}, {"iterations": 3, "rounds": 5}, {"seconds": 1e9}])
def test_effort_that_measures_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Effort(**wrong)  # type: ignore[arg-type]


def _question(**changes: object) -> Question:
    fields = {"operation": Operation.ALL_REDUCE, "sizes": [4000], "num_ranks": 2, "subject": Contender("gloo")}
    return Question(**{**fields, **changes})  # type: ignore[arg-type]


def test_questions_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UsageError, match="measured once"):
        _question(peers=[Contender("gloo")])
    with pytest.raises(UsageError, match="1 to 64 ranks"):
        _question(num_ranks=0)
    with pytest.raises(UsageError, match="mpich has no bfloat16"):
        _question(peers=[Contender("mpich")], dtype="bfloat16")
    with pytest.raises(UsageError, match="no dtype"):
        _question(dtype="float31")
    with pytest.raises(UsageError, match="openmpi is measured on one host only"):
        check_lab(_question(peers=[Contender("openmpi")]))


def test_traffic_adds_up_over_blocks() -> None:
    samples = Samples()
    samples.add_traffic([PortBytes(5, 7), PortBytes(0, 0)], [PortBytes(25, 8), PortBytes(4, 0)], calls=2)
    samples.add_traffic([PortBytes(25, 8), PortBytes(4, 0)], [PortBytes(26, 9), PortBytes(4, 9)], calls=1)
    assert (samples.calls, samples.sent_bytes, samples.received_bytes) == (3, [21, 4], [2, 9])
