"""paceline bench with late ranks: real processes, on one host and in the lab."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.errors import UsageError
from paceline.lab import unavailable

EFFORT = ("--iterations", "2", "--rounds", "2")


def _bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from paceline.cli.main import run; run()", "bench", "allreduce", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=100, check=False)


def _rows(done: subprocess.CompletedProcess[str], path: Path) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert rows
    assert all(row["wrong"] == 0 for row in rows)
    return rows


def test_one_late_rank(tmp_path: Path) -> None:
    done = _bench(
        "--ranks", "3", "--sizes", "40KB", "--late", "1:20ms", "--peers", "messages", *EFFORT,
        "--json", "a.json", cwd=tmp_path,
    )  # fmt: skip
    rows = _rows(done, tmp_path / "a.json")
    assert [row["contender"] for row in rows] == ["paceline", "messages"]
    assert all(row["late_s"] == {"1": 0.02} for row in rows)
    assert all(row["time"]["count"] == 2 for row in rows)
    assert all(row["time"]["min_s"] > 0 for row in rows)
    assert all(row["arrival_s"] > 0 for row in rows)
    assert "3 40000 1:20 ms paceline" in " ".join(done.stdout.splitlines()[1].split())


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_sweep_of_delays_in_the_lab(tmp_path: Path) -> None:
    done = _bench(
        "--backend", "messages", "--lab", "lan4", "--sizes", "400KB", "--late", "1", "--late-sweep", "delay",
        "--peers", "none", *EFFORT, "--json", "a.json", "--plot", "a.png", cwd=tmp_path,
    )  # fmt: skip
    rows = _rows(done, tmp_path / "a.json")
    delays = [max(row["late_s"].values(), default=0.0) for row in rows]
    assert delays == sorted(delays)
    assert len(delays) == 8
    assert delays[0] == 0
    one_buffer_s = 400e3 * 1514 / 1448 / 125e6
    assert rows[0]["limit_s"] == pytest.approx(1.5 * one_buffer_s)  # nobody is late: 2 (n - 1) / n
    assert rows[-1]["limit_s"] == pytest.approx(one_buffer_s)
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "3", "--late", "3:5ms"], "rank 3 cannot be late: the ranks are 0 to 2"),
        (["--ranks", "3", "--late", "1"], "--late takes RANK:DURATION, like 3:500ms, not '1'"),
        (["--ranks", "3", "--late", "1:5"], "'5' is not a duration"),
        (["--ranks", "3", "--late", "1:5ms,1:6ms"], "--late names rank 1 twice"),
        (["--ranks", "2", "--late", "0:5ms,1:6ms"], "at least one rank and not all of them"),
        (["--ranks", "3", "--late-sweep", "colour"], "--late-sweep takes one of delay, size, ranks, pieces"),
        (["--ranks", "3", "--late-sweep", "ranks"], "--late-sweep ranks needs --late, like --late 2:500ms"),
        (["--ranks", "3", "--late", "1:5ms", "--peers", "nccl"], "measure against; there are ring, messages, gloo"),
    ],
)
def test_bad_arguments_are_sentences(arguments: list[str], sentence: str) -> None:
    assert sentence in _refused("allreduce", *arguments)


def test_only_an_allreduce_has_late_ranks() -> None:
    assert "late ranks are measured with allreduce, not with broadcast" in _refused("broadcast", "--late", "1:5ms")


def _refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert isinstance(result.exception, UsageError)
    return str(result.exception)
