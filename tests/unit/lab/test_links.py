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


@pytest.mark.parametrize("name", ["lan8", "lan4", "uplink8", "lan4x2", "lan2x4"])
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


PLACES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR")


def _places(lab: Lab) -> list[str]:
    environments = [lab.environment(rank) for rank in range(lab.cluster.num_ranks)]
    return [" ".join(environment[name] for name in PLACES) for environment in environments]


def test_ranks_are_numbered_host_by_host() -> None:
    lab = Lab(hosts=3, ranks_per_host=2, late={3: 0.5})
    assert _places(lab) == [f"{rank} {rank % 2} {rank // 2} 6 2 3 198.18.0.1" for rank in range(6)]
    assert lab.environment(0)["PACELINE_LAB_LATE"] == lab.environment(5)["PACELINE_LAB_LATE"] == "3:500ms"
    assert lab.environment(5)["ROLE_RANK"] == "5"
    assert lab.environment(5)["ROLE_WORLD_SIZE"] == "6"
    with pytest.raises(UsageError, match="no rank 6; its ranks are 0 to 5"):
        lab.environment(6)


def test_ranks_are_where_a_cluster_has_them() -> None:
    cluster = Cluster.from_mapping({"hosts": [{"ranks": [2, 3]}, {"ranks": [0]}, {"ranks": [1]}]})
    assert _places(Lab(cluster=cluster)) == [
        "0 0 1 4 1 3 198.18.0.2", "1 0 2 4 1 3 198.18.0.2", "2 0 0 4 2 3 198.18.0.2", "3 1 0 4 2 3 198.18.0.2"
    ]  # fmt: skip


def test_equal_hosts_are_those_of_the_preset() -> None:
    lab, preset = Lab(hosts=2, up="1gbit", down="1gbit", ranks_per_host=4), Cluster.preset("lan2x4")
    assert (lab.cluster.hosts, lab.cluster.host_of) == (preset.hosts, preset.host_of)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hosts": 0}, "1 to 254 hosts"),
        ({"hosts": 255}, "1 to 254 hosts"),
        ({"up": "fast"}, "not a rate"),
        ({"loss": 1.0}, "loss is a share"),
        ({"loss": -0.1}, "loss is a share"),
        ({"hosts": 2, "late": {2: 1.0}}, "rank 2 cannot be late"),
        ({"hosts": 2, "ranks_per_host": 2, "late": {4: 1.0}}, "rank 4 cannot be late"),
        ({"ranks_per_host": 0}, "at least 1 rank, not 0"),
        ({"ranks_per_host": -1}, "at least 1 rank, not -1"),
        ({"hosts": 64, "ranks_per_host": 5}, "at most 256 ranks.* 320, which are 5 on each of 64 hosts"),
        ({"hosts": 1, "ranks_per_host": 10**9}, "at most 256 ranks"),
        ({"cluster": Cluster.preset("lan4"), "ranks_per_host": 2}, "leave ranks_per_host out"),
        ({"cluster": Cluster.uniform(255)}, "255 hosts with 255 ranks in all, and a lab at most 254 hosts"),
        ({"cluster": Cluster.uniform(2, ranks_per_host=129)}, "2 hosts with 258 ranks in all"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Lab(**arguments)


def test_a_lab_that_does_not_run_says_so() -> None:
    lab = Lab(hosts=2)
    for attempt in (
        lambda: lab.hosts,
        lambda: lab.ranks,
        lambda: lab.cut(0),
        lambda: lab.set_rate(1, up="1mbit"),
        lambda: lab.run(["true"]),
    ):
        with pytest.raises(LabError, match="not running"):
            attempt()
    lab.close()


def test_the_counters_of_the_shaper_are_found() -> None:
    said = (
        '[{"kind":"noqueue","dev":"lo","root":true,"bytes":1},{"kind":"tbf","dev":"eth0","root":true,"bytes":1514},'
        '{"kind":"clsact","dev":"eth0","parent":"ffff:fff1","bytes":9}]'
    )
    assert links.bytes_sent(said, "eth0") == 1514
    with pytest.raises(LabError, match="no counters of port7"):
        links.bytes_sent(said, "port7")
