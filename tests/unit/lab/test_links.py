"""The lines that make a lab's network, and what a Lab refuses before it makes any."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import LabError, UsageError
from paceline.ir.cluster import ETHERNET_WIRE_FACTOR, Cluster
from paceline.lab import Lab, links


@given(st.floats(1e3, 1e12))
def test_a_bucket_holds_the_largest_packet_and_outruns_little(rate_bytes_per_s: float) -> None:
    line = links.shaping_line("eth0", rate_bytes_per_s)
    match = re.search(r"rate (\d+)bit burst (\d+) limit (\d+)", line)
    assert match is not None
    bits, burst, limit = map(int, match.groups())
    assert bits == pytest.approx(rate_bytes_per_s * 8, rel=1e-3)
    largest = links.GSO_BYTES + 66 * (links.GSO_BYTES // 1448 + 1)
    assert largest <= burst <= 0.005 * 64e6
    assert burst <= limit


def test_addresses_are_in_the_range_for_benchmarks() -> None:
    addresses = [links.address(rank) for rank in range(254)]
    assert addresses[0] == "198.18.0.1"
    assert addresses[-1] == "198.18.0.254"
    assert links.address6(10) == "fd00:198:18::b"


def test_no_loss_needs_no_filter() -> None:
    assert links.loss_lines(0.0) == ""
    assert str(round(0.25 * 2**32)) in links.loss_lines(0.25)


@pytest.mark.parametrize("name", ["lan8", "lan4", "uplink8"])
def test_the_presets_are_labs(name: str) -> None:
    assert Lab.preset(name, late={1: 0.5}).cluster == Cluster.preset(name).with_late({1: 0.5})


def test_a_lab_knows_its_cluster() -> None:
    cluster = Lab(hosts=3, up="100mbit", down=25e6).cluster
    assert cluster.num_ranks == 3
    assert (cluster.hosts[0].up_bytes_per_s, cluster.hosts[0].down_bytes_per_s) == (12.5e6, 25e6)
    assert cluster.wire_factor == ETHERNET_WIRE_FACTOR


def test_the_environment_is_that_of_torchrun() -> None:
    environment = Lab(hosts=4, late={1: 0.25, 2: 2}).environment(2)
    expected = {
        "MASTER_ADDR": "198.18.0.1", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "2", "GROUP_WORLD_SIZE": "4", "ROLE_RANK": "2", "ROLE_WORLD_SIZE": "4",
        "GLOO_SOCKET_IFNAME": "eth0", "PACELINE_IFNAME": "eth0", "PACELINE_LAB_LATE": "1:250ms,2:2s",
    }  # fmt: skip
    assert expected.items() <= environment.items()
    assert environment["MASTER_PORT"].isdecimal()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hosts": 0}, "1 to 254 hosts"),
        ({"hosts": 255}, "1 to 254 hosts"),
        ({"up": "fast"}, "not a rate"),
        ({"loss": 1.0}, "loss is a share"),
        ({"loss": -0.1}, "loss is a share"),
        ({"hosts": 2, "late": {2: 1.0}}, "rank 2 cannot be late"),
        ({"cluster": Cluster.preset("gpu8")}, "one rank each"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Lab(**arguments)


def test_a_lab_that_does_not_run_says_so() -> None:
    lab = Lab(hosts=2)
    for attempt in (
        lambda: lab.hosts,
        lambda: lab.cut(0),
        lambda: lab.set_rate(1, up="1mbit"),
        lambda: lab.run(["true"]),
    ):
        with pytest.raises(LabError, match="not running"):
            attempt()
    lab.close()
