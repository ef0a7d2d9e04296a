"""Multicast between hosts: results, losses, deaths, networks that let nothing through, and bytes at the ports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.lab import Lab
from paceline.lab.hosts import LabHost

RANK = Path(__file__).with_name("multicast_lab_rank.py")
BY_MULTICAST = {"PACELINE_ALGORITHM": "allgather:multicast,broadcast:multicast"}

Processes = list[subprocess.Popen[str]]


def _start(lab: Lab, task: str, count: int = 1_000_000, timeout_s: float = 60, **variables: str) -> Processes:
    return [
        rank.popen(
            [sys.executable, str(RANK), task, str(timeout_s), str(count)],
            env={**BY_MULTICAST, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in lab.ranks
    ]


def _output(processes: Processes, timeout_s: float = 100) -> list[list[str]]:
    return [process.communicate(timeout=timeout_s)[0].splitlines() for process in processes]


def _await(processes: Processes, word: str) -> None:
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{word}\n"


def _go_on(processes: Processes) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def _drop_multicast(host: LabHost, share: float = 1) -> None:
    """Lose packets to 224.0.0.0/4 on their way in. A classic BPF program, since not every kernel has another filter."""
    program = [
        (0x28, 0, 0, 12),  # load the protocol
        (0x15, 0, 5, 0x800),
        (0x30, 0, 0, 30),  # load the first byte of the destination
        (0x35, 0, 3, 224),
        (0x20, 0, 0, 0xFFFFF038),  # load a random number of 32 bits
        (0x25, 1, 0, round(share * (2**32 - 1))),
        (6, 0, 0, 2),
        (6, 0, 0, 0),
    ]
    bytecode = ",".join(" ".join(map(str, line)) for line in program)
    inside = ["nsenter", f"--net={host.namespace}", "tc"]
    subprocess.run([*inside, "qdisc", "add", "dev", host.interface, "clsact"], check=True)
    dropping = ["bpf", "direct-action", "bytecode", f"{len(program)},{bytecode}"]
    subprocess.run([*inside, "filter", "add", "dev", host.interface, "ingress", *dropping], check=True)


@pytest.mark.lab("lan4")
def test_results_are_right_and_each_host_sends_its_shard_once(lab: Lab) -> None:
    count = 4_000_000
    processes = _start(lab, "gather", count)
    _await(processes, "working")
    before = lab.port_bytes()
    _go_on(processes)
    _await(processes, "gathered")
    after = lab.port_bytes()
    _go_on(processes)
    for lines in _output(processes):
        assert lines[-1] == "right", lines
        assert "no multicast" not in lines
    for start, end in zip(before, after, strict=True):
        assert end.sent - start.sent <= 1.10 * 4 * count
        assert end.received - start.received <= 1.10 * 3 * 4 * count


@pytest.mark.lab("lan4")
def test_all_sizes(lab: Lab) -> None:
    for lines in _output(_start(lab, "moves")):
        assert lines[-1] == "right", lines
        assert "no multicast" not in lines


@pytest.mark.lab("lan4", loss=0.01)
def test_what_is_lost_on_the_links_is_repaired(lab: Lab) -> None:
    for lines in _output(_start(lab, "moves", 300_000)):
        assert lines[-1] == "right", lines
        assert "repaired" in lines


# TCP has its own troubles where so much of everything is lost.
@pytest.mark.lab("lan4")
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_many_lost_packets_are_sent_again(lab: Lab, share: float) -> None:
    for host in lab.hosts:
        _drop_multicast(host, share)
    for lines in _output(_start(lab, "moves")):
        assert lines[-1] == "right", lines
        assert "repaired" in lines


@pytest.mark.lab("lan4x2")
def test_several_ranks_on_a_host(lab: Lab) -> None:
    for lines in _output(_start(lab, "moves")):
        assert lines[-1] == "right", lines
        assert "no multicast" not in lines


@pytest.mark.lab("lan4")
def test_a_rank_that_is_late(lab: Lab) -> None:
    for lines in _output(_start(lab, "late")):
        assert lines[-1] == "right", lines


@pytest.mark.lab("lan4")
def test_operations_and_groups_that_overlap(lab: Lab) -> None:
    for lines in _output(_start(lab, "overlapping")):
        assert lines[-1] == "right", lines


# Rank 0 is a root and rank 2 only receives in one broadcast; in all-gathers both are both.
@pytest.mark.lab("lan4")
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_is_named(lab: Lab, victim: int) -> None:
    processes = _start(lab, "until-failure", 5_000_000)
    _await(processes, "working")
    processes[victim].kill()
    processes[victim].communicate()
    others = [process for rank, process in enumerate(processes) if rank != victim]
    for lines in _output(others):
        assert any("DistBackendError" in line and f"rank {victim} (host{victim})" in line for line in lines), lines


@pytest.mark.lab("lan4")
def test_a_network_without_multicast_is_named_once_and_does_without(lab: Lab) -> None:
    _drop_multicast(lab.hosts[2])
    said = _output(_start(lab, "moves"))
    for lines in said:
        assert lines[-1] == "right", lines
        assert "no multicast" in lines
    warnings = [line for lines in said for line in lines if "multicast cannot be used" in line]
    assert len(warnings) == 1, said
    assert "rank 2 (host2): no packet came from rank 0, 1, 3" in warnings[0]


@pytest.mark.lab("lan4")
@pytest.mark.parametrize("deaf", [[1], [0, 1, 2, 3]])
def test_a_network_that_stops_multicast_in_the_middle(lab: Lab, deaf: list[int]) -> None:
    processes = _start(lab, "dropped")
    _await(processes, "working")
    _await(processes, "moved")
    for number in deaf:
        _drop_multicast(lab.hosts[number])
    _go_on(processes)
    said = _output(processes)
    for rank, lines in enumerate(said):
        assert lines[-1] == "right", lines
        assert rank not in deaf or "repaired" in lines, lines


@pytest.mark.lab("lan4")
def test_it_can_be_forbidden(lab: Lab) -> None:
    for lines in _output(_start(lab, "moves", PACELINE_MULTICAST="off")):
        assert lines == ["working", "no multicast", "right"]


@pytest.mark.lab(hosts=3)
def test_ipv6(lab: Lab) -> None:
    for host in lab.hosts:
        inside = ["nsenter", "--all", "--target", str(host.pid), "ip"]
        subprocess.run([*inside, "address", "flush", "scope", "global", "dev", host.interface], check=True)
        address = [f"{host.address6}/64", "dev", host.interface, "nodad"]
        subprocess.run([*inside, "-6", "address", "add", *address], check=True)
    for lines in _output(_start(lab, "moves", MASTER_ADDR=lab.hosts[0].address6)):
        assert lines[-1] == "right", lines
        assert "no multicast" not in lines
