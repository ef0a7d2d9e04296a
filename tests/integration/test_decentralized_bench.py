"""A tiny bench of decentralised training with real ranks: rows, errors of ranks, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.bench.decentralized.cases import parse_scenarios, parse_schemes
from paceline.bench.decentralized.results import DecentralizedResults, Training
from paceline.bench.decentralized.run import Plan, run
from paceline.cli.main import app
from paceline.ir.cluster import Cluster


def _run(schemes: str, num_workers: int, *, slow: str = "", steps: int | None = None) -> DecentralizedResults:
    plan = Plan(
        contestants=parse_schemes(schemes),
        scenarios=parse_scenarios([slow], None, homogeneous=not slow),
        seeds=1,
        cluster=Cluster.uniform(1, ranks_per_host=num_workers),
        in_lab=False,
        compute_s=0.004,
        learning_rate=0.02,
        target=1.2,
        window=16,
        steps=steps,
        give_up_s=60.0,
        width=100,
    )
    return run(plan, None, lambda _what, _share: None)


def _check(one: Training, num_workers: int) -> None:
    assert one.failed == ""
    assert one.own_target_s is not None
    assert len(one.steps) == num_workers
    assert one.loss is not None
    assert one.loss < 1.4
    assert not one.weights_differ
    assert one.own_curve[-1][1] < one.own_curve[0][1]


@pytest.mark.timeout(120)
def test_schemes_reach_the_target() -> None:
    results = _run("ddp-gloo,static,alone", 2, slow="0:2x")
    for one in results.trainings:
        _check(one, 2)
    ddp, static, alone = results.trainings
    for one in (ddp, static):
        assert one.target_s is not None
        assert one.samples is not None
        assert one.samples <= Plan.batch * sum(one.steps)
    assert len(set(ddp.steps)) == len(set(static.steps)) == 1
    assert ddp.buckets in results.probes["ddp-gloo"]
    assert set(static.groups) == {2}
    assert alone.steps[0] < alone.steps[1]
    assert ddp.consensus == 0
    assert alone.consensus is not None
    assert alone.consensus > 0


@pytest.mark.timeout(120)
def test_with_steps_given_all_workers_make_as_many() -> None:
    results = _run("ddp-paceline,static", 3, steps=30)
    assert [one.steps for one in results.trainings] == [[30] * 3] * 2


@pytest.mark.timeout(120)
def test_the_error_of_a_rank_is_shown_and_the_next_training_is_done() -> None:
    results = _run("static:group_size=1,alone", 2)
    failed, alone = results.trainings
    assert "rank" in failed.failed
    assert "at least 2 workers" in failed.failed
    _check(alone, 2)


@pytest.mark.timeout(120)
def test_the_command_prints_a_table_and_saves_files(tmp_path: Path) -> None:
    told = [
        *("bench", "decentralized", "--ranks", "2", "--schemes", "static", "--seeds", "1", "--compute", "4ms"),
        *("--target", "1.2", "--window", "16", "--lr", "0.02", "--width", "100"),
        *("--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")),
    ]
    result = CliRunner().invoke(app, told)
    assert result.exit_code == 0, result.output
    assert "static" in result.output
    assert (tmp_path / "a.json").stat().st_size > 1000
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_refuses_a_lab_with_ranks() -> None:
    result = CliRunner().invoke(app, ["bench", "decentralized", "--lab", "lan8", "--ranks", "2"])
    assert result.exit_code != 0
    assert "leave --ranks out" in str(result.exception)
