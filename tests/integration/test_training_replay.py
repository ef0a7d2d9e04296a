"""A tiny replay with real ranks: every strategy trains the weights it must, and tables and files come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.results import save_json
from paceline.bench.training.measure import Replay, measure
from paceline.bench.training.plot import draw_sweep, draw_training
from paceline.bench.training.profile import LayerProfile, Profile, uniform_profile
from paceline.bench.training.rank import scaler_for, train, wrap
from paceline.bench.training.replay import LEARNING_RATE, ReplayModel, gradient, groups_of
from paceline.bench.training.scaling import Scale
from paceline.bench.training.strategies import DDP_BUCKETS, STRATEGIES, TRIED_ITERATIONS, Buckets
from paceline.bench.training.sweep import grid, sweep
from paceline.bench.training.table import caption, sweep_legend, sweep_table, training_legend, training_table
from paceline.ir.cluster import Cluster
from ranks import BACKEND, Member, run_ranks

TINY = Profile("tiny", (LayerProfile("a", (5, 2), 0.0, 0.0), LayerProfile("b", (3,), 0.0, 0.0)), "made up")


def _replay(*strategies: str, clip: bool = False, scaler: bool = False) -> Replay:
    return Replay(
        profile=uniform_profile(),
        network="none",
        scale=Scale(1e-3, 1e-2),
        cluster=Cluster.preset("lan8"),
        strategies=strategies,
        num_ranks=2,
        iterations=3,
        rounds=2,
        clip=clip,
        scaler=scaler,
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
    assert results.setting.buckets["ddp"] == Buckets(26_214, 1049)
    assert results.setting.bounds is None
    save_json(results, tmp_path / "replay.json")
    saved = json.loads((tmp_path / "replay.json").read_text())
    assert saved["setting"]["num_tensors"] == 32
    assert saved["environment"]["ddp"]["PACELINE_ALGORITHM"] == "allreduce:ring"
    draw_training(results, tmp_path / "replay.png")
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert training_table(results).row_count == len(results.rows)
    assert any("synthetic" in line for line in caption(results.setting, results.machine))


@pytest.mark.timeout(180)
def test_ddp_is_tuned_before_the_clock_runs(tmp_path: Path) -> None:
    heard: list[str] = []
    replay = _replay("ddp", "ddp-tuned", "dear", clip=True, scaler=True)
    results = measure(replay, None, lambda what, _share: heard.append(what))
    assert all(row.wrong == 0 and row.time.count == 3 for row in results.rows)
    trials = results.tuning["ddp-tuned"]
    assert sum("ddp-tuned tries buckets" in what for what in heard) == len(trials)
    tried = [trial.buckets for trial in trials]
    assert tried[: len(replay.tried())] == replay.tried()
    assert tried[-1].first == 0
    assert len(set(tried)) == len(tried) <= len(replay.tried()) + 2
    assert all(trial.time.count == TRIED_ITERATIONS and trial.wrong == 0 for trial in trials)
    taken = results.setting.buckets["ddp-tuned"]
    assert taken == min(trials, key=lambda trial: trial.time.median_s).buckets

    fastest = min(("ddp", "ddp-tuned"), key=lambda name: results.of(name).time.median_s)
    ratio = results.of("dear").best_ddp_over
    assert results.best_ddp == fastest
    assert ratio is not None
    assert ratio.of_medians == pytest.approx(results.of(fastest).time.median_s / results.of("dear").time.median_s)
    legend = "\n".join(training_legend(results))
    assert "ddp-tuned tried 1.05 MB: " in legend
    assert f"{fastest} (the best DDP) / dear: " in legend
    save_json(results, tmp_path / "replay.json")
    saved = json.loads((tmp_path / "replay.json").read_text())
    assert [trial["buckets"]["size"] for trial in saved["tuning"]["ddp-tuned"]] == [one.size for one in tried]
    assert saved["setting"]["clip"]
    assert saved["setting"]["scaler"]


def test_what_is_tried_for_ddp_ends_with_the_whole_model() -> None:
    replay = _replay("ddp-tuned")
    assert [buckets.size for buckets in replay.tried()] == [1049, 4194, 10486, 26214, 52429, 102400]
    assert [buckets.first for buckets in replay.tried()] == [0, *[1049] * 5]


def _wrong_elements(me: Member, strategy: str, clips: bool, scales: bool) -> int:
    buckets = Buckets(20)
    groups = groups_of(TINY, buckets.size) if strategy == "fsdp2" else None
    replay = ReplayModel(TINY, me.rank, groups)
    model, optimizer = wrap(strategy, replay, buckets)
    scaler = scaler_for(model) if scales else None
    for _ in range(4):
        train(model, optimizer, torch.zeros(1), clips=clips, scaler=scaler)
    return replay.wrong_elements(4, me.world_size)


def _backward(model: nn.Module) -> None:
    model(torch.zeros(1)).sum().backward()


@pytest.mark.parametrize("strategy", [name for name, backend in STRATEGIES.items() if backend == BACKEND])
@pytest.mark.parametrize(("clips", "scales"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_strategy_trains_the_weights_it_must(strategy: str, clips: bool, scales: bool) -> None:
    assert run_ranks(_wrong_elements, 2, strategy, clips, scales) == [0, 0]


def _rebuilt_buckets(_me: Member, factor: float) -> tuple[list[str], list[str]]:
    """What the reducer says of its buckets: as PyTorch makes them by itself, and as the replay has them scaled."""
    megabytes = tuple(LayerProfile(str(number), (1_000_000 + number,), 0.0, 0.0) for number in range(16))
    true = Profile("16 layers of 4 MB", megabytes, "made up")
    by_default = DistributedDataParallel(ReplayModel(true, 0), gradient_as_bucket_view=True)
    scaled = ReplayModel(Scale(factor, 1.0).apply(true), 0)
    replayed, _ = wrap("ddp", scaled, DDP_BUCKETS.scaled(factor))
    return _layers_by_bucket(by_default), _layers_by_bucket(replayed)


def _layers_by_bucket(ddp: Any) -> list[str]:
    for _ in range(3):  # buckets are made anew in the second iteration, and reported in the third
        _backward(ddp)
    report = ddp._get_ddp_logging_data()
    assert report["has_rebuilt_buckets"] == 1
    assert len(report["rebuilt_bucket_sizes"].split(", ")) == report["num_buckets_reduced"]
    indices: str = report["rebuilt_per_bucket_param_indices"]
    return indices.split(", ")


@pytest.mark.parametrize("factor", [1.0, 1e-2])
def test_ddp_has_the_buckets_of_its_defaults(factor: float) -> None:
    by_default, replayed = run_ranks(_rebuilt_buckets, 2, factor)[0]
    assert by_default == ["15", "14 13 12 11 10 9 8", "7 6 5 4 3 2 1", "0"]  # the first of 1 MB, the others of 25 MB
    assert replayed == by_default


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
