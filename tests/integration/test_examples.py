"""The examples and benchmarks run as their docstrings say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.lab import unavailable

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_new_algorithm(tmp_path: Path) -> None:
    out = _run(str(ROOT / "examples" / "new_algorithm.py"), "ring.png", cwd=tmp_path)
    assert "proven: 224 messages, at most 2 sends of a rank at once" in out
    assert "refused: broken schedule, allreduce of 8 ranks: " in out
    assert "both_ways: " in out
    assert (tmp_path / "ring.png").stat().st_size > 1000


def test_ddp(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = _run(*launcher, str(ROOT / "examples" / "train_ddp.py"), "--steps", "40", cwd=tmp_path)
    assert "paceline, 2 ranks: " in out
    assert "accuracy 1.00" in out
    assert "algorithms: allreduce" in out


def test_fsdp(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--width", "64", "--depth", "2", "--steps", "60")
    out = _run(*launcher, str(ROOT / "examples" / "fsdp_multicast.py"), *options, cwd=tmp_path)
    assert "paceline, 2 ranks, 0.4 MB of weights: " in out
    first, last = map(float, re.findall(r"loss: ([0-9.]+) at first, ([0-9.]+) in the last", out)[0])
    assert last < first / 2
    assert "allgather" in out


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_fsdp_between_hosts(tmp_path: Path) -> None:
    lab = ("-c", "from paceline.cli.main import run; run()", "lab", "--scenario", "uplink8", "--timeout", "100s", "--")
    options = ("--width", "32", "--depth", "1", "--steps", "2")
    out = _run(*lab, sys.executable, str(ROOT / "examples" / "fsdp_multicast.py"), *options, cwd=tmp_path)
    assert "[0] paceline, 8 ranks, 0.1 MB of weights: " in out
    assert "allgather" in out


def test_dear_beside_ddp(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = _run(*launcher, str(ROOT / "examples" / "train_dear.py"), "--steps", "31", "--sharded", cwd=tmp_path)
    assert "largest difference of a weight: 0.0e+00" in out
    assert "step 30: communication " in out or "step 29: communication " in out


def test_decentralized_with_a_slow_rank(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--steps", "30", "--slow-rank", "1", "--slow", "3x")
    out = _run(*launcher, str(ROOT / "examples" / "train_decentralized.py"), *options, cwd=tmp_path)
    steps = {int(rank): int(number) for rank, number in re.findall(r"^rank (\d): (\d+) steps in", out, re.MULTILINE)}
    assert sorted(steps) == [0, 1]
    assert sum(steps.values()) >= 60, "30 steps each, on average"
    (accuracy,) = re.findall(r"accuracy of the average: ([0-9.]+)", out)
    assert float(accuracy) > 0.9


def test_decentralized_workers_come_and_go(tmp_path: Path) -> None:
    """One worker trains; another joins it; the first is killed, and the other ends the training."""
    script = (str(ROOT / "examples" / "train_decentralized.py"), "--secret-file", "job.secret", "--steps", "100000")
    command = "from paceline.cli.main import run; run()"
    serve = ("-c", command, "generator", "--secret-file", "job.secret", "--listen", "127.0.0.1:0", "--json")
    processes = [_start(*serve, "--total-steps", "300", cwd=tmp_path)]
    try:
        address = json.loads(_line(processes[0]))["listening"]
        processes.append(_start(*script, "--generator", address, "--slow", "100x", cwd=tmp_path))
        assert "has joined" in _line(processes[1])
        processes.append(_start(*script, "--generator", address, cwd=tmp_path))
        assert "has joined" in _line(processes[2])
        processes[1].kill()
        out, error = processes[2].communicate(timeout=60)
        assert processes[2].returncode == 0, error
        (accuracy,) = re.findall(r"accuracy of the average: ([0-9.]+)", out)
        assert float(accuracy) > 0.9
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _start(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, *arguments], stdout=pipe, stderr=pipe, text=True, cwd=cwd)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return line


def test_schedule_benchmark_measures_a_case(tmp_path: Path) -> None:
    out = _run(
        str(ROOT / "benchmarks" / "schedules.py"), "--only", "StragglAR, n = 64, k = 4", "--repeats", "1", cwd=tmp_path
    )
    assert '"transfers": 31752' in out


def test_every_algorithm_is_documented() -> None:
    from paceline import ALGORITHMS

    text = (ROOT / "docs" / "algorithms.md").read_text()
    for name in ALGORITHMS:
        assert f"`{name}`" in text, f"docs/algorithms.md does not speak of {name}"


def test_late_rank(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    options = ("--megabytes", "4", "--late-rank", "1", "--late-s", "0.2", "--steps", "8")
    out = _run(*launcher, str(ROOT / "examples" / "late_rank.py"), *options, cwd=tmp_path)
    steps_s = {way: float(seconds) for way, seconds in re.findall(r"^(\w+): ([0-9.]+) s a step", out, re.MULTILINE)}
    assert list(steps_s) == ["gloo", "hook", "paceline"]
    assert min(steps_s.values()) >= 0.2, "no step is shorter than its late rank"
    (hook,) = re.findall(r"late, by the hook: (.*)", out)
    late_ms = [float(late) for late in re.findall(r"rank \d: (\d+) ms", hook)]
    assert len(late_ms) == 3
    assert late_ms[1] == max(late_ms) >= 100, f"rank 1 was late by 200 ms, and the hook says: {hook}"
