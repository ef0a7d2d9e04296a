"""What can be asked of the bench of decentralised training, and what it makes of curves, without any rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from paceline.bench.decentralized.board import Board, Curve, first_crossing, save_snapshot
from paceline.bench.decentralized.cases import (
    Contestant,
    Scenario,
    bucket_grid,
    num_parameters,
    parse_scenarios,
    parse_schemes,
)
from paceline.bench.decentralized.mean import MeanWatch
from paceline.bench.decentralized.report import draw, legend, scenario_table
from paceline.bench.decentralized.results import DecentralizedResults, Spread, Training
from paceline.bench.decentralized.run import Plan
from paceline.bench.decentralized.task import Model, Teacher
from paceline.bench.results import Machine
from paceline.bench.training.scaling import lab_s_per_byte
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster

MACHINE = Machine("paceline bench", "2026-11-19", 2, "a processor", "6.1", "3.11", 0.1)


def _plan(**fields: Any) -> Plan:
    usual: dict[str, Any] = {
        "contestants": parse_schemes("ddp-gloo,static"),
        "scenarios": parse_scenarios(["0:2x"], None),
        "seeds": 3,
        "cluster": Cluster.preset("lan8"),
        "in_lab": True,
    }
    return Plan(**{**usual, **fields})


def _training(scheme: str, scenario: str, seed: int, target_s: float | None, **fields: Any) -> Training:
    steps = [100] * 8
    return Training(
        scheme, scenario, seed, target_s=target_s, samples=1280, elapsed_s=(target_s or 40.0) + 1, steps=steps,
        steps_per_s=[1.0, *[2.0] * 7], outside_s=[3.0] * 8, sent_bytes=[10**6] * 8, consensus=0.1, consensus_share=0.01,
        loss=0.5, accuracy=0.7, busy=0.4, mean_curve=[(0.0, 1.4), (target_s or 40.0, 0.4)],
        own_target_s=target_s and 2 * target_s, **fields,
    )  # fmt: skip


def _results(*trainings: Training) -> DecentralizedResults:
    plan = _plan()
    schemes = list(dict.fromkeys(one.scheme for one in trainings))
    slow = {one.name: one.compute_factors(8) for one in plan.scenarios}
    return DecentralizedResults(
        plan.setting(), schemes, list(slow), MACHINE, slow, {"ddp-gloo": {"whole": 0.1, "1/2": 0.09}}, list(trainings)
    )


# Schemes.


def test_options_of_a_scheme_are_read() -> None:
    one = Contestant.parse("ripples:group_size=auto:overlap=False:deadline=0.5:lr=0.1")
    assert one.scheme == "ripples"
    assert one.options == {"group_size": "auto", "overlap": False, "deadline": 0.5}
    assert one.learning_rate == 0.1


def test_a_short_name_takes_more_options() -> None:
    one = Contestant.parse("ripples-blocking:group_size=2")
    assert (one.name, one.scheme) == ("ripples-blocking:group_size=2", "ripples")
    assert one.options == {"overlap": False, "group_size": 2}


@pytest.mark.parametrize(
    "text", ["", "nothing", "ddp-gloo,ddp-gloo", "ripples:4", "ripples:lr=fast", "ddp-gloo:group_size=2", "static:=1"]
)
def test_schemes_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_schemes(text)


def test_backends() -> None:
    assert [one.backend for one in parse_schemes("ddp-gloo,ddp-paceline,static,alone")] == ["gloo", *["paceline"] * 3]


# Scenarios.


def test_each_entry_is_a_scenario_beside_none() -> None:
    found = parse_scenarios(["0:2x,0+3:5x", "half:2x"], ["half:5x"])
    assert [one.name for one in found] == ["none", "0:2x", "0+3:5x", "half:2x", "links half:5x"]
    assert found[0].compute_factors(4) == [1, 1, 1, 1]
    assert found[1].compute_factors(4) == [2, 1, 1, 1]
    assert found[2].compute_factors(4) == [5, 1, 1, 5]
    assert found[3].compute_factors(5) == [1, 1, 1, 2, 2]
    assert found[4].compute_factors(4) == [1, 1, 1, 1]
    assert found[4].link_factors(4) == [1, 1, 5, 5]


def test_none_is_measured_once_and_can_be_left_out() -> None:
    assert parse_scenarios(None, None) == [Scenario()]
    assert parse_scenarios(["none", "0:2x"], None)[0] == Scenario()
    assert [one.name for one in parse_scenarios(["none", "0:2x"], None)] == ["none", "0:2x"]
    assert [one.name for one in parse_scenarios(["0:2x"], None, homogeneous=False)] == ["0:2x"]
    with pytest.raises(UsageError, match="no scenario"):
        parse_scenarios(None, None, homogeneous=False)


@pytest.mark.parametrize("entry", ["0", "0:2", "2x", "half:0.5x", "most:2x", "0-3:2x", ":2x"])
def test_slowness_that_makes_no_sense_is_refused(entry: str) -> None:
    with pytest.raises(UsageError, match="--slow takes"):
        parse_scenarios([entry], None)


def test_slow_members_must_exist() -> None:
    with pytest.raises(UsageError, match="workers 0 to 7"):
        _plan(scenarios=parse_scenarios(["8:2x"], None))


def test_slow_links_need_a_lab() -> None:
    with pytest.raises(UsageError, match="--lab"):
        _plan(scenarios=parse_scenarios(None, ["half:2x"]), cluster=Cluster.uniform(1, ranks_per_host=2), in_lab=False)


# The plan.


@pytest.mark.parametrize("preset", ["lan8", "lan4"])
def test_an_all_reduce_takes_the_share_of_the_computation_that_was_asked_for(preset: str) -> None:
    for communication, stretch in ((0.5, 1.0), (1.2, 1.0), (1.2, 2.0)):
        plan = _plan(cluster=Cluster.preset(preset), communication=communication, stretch=stretch)
        vector_bytes = plan.setting().vector_bytes
        took_s = vector_bytes * lab_s_per_byte(plan.emulated())
        assert took_s == pytest.approx(communication * stretch * plan.compute_s)
        assert plan.setting().all_reduce_s == pytest.approx(took_s)


def test_by_default_the_links_of_lan8_keep_their_rates() -> None:
    emulated, own = (one.hosts[0].up_bytes_per_s for one in (_plan().emulated(), Cluster.preset("lan8")))
    assert emulated == pytest.approx(own, rel=0.01)


@pytest.mark.parametrize("field", ["compute_s", "communication", "stretch", "batch", "learning_rate", "target"])
def test_what_must_be_positive_is(field: str) -> None:
    with pytest.raises(UsageError, match="more than 0"):
        _plan(**{field: 0})


def test_a_model_has_the_stated_size_and_time() -> None:
    model = Model(24, 0.3, 0)
    assert sum(one.numel() for one in model.parameters()) == num_parameters(24)
    assert sum(layer.forward_s for layer in model) == pytest.approx(0.1)
    assert sum(layer.backward_s for layer in model) == pytest.approx(0.2)


def test_bucket_grid_has_the_defaults_and_parts_of_the_model() -> None:
    grid = bucket_grid(1001)
    assert grid[0].first == 2**20
    assert [one.size for one in grid[1:]] == [1001, 501, 251, 126]


# Data.


def test_batches_are_the_same_for_the_same_arguments_and_differ_between_workers() -> None:
    one, other, again = (Teacher().batch(4, 0, worker, 7) for worker in (0, 1, 0))
    assert one.inputs.equal(again.inputs)
    assert one.labels.equal(again.labels)
    assert not one.inputs.equal(other.inputs)


# Curves.


def _records(*rows: tuple[float, float]) -> np.ndarray[Any, Any]:
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def test_the_curve_is_the_mean_of_the_last_batches_whoever_they_are() -> None:
    curve = Curve.of([_records((10, 4.0), (12, 2.0)), _records((11, 3.0), (13, 1.0))], window=2)
    assert curve.times_s.tolist() == [1, 2, 3]
    assert curve.losses.tolist() == [3.5, 2.5, 1.5]


def test_time_to_target_is_the_first_crossing() -> None:
    curve = Curve.of([_records(*((float(step), 10.0 - step) for step in range(10)))], window=2)
    assert curve.reached(4.5) == 6.0
    assert curve.reached(0.5) is None


def test_a_curve_of_too_few_batches_is_empty() -> None:
    curve = Curve.of([_records((1, 1)), _records()], window=3)
    assert curve.reached(10.0) is None
    assert curve.thinned(5) == []


def test_a_diverged_curve_does_not_reach_the_target_and_is_thinned_to_what_is_finite() -> None:
    curve = Curve.of([_records((0, 2.0), (1, math.nan), (2, 0.1))], window=1)
    assert curve.reached(1.0) is None
    assert curve.thinned(5) == [(0.0, 2.0)]


def test_the_board_shows_what_ranks_note(tmp_path: Path) -> None:
    controller = Board(tmp_path / "board", 2, create=True)
    rank = Board(tmp_path / "board", 2)
    controller.go, controller.stop = 3, 9
    assert (rank.go, rank.stop) == (3, 9)
    rank.note_warm(1, 4)
    rank.note_loss(1, 0.5, 1.25)
    rank.note_loss(1, 0.75, 1.0)
    assert controller.warm == [0, 4]
    assert controller.steps == [0, 2]
    assert [one.tolist() for one in controller.losses()] == [[], [[0.5, 1.25], [0.75, 1.0]]]


def test_a_curve_reaches_the_target_where_its_line_crosses_it_first() -> None:
    assert first_crossing([(1.0, 2.0), (2.0, 1.0), (3.0, 0.5)], 1.25) == 1.75
    assert first_crossing([(1.0, 1.0), (2.0, 3.0), (3.0, 1.0)], 2.0) == 1.0
    assert first_crossing([(1.0, 4.0), (2.0, 3.0)], 2.0) is None
    assert first_crossing([(1.0, 2.0)], 1.0) is None
    assert first_crossing([], 1.0) is None


def test_the_mean_of_all_weights_is_evaluated_now_and_then_and_finely_where_it_reaches_the_target(
    tmp_path: Path,
) -> None:
    watch = MeanWatch(tmp_path, 2, 1.0, lambda weights: float(weights[0]))

    def save(worker: int, values: dict[int, float]) -> None:
        for number, value in values.items():
            save_snapshot(np.array([value], np.float32), tmp_path, [number], worker)

    save(0, {number: 9.0 - number for number in range(1, 9)})
    watch.look()
    assert watch.curve == []
    save_snapshot(np.array([3.0], np.float32), tmp_path, range(1, 5), 1)  # none for long, and then four at once
    watch.look()
    assert watch.curve == [(1.0, 4.0)]
    assert watch.reached_s is None
    save(1, dict.fromkeys(range(5, 9), -2.0))
    watch.look()
    assert watch.curve == [(1.0, 4.0), (1.25, 1.0), (1.5, 0.5), (1.75, 0.0), (2.0, -0.5)]
    assert watch.reached_s == 1.25
    assert list(tmp_path.iterdir()) == []


# Results.


def test_a_target_that_was_not_reached_counts_as_infinite() -> None:
    assert Spread.of([1.0, None, 2.0]) == Spread(2.0, 1.0, math.inf)
    assert Spread.of([]) is None


def test_ratios_are_of_medians_against_the_fastest_ddp() -> None:
    results = _results(
        *(_training("ddp-gloo", "none", seed, time) for seed, time in enumerate((10.0, 12.0, 11.0))),
        *(_training("ddp-paceline", "none", seed, time) for seed, time in enumerate((9.0, 8.0, 10.0))),
        *(_training("static", "none", seed, time) for seed, time in enumerate((5.0, 4.0, 3.0))),
    )
    assert results.best_ddp("none") == "ddp-paceline"
    assert results.ratio("ddp-paceline", "static", "none") == Spread(9 / 4, 9 / 5, 10 / 3)
    assert results.ratio("static", "nothing", "none") is None


def test_a_scheme_that_did_not_reach_the_target_has_no_ratio_and_is_no_best_ddp() -> None:
    results = _results(_training("ddp-gloo", "none", 0, None), _training("static", "none", 0, 4.0))
    assert results.best_ddp("none") is None
    assert results.ratio("static", "ddp-gloo", "none") is None
    ratio = results.ratio("ddp-gloo", "static", "none")
    assert ratio is not None
    assert math.isinf(ratio.median)


def test_rates_are_of_fast_or_slow_workers() -> None:
    results = _results(_training("static", "0:2x", 0, 4.0), _training("static", "none", 0, 4.0))
    assert results.rate("static", "0:2x", fast=True) == Spread(2.0, 2.0, 2.0)
    assert results.rate("static", "0:2x", fast=False) == Spread(1.0, 1.0, 1.0)
    assert results.rate("static", "none", fast=False) is None


def test_tables_and_picture(tmp_path: Path) -> None:
    results = _results(
        _training("ddp-gloo", "none", 0, 10.0),
        _training("static", "none", 0, 4.0, groups={2: 30, 4: 10}, failed_groups=1),
        _training("static", "0:2x", 0, None),
        Training("ddp-gloo", "0:2x", 0, failed="ddp-gloo, 0:2x, seed 0: rank 3 died"),
    )
    console = Console(width=220)
    with console.capture() as capture:
        for scenario in results.scenarios:
            console.print(scenario_table(results, scenario))
    text = capture.get()
    assert "2.50x" in text
    assert "2: 75% 4: 25% !1" in text
    assert "> 41 s" in text
    assert "failed" in text
    lines = "\n".join(legend(results))
    assert "rank 3 died" in lines
    assert "took 1/2" in lines
    assert "--stretch" not in lines
    draw(results, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_busy_cores_are_warned_of() -> None:
    busy = msgspec.structs.replace(_training("static", "none", 0, 4.0), busy=0.8)
    assert "--stretch 2" in "\n".join(legend(_results(busy)))


def test_results_survive_a_file() -> None:
    results = _results(_training("static", "none", 0, 4.0, groups={2: 3}))
    assert msgspec.json.decode(msgspec.json.encode(results), type=DecentralizedResults) == results
