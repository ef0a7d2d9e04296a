"""The engine between hosts: links that are cut, lossy links, late ranks, IPv6, the interface to listen on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.lab import Lab

RANK = Path(__file__).with_name("lab_rank.py")


def _start(lab: Lab, task: str, timeout_s: float = 60, **variables: str) -> list[subprocess.Popen[str]]:
    return [
        host.popen(
            [sys.executable, str(RANK), task, str(timeout_s)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in lab.hosts
    ]


def _output(processes: list[subprocess.Popen[str]], timeout_s: float = 60) -> list[str]:
    return [process.communicate(timeout=timeout_s)[0] for process in processes]


def _await_working(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"


@pytest.mark.lab(hosts=3, up="500mbit", down="500mbit")
@pytest.mark.parametrize("task", ["until-failure", "idle-until-failure"])
def test_a_dead_host_is_named_long_before_the_time_limit(lab: Lab, task: str) -> None:
    processes = _start(lab, task, 600, PACELINE_HOST_TIMEOUT="3s")
    _await_working(processes)
    lab.cut(2)
    for text in _output(processes, 40)[:2]:
        assert "DistBackendError" in text
        assert "rank 2 (host2) cannot be reached" in text, text


# Its kernel answers: whoever is stopped or late is not dead, however long that lasts.
@pytest.mark.lab(hosts=3, up="500mbit", down="500mbit")
def test_a_stopped_rank_is_not_dead(lab: Lab) -> None:
    processes = _start(lab, "late", PACELINE_HOST_TIMEOUT="1s", PACELINE_LATE="off")
    _await_working(processes)
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(6)
    processes[1].send_signal(signal.SIGCONT)
    assert _output(processes) == ["right\n"] * 3


@pytest.mark.lab(hosts=3, up="500mbit", down="500mbit")
def test_a_cut_link_is_named_at_the_time_limit(lab: Lab) -> None:
    processes = _start(lab, "until-failure", 4)
    _await_working(processes)
    lab.cut(2)
    said = _output(processes)
    for text in said[:2]:
        assert "DistBackendError" in text
        assert "rank 2 (host2) does not answer" in text, text


@pytest.mark.lab(hosts=3, up="200mbit", down="200mbit", loss=0.02)
def test_lossy_links_lose_nothing(lab: Lab) -> None:
    assert _output(_start(lab, "sums")) == ["working\nright\n"] * 3


@pytest.mark.lab(hosts=3)
def test_ipv6_where_the_interface_has_nothing_else(lab: Lab) -> None:
    for host in lab.hosts:
        inside = ["nsenter", "--all", "--target", str(host.pid), "ip"]
        subprocess.run([*inside, "address", "flush", "scope", "global", "dev", host.interface], check=True)
        address = [f"{host.address6}/64", "dev", host.interface, "nodad"]
        subprocess.run([*inside, "-6", "address", "add", *address], check=True)
    said = _output(_start(lab, "sums", MASTER_ADDR=lab.hosts[0].address6))
    assert said == ["working\nright\n"] * 3


@pytest.mark.lab(hosts=2)
def test_an_interface_that_is_not_there_gets_a_sentence(lab: Lab) -> None:
    for text in _output(_start(lab, "sums", PACELINE_IFNAME="eth7")):
        assert "no interface eth7" in text
        assert "there are: lo, eth0" in text
