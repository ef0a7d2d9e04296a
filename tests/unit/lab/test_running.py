"""A command by many processes: prefixes, exit codes, ends. Plain processes stand in for hosts."""

from __future__ import annotations

import functools
import io
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from paceline.errors import LabError, UsageError
from paceline.lab.running import run_everywhere
from paceline.lab.voices import Voice, prefix

pytestmark = pytest.mark.timeout(30)


def _rank(rank: int, args: list[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(args, env={**os.environ, "RANK": str(rank)}, **options)


def run(script: str, num_ranks: int = 3, timeout_s: float | None = None, grace_s: float = 0.2) -> int:
    starters: list[Callable[..., Any]] = [functools.partial(_rank, rank) for rank in range(num_ranks)]
    return run_everywhere(starters, ["sh", "-c", script], timeout_s=timeout_s, grace_s=grace_s)


def test_lines_come_behind_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("echo one; echo two >&2; printf three") == 0
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == [f"[{rank}] {word}" for rank in range(3) for word in ("one", "three")]
    assert sorted(err.splitlines()) == [f"[{rank}] two" for rank in range(3)]


def test_the_worst_exit_code_wins() -> None:
    assert run("exit $((RANK * 10))", grace_s=5) == 20
    assert run("[ $RANK = 1 ] && kill -SEGV $$; exit 3", grace_s=5) == 128 + signal.SIGSEGV


def test_the_first_to_fail_is_named_and_quoted_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("if [ $RANK = 2 ]; then echo because >&2; exit 7; else sleep 60; fi") == 7
    err = capsys.readouterr().err
    assert err.endswith("paceline lab: rank 2 failed first, with exit code 7; it said:\n[2] because\n")


def test_those_that_ignore_sigterm_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("trap '' TERM; sleep 60 & wait; sleep 60", num_ranks=2, timeout_s=0.3) == 124
    assert "still running after 300 ms, and ended: ranks 0, 1" in capsys.readouterr().err


def test_a_daemon_that_keeps_the_pipe_does_not_hold_up_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sleep 60 & echo $!", num_ranks=1) == 0
    os.kill(int(capsys.readouterr().out.removeprefix("[0] ")), signal.SIGKILL)  # it is still there


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(LabError, match="rank 0 cannot run 'no-such-command': No such file"):
        run_everywhere([functools.partial(_rank, 0)], ["no-such-command"], timeout_s=None, grace_s=1)
    with pytest.raises(UsageError, match="no command"):
        run_everywhere([], [], timeout_s=None, grace_s=1)


def test_much_output_arrives_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("seq 20000", num_ranks=2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[1]")] == [f"[1] {number}" for number in range(1, 20001)]


def test_the_first_traceback_is_remembered() -> None:
    voice = Voice(0, io.StringIO())
    voice.say(b"".join(b"chatter %d\n" % number for number in range(50)))
    assert voice.remembered == [f"chatter {number}" for number in range(40, 50)]
    voice.say(b"Traceback (most recent call last):\nthe cause\n" + b"more\n" * 100 + b"unfinished")
    assert voice.remembered[:2] == ["Traceback (most recent call last):", "the cause"]
    assert len(voice.remembered) == 60


def test_prefixes_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert prefix(3, io.StringIO()) == "[3] "
    assert prefix(3, Terminal()) == "\x1b[35m[3]\x1b[0m "
    monkeypatch.setenv("NO_COLOR", "1")
    assert prefix(3, Terminal()) == "[3] "
