"""A tiny replay with real ranks: every strategy trains the weights it must, and tables and files come out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.bench.results import save_json
from paceline.bench.training.measure import Replay, measure
from paceline.bench.training.plot import draw_sweep, draw_training
from paceline.bench.training.profile import LayerProfile, Profile, uniform_profile
from paceline.bench.training.rank import wrap
from paceline.bench.training.replay import LEARNING_RATE, ReplayModel, gradient, groups_of
from paceline.bench.training.scaling import Scale
from paceline.bench.training.strategies import STRATEGIES
from paceline.bench.training.sweep import grid, sweep
from paceline.bench.training.table import caption, sweep_legend, sweep_table, training_table
from paceline.ir.cluster import Cluster
from ranks import BACKEND, Member, run_ranks

TINY = Profile("tiny", (LayerProfile("a", (5, 2), 0.0, 0.0), LayerProfile("b", (3,), 0.0, 0.0)), "made up")


def _replay(strategy: str) -> Replay:
    return Replay(
        profile=uniform_profile(),
        network="none",
        scale=Scale(1e-3, 1e-2),
        cluster=Cluster.preset("lan8"),
        strategies=[strategy],
        num_ranks=2,
        iterations=3,
        rounds=2,
    )


@pytest.mark.timeout(90)
def test_a_sweep_ends_with_the_best_beside_the_find(tmp_path: Path) -> None:
    shares: list[float] = []
    results = sweep(_replay("dear"), "dear", None, lambda _what, share: shares.append(share))
    assert [point.bucket_bytes for point in results.grid] == grid(results.setting.gradient_bytes)
    fastest = min(results.grid, key=lambda point: point.time.median_s)
    assert results.best.bucket_bytes == fastest.bucket_bytes
    assert results.tuned.bucket_bytes is None
    assert all(point.wrong == 0 and point.time.count == 3 for point in (*results.grid, results.best, results.tuned))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert sweep_table(results).row_count == len(results.grid) + 2
    assert "60 iterations" in sweep_legend(results)
    draw_sweep(results, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(90)
def test_a_strategy_finds_its_bucket_size_before_the_clock_runs() -> None:
    heard: list[str] = []
    results = measure(_replay("dear-tuned"), None, lambda what, _share: heard.append(what))
    assert "dear-tuned finds its bucket size" in heard
    assert [row.strategy for row in results.rows] == ["dear-tuned", "alone"]
    assert all(row.wrong == 0 and row.time.count == 3 for row in results.rows)


@pytest.mark.timeout(90)
def test_strategies_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ALGORITHM", "allreduce:ring")
    results = measure(_replay("ddp"), None, lambda _what, _share: None)
    assert [row.strategy for row in results.rows] == ["ddp", "alone"]
    assert all(row.wrong == 0 and row.time.count == 3 for row in results.rows)
    assert results.of("ddp").ddp_over is not None
    assert results.setting.bounds is None
    save_json(results, tmp_path / "replay.json")
    saved = json.loads((tmp_path / "replay.json").read_text())
    assert saved["setting"]["num_tensors"] == 32
    assert saved["environment"]["ddp"]["PACELINE_ALGORITHM"] == "allreduce:ring"
    draw_training(results, tmp_path / "replay.png")
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert training_table(results).row_count == len(results.rows)
    assert any("synthetic" in line for line in caption(results.setting, results.machine))


def _wrong_elements(me: Member, strategy: str, bucket_bytes: int) -> int:
    groups = groups_of(TINY, bucket_bytes) if strategy == "fsdp2" else None
    replay = ReplayModel(TINY, me.rank, groups)
    model, optimizer = wrap(strategy, replay, bucket_bytes)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.zeros(1)).sum().backward()
        optimizer.step()
    return replay.wrong_elements(4, me.world_size)


@pytest.mark.parametrize("strategy", [name for name, backend in STRATEGIES.items() if backend == BACKEND])
def test_a_strategy_trains_the_weights_it_must(strategy: str) -> None:
    assert run_ranks(_wrong_elements, 2, strategy, 20) == [0, 0]


def test_a_replayed_step_is_told_from_a_wrong_one() -> None:
    model = ReplayModel(TINY, rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.zeros(1)).sum().backward()
        optimizer.step()
    assert [parameter.grad.tolist() for parameter in model.parameters() if parameter.grad is not None] == [
        [gradient(0, 0)] * 5,
        [gradient(1, 0)] * 2,
        [gradient(2, 0)] * 3,
    ]
    assert model.wrong_elements(2, num_ranks=1) == 0
    assert model.wrong_elements(3, num_ranks=1) == 10
    assert model.wrong_elements(2, num_ranks=2) == 10


def test_groups_are_filled_up_to_the_threshold() -> None:
    profile = uniform_profile(num_layers=5, elements=10)
    assert groups_of(profile, 80) == [[0, 1], [2, 3], [4]]
    assert groups_of(profile, 1) == [[0], [1], [2], [3], [4]]
