"""The engine between hosts: links that are cut, lossy links, late ranks, IPv6, the interface to listen on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.lab import Lab

RANK = Path(__file__).with_name("lab_rank.py")


def _start(lab: Lab, task: str, **variables: str) -> list[subprocess.Popen[str]]:
    return [
        host.popen(
            [sys.executable, str(RANK), task],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in lab.hosts
    ]


def _output(processes: list[subprocess.Popen[str]], timeout_s: float = 60) -> list[str]:
    return [process.communicate(timeout=timeout_s)[0] for process in processes]


@pytest.mark.lab(hosts=3, up="500mbit", down="500mbit")
def test_a_cut_link_is_named(lab: Lab) -> None:
    processes = _start(lab, "until-failure")
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
    lab.cut(2)
    said = _output(processes)
    for text in said[:2]:
        assert "DistBackendError" in text
        assert "rank 2 (host2) does not answer" in text, text


@pytest.mark.lab(hosts=3, up="200mbit", down="200mbit", loss=0.02)
def test_lossy_links_lose_nothing(lab: Lab) -> None:
    assert _output(_start(lab, "sums")) == ["right\n"] * 3


@pytest.mark.lab(hosts=3)
def test_ipv6_where_the_interface_has_nothing_else(lab: Lab) -> None:
    for host in lab.hosts:
        inside = ["nsenter", "--all", "--target", str(host.pid), "ip"]
        subprocess.run([*inside, "address", "flush", "scope", "global", "dev", host.interface], check=True)
        address = [f"{host.address6}/64", "dev", host.interface, "nodad"]
        subprocess.run([*inside, "-6", "address", "add", *address], check=True)
    said = _output(_start(lab, "sums", MASTER_ADDR=lab.hosts[0].address6))
    assert said == ["right\n"] * 3


@pytest.mark.lab(hosts=3)
def test_links_are_measured_once_for_a_set_of_hosts(lab: Lab) -> None:
    said = _output(_start(lab, "groups"))
    assert said == ["measured [0, 1]\nmeasured [1, 2]\nmeasured [0, 1, 2]\nright\n"] * 3


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
