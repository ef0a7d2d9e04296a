"""``paceline generator``: what it prints, and what it says about mistakes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CODE = "from paceline.cli.main import run; run()"


def _start(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CODE, "generator", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=cwd, env={**os.environ, **environment},
    )  # fmt: skip


def _fails(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE, "generator", *arguments],
        capture_output=True, text=True, cwd=cwd, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_listens_and_ends_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    process = _start("--listen", "127.0.0.1:0", "--secret-file", "job.secret", cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("listening on 127.0.0.1:")
    process.send_signal(number)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0
    assert output == "0 steps, 0 averages of 0.0 workers, 0 aborted\n"
    assert errors == f"made a secret in {tmp_path / 'job.secret'}: workers need this file\n"
    assert (tmp_path / "job.secret").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["job.secret"]


def test_json_and_a_secret_named_by_the_environment(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("a secret that somebody has chosen\n")
    (tmp_path / "mine").chmod(0o600)
    process = _start("--listen", "127.0.0.1:0", "--json", cwd=tmp_path, PACELINE_SECRET_FILE="mine")
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    assert first["listening"].startswith("127.0.0.1:")
    assert (first["secret_file"], first["new_secret"]) == (str(tmp_path / "mine"), False)
    process.terminate()
    output, errors = process.communicate(timeout=100)
    assert errors == ""
    assert json.loads(output)["steps"] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--listen", "29600"], "'29600' is not an address; write it like 127.0.0.1:29600"),
        (["--lease", "30"], "'30' is not a duration"),
        (["--lease", "0s"], "--lease is a duration above zero, like 30s, not '0s'"),
        (["--patience", "soon"], "'soon' is not a duration"),
        (["--group-size", "1"], "--group-size is auto or a number from 2 to 4096, not '1'"),
        (["--formation", "random"], "--formation is one of first_come, division, inter_intra, not 'random'"),
        (["--total-steps", "0"], "total_steps is 0"),
        (["--secret-file", "no/such/folder"], "cannot make the secret's file no/such/folder: No such file"),
        (["--secret-file", "/"], "/"),
    ],
)
def test_mistakes_get_a_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    errors = _fails("--listen", "127.0.0.1:0", *arguments, cwd=tmp_path)
    assert errors.startswith("paceline: error: ")
    assert sentence in errors
    assert errors.count("\n") == 1


def test_a_secret_that_others_can_read_or_guess_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "paceline.secret"
    file.write_text("a secret that is long enough")
    file.chmod(0o640)
    assert "can be read by others: run chmod 600 paceline.secret" in _fails(cwd=tmp_path)
    file.chmod(0o600)
    file.write_text("short")
    assert "has 5 bytes, and needs 16 or more" in _fails(cwd=tmp_path)


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"cannot listen on {place}: Address already in use" in _fails("--listen", place, cwd=tmp_path)
