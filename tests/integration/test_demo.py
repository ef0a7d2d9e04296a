"""The demonstration, very short: in the lab, on loopback, as somebody who is not root, and when it goes wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.lab import unavailable

COMMAND = [sys.executable, "-c", "from paceline.cli.main import run; run()", "demo", "--picture", "demo.png"]
ROWS = (
    "iteration of a rank on time",
    "steps of late rank / of others",
    "images a second",
    "to 95% accuracy while training",
    "exposed comm. an iteration",
    "who was late",
    "algorithms",
    "accuracy on held-out digits",
    "largest difference of a weight",
)


def _demo(cwd: Path, *arguments: str, before: Sequence[str] = (), command: Sequence[str] = COMMAND) -> str:
    done = subprocess.run(
        [*before, *command, *arguments], capture_output=True, text=True, cwd=cwd, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _refused(cwd: Path, *arguments: str, before: Sequence[str] = ()) -> str:
    """What is said where no training has begun."""
    done = subprocess.run(
        [*before, *COMMAND, *arguments], capture_output=True, text=True, cwd=cwd, timeout=100, check=False
    )
    assert (done.returncode, "iteration" in done.stdout) == (2, False), done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


def _with_capabilities(kept: str = "") -> list[str]:
    """What takes all other capabilities from root; others have none anyway."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("giving up root needs setpriv, of util-linux")
    return ["setpriv", f"--bounding-set=-all{kept and ',+' + kept}", "--inh-caps=-all"]


def _check(out: str, picture: Path) -> None:
    for row in ROWS:
        assert row in out
    late = next(line for line in out.splitlines() if "who was late (measured here)" in line)
    assert late.count("rank 3, by") == 4
    accuracies = [
        cell.strip() for cell in next(line for line in out.splitlines() if "held-out" in line).split("│")[2:6]
    ]
    assert len(set(accuracies[:3])) == 1
    assert accuracies[3].endswith("%")
    assert "averages: " in out
    assert "do not end with the same accuracy" not in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_in_the_lab(tmp_path: Path) -> None:
    out = _demo(tmp_path, "--iterations", "4", "--late", "300ms", "--rate", "100mbit", "--place", "lab")
    _check(out, tmp_path / "demo.png")
    assert "4 emulated hosts on links of 100 Mbit/s" in out
    assert "stragglar" in out
    assert "reducescatter: " in out


def test_without_any_privilege(tmp_path: Path) -> None:
    """Where user namespaces are closed to the caller, too, connections are paced instead."""
    out = _demo(tmp_path, "--iterations", "3", "--rate", "500mbit", before=_with_capabilities())
    _check(out, tmp_path / "demo.png")
    assert "send by paced TCP, 500 Mbit/s each" in out or "4 emulated hosts" in out


def test_in_the_lab_without_root(tmp_path: Path) -> None:
    """Whoever may make user namespaces needs no root for the lab. (Root also needs CAP_SETFCAP for one.)"""
    before = _with_capabilities("setfcap")
    code = "from paceline.lab import unprivileged; raise SystemExit(not unprivileged.works())"
    if subprocess.run([*before, sys.executable, "-c", code], timeout=60, check=False).returncode != 0:
        pytest.skip("the kernel lets nobody but root make namespaces")
    out = _demo(tmp_path, "--iterations", "3", "--rate", "500mbit", "--place", "lab", before=before)
    _check(out, tmp_path / "demo.png")
    assert "4 emulated hosts on links of 500 Mbit/s" in out


@pytest.mark.skipif(os.geteuid() != 0, reason="others may be allowed to make namespaces")
def test_the_lab_needs_root_where_namespaces_are_closed(tmp_path: Path) -> None:
    error = _refused(tmp_path, "--place", "lab", before=_with_capabilities())
    assert error.startswith("paceline: error: the lab needs root")


def test_without_matplotlib_and_scikit_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "import sys; sys.modules.update(dict.fromkeys(['matplotlib', 'sklearn']))\n"
    (tmp_path / "sitecustomize.py").write_text(missing)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "pictures need matplotlib" in _refused(tmp_path, "--place", "loopback")
    out = _demo(tmp_path, "--iterations", "3", "--rate", "500mbit", "--place", "loopback", command=COMMAND[:-2])
    assert all(row in out for row in ROWS)
    assert "pip install matplotlib" in out
    assert not list(tmp_path.glob("*.png"))


def test_a_folder_that_cannot_be_written_to_is_found_before_the_training(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert "cannot write demo.png: Permission denied" in _refused(tmp_path, before=_with_capabilities())


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(tmp_path: Path, end: signal.Signals) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--place", "loopback"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    ranks = _ranks_of(process)
    process.send_signal(end)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_rank_gets_a_sentence(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--place", "loopback"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    os.kill(_ranks_of(process)[2], signal.SIGKILL)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "paceline: error: rank 2 was killed by SIGKILL" in error
    assert "Traceback" not in error


def _ranks_of(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> list[int]:
    """The process ids of the four ranks, in order, once all have been started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(600):
        pids = [int(pid) for pid in children.read_text().split()]
        lines = [(pid, Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")) for pid in pids]
        ranks = {int(words[3]): pid for pid, words in lines if len(words) > 4 and words[2] == b"paceline.demo.rank"}
        if len(ranks) == 4:
            return [ranks[rank] for rank in range(4)]
        time.sleep(0.1)
    process.kill()
    raise AssertionError("the ranks have not been started within a minute")
