"""The engine between hosts: links that are cut, lossy links, late ranks, IPv6, the interface to listen on."""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
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


# Who is to blame for which fault, and in which words; the time limit of the group, seconds.
FAULTS: dict[str, tuple[str, float]] = {
    "kill": (r"rank {victim} \(host{victim}\) (closed|broke) its connection", 60),
    "stop": (r"rank {victim} \(host{victim}\) does not answer", 3),
    "cut": (r"rank {victim} \(host{victim}\) cannot be reached", 60),
}
NUM_FAULTS = int(os.environ.get("FAULTS", "3"))


@pytest.mark.timeout(60 + 40 * NUM_FAULTS)
@pytest.mark.lab(hosts=4, up="500mbit", down="500mbit")
def test_random_faults_are_named(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """``FAULTS`` of them (default 3). It prints how long the others took to know."""
    dice = random.Random(NUM_FAULTS)
    took_s: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    for number in range(NUM_FAULTS):
        fault, victim = list(FAULTS)[number % len(FAULTS)], dice.randrange(4)
        words, timeout_s = FAULTS[fault]
        processes = _start(lab, "until-failure", timeout_s)
        _await_working(processes)
        time.sleep(dice.uniform(0, 0.5))
        began_s = time.monotonic()
        if fault == "cut":
            lab.cut(victim)
        else:
            processes[victim].send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        others = [process for rank, process in enumerate(processes) if rank != victim]
        for text in _output(others, 30):
            assert "DistBackendError" in text, f"{fault} of rank {victim}: {text}"
            assert re.search(words.format(victim=victim), text), f"{fault} of rank {victim}: {text}"
        took_s[fault].append(time.monotonic() - began_s)
        if fault == "cut":
            lab.mend(victim)
        processes[victim].kill()
        processes[victim].communicate()
    with capsys.disabled():
        for fault, times_s in took_s.items():
            if times_s:
                middle, worst = statistics.median(times_s), max(times_s)
                sys.stdout.write(
                    f"\n{len(times_s)} x {fault}: all others ended after {middle:.1f} s (median), {worst:.1f} s (worst)"
                )
        sys.stdout.write("\n")


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


@pytest.mark.lab(hosts=3)
def test_links_are_measured_once_for_a_set_of_hosts(lab: Lab) -> None:
    said = _output(_start(lab, "groups"))
    assert said == ["working\nmeasured [0, 1]\nmeasured [1, 2]\nmeasured [0, 1, 2]\nright\n"] * 3


@pytest.mark.lab(hosts=3)
@pytest.mark.parametrize("master", ["", "host0"])
def test_a_host_name_that_means_loopback(lab: Lab, master: str) -> None:
    for host in lab.hosts:
        others = "".join(f"{other.address} {other.name}\n" for other in lab.hosts if other is not host)
        names = Path(f"/proc/{host.pid}/root/etc/hosts")
        assert names.stat().st_dev != Path("/etc/hosts").stat().st_dev, "the lab has no file of its own"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{others}")
    store = {"MASTER_ADDR": master} if master else {}
    for text in _output(_start(lab, "sums", PACELINE_IFNAME="", GLOO_SOCKET_IFNAME="", **store)):
        assert text.endswith("right\n"), text  # torch's store may warn that it finds no name for an address


@pytest.mark.lab(hosts=2)
def test_a_host_that_listens_on_loopback_is_told_what_to_set(lab: Lab) -> None:
    processes = _start(lab, "until-failure", PACELINE_IFNAME="lo")
    for text in _output(processes):
        assert "which no other host can reach: set PACELINE_IFNAME there" in text, text


@pytest.mark.lab(hosts=2)
def test_an_interface_that_is_not_there_gets_a_sentence(lab: Lab) -> None:
    for text in _output(_start(lab, "sums", PACELINE_IFNAME="eth7")):
        assert "no interface eth7" in text
        assert "there are: lo, eth0" in text


@pytest.mark.lab(hosts=2)
def test_streams_use_the_congestion_control_that_was_asked_for(lab: Lab) -> None:
    processes = _start(lab, "until-failure", PACELINE_CONGESTION="reno")
    _await_working(processes)
    inside = ["nsenter", "--net", "--target", str(lab.hosts[0].pid)]
    said = subprocess.run([*inside, "ss", "--tcp", "--info", "--no-header"], check=True, capture_output=True, text=True)
    processes[1].kill()
    _output(processes)
    assert " reno " in said.stdout, said.stdout


@pytest.mark.lab(hosts=2)
def test_a_congestion_control_that_is_not_there_gets_a_sentence(lab: Lab) -> None:
    for text in _output(_start(lab, "sums", PACELINE_CONGESTION="pigeon")):
        assert 'may not use the congestion control "pigeon" (PACELINE_CONGESTION)' in text, text
        assert "reno" in text, text
