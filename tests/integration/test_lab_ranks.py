"""The lab with several ranks on a host: what each rank is told, what it shares with whom, and how it ends.

Needs root; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.lab import Lab, unavailable

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(unavailable() is not None, reason=unavailable() or ""),
]

CLI = [sys.executable, "-c", "from paceline.cli.main import run; run()", "lab"]
RANK = Path(__file__).with_name("multirank_lab_rank.py")
# What is measured on a busy machine may make another algorithm the cheapest one.
LINKS = {"PACELINE_RATE": "1gbit", "PACELINE_LATENCY": "50us"}
SAY = "import os, socket; print(*(os.environ[n] for n in {names!r}), socket.gethostname(), os.getppid() or 'the lab')"
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
TWO_BY_TWO = [
    "[0] 0 0 4 2 0 2 198.18.0.1 host0 the lab",
    "[1] 1 1 4 2 0 2 198.18.0.1 host0 the lab",
    "[2] 2 0 4 2 1 2 198.18.0.1 host1 the lab",
    "[3] 3 1 4 2 1 2 198.18.0.1 host1 the lab",
]


def _lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **LINKS}
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=50, check=False, env=environment)


def test_ranks_are_numbered_host_by_host(tmp_path: Path) -> None:
    command = ["--", sys.executable, "-c", SAY.format(names=NAMES)]
    done = _lab("--hosts", "2", "--ranks-per-host", "2", *command)
    assert sorted(done.stdout.splitlines()) == TWO_BY_TWO, done.stderr
    file = tmp_path / "office.toml"
    file.write_text('[[hosts]]\ncount = 2\nranks = 2\nup = "1Gbit/s"\ndown = "1Gbit/s"\n')
    done = _lab("--cluster", str(file), *command)
    assert sorted(done.stdout.splitlines()) == TWO_BY_TWO, done.stderr


def test_a_cluster_file_may_spread_the_ranks_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "office.toml"
    file.write_text("[[hosts]]\nranks = [1, 2]\n[[hosts]]\nranks = [0]\n")
    done = _lab("--cluster", str(file), "--", sys.executable, "-c", SAY.format(names=NAMES))
    assert sorted(done.stdout.splitlines()) == [
        "[0] 0 0 3 1 1 2 198.18.0.2 host1 the lab",
        "[1] 1 0 3 2 0 2 198.18.0.2 host0 the lab",
        "[2] 2 1 3 2 0 2 198.18.0.2 host0 the lab",
    ], done.stderr


def test_one_rank_of_a_host_is_late() -> None:
    say = "from paceline.lab import late_s; print(late_s())"
    done = _lab("--hosts", "2", "--ranks-per-host", "2", "--late", "3:20ms", "--", sys.executable, "-c", say)
    assert sorted(done.stdout.splitlines()) == ["[0] 0.0", "[1] 0.0", "[2] 0.0", "[3] 0.02"], done.stderr


@pytest.mark.lab(hosts=2, ranks_per_host=2, up="1gbit", down="1gbit")
def test_ranks_of_a_host_share_memory_and_others_do_not(lab: Lab) -> None:
    processes = [
        rank.popen([sys.executable, str(RANK)], env=LINKS, stdout=subprocess.PIPE, text=True) for rank in lab.ranks
    ]
    said = [json.loads(process.communicate(timeout=50)[0]) for process in processes]
    assert [one["rank"] for one in said] == [0, 1, 2, 3]
    shared = [set(one["shared"]) for one in said]
    assert shared[0] & shared[1]
    assert shared[2] & shared[3]
    assert not (shared[0] | shared[1]) & (shared[2] | shared[3])
    for one in said:
        assert any("8388608 bytes: hierarchical" in line for line in one["algorithms"]), one["algorithms"]


@pytest.mark.lab(hosts=2, ranks_per_host=2)
def test_ranks_have_variables_of_their_own(lab: Lab) -> None:
    script = ["sh", "-c", "echo $RANK $LOCAL_RANK $COLOUR; touch /dev/shm/$RANK; ls -m /dev/shm"]
    said = []
    for rank, colour in zip(lab.ranks, ("red", "green", "blue", "pink"), strict=True):
        process = rank.popen(script, env={"COLOUR": colour}, stdout=subprocess.PIPE, text=True)
        said.append(process.communicate(timeout=10)[0].splitlines())
    assert said == [["0 0 red", "0"], ["1 1 green", "0, 1"], ["2 0 blue", "2"], ["3 1 pink", "2, 3"]]
    assert [(host.name, host.ranks) for host in lab.hosts] == [("host0", (0, 1)), ("host1", (2, 3))]


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_rank_is_named(victim: int) -> None:
    lab = ["--hosts", "2", "--ranks-per-host", "2", "--grace", "20s"]
    done = _lab(*lab, "--", sys.executable, str(RANK), str(victim))
    assert done.returncode == 128 + signal.SIGKILL
    assert f"paceline lab: rank {victim} failed first, by SIGKILL" in done.stderr
    errors = [line for line in done.stderr.splitlines() if "DistBackendError: " in line]
    blamed = re.compile(rf"\[(\d)\] .*rank {victim} \(host{victim // 2}\) (closed|broke) its connection")
    found = {match.group(1) for match in map(blamed.match, errors) if match}
    assert found == {str(rank) for rank in range(4) if rank != victim}, done.stderr
