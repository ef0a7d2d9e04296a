"""Clusters from presets, files and code."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from paceline.errors import FileFormatError, PacelineError, UsageError
from paceline.ir.cluster import PRESETS, Cluster, Host

OFFICE = """
name = "office"
multicast = true
wire_factor = 1.05

[[hosts]]
count = 2
ranks = 2
up = "1Gbit/s"
down = "2Gbit/s"
latency = "40us"
local = "9GB/s"
local_latency = "1us"

[[hosts]]
up = "100mbit"

[late]
3 = "500ms"
"""


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(OFFICE)
    office = Cluster.load(path)
    assert (office.name, office.num_ranks, office.host_of, office.multicast) == ("office", 5, (0, 0, 1, 1, 2), True)
    assert astuple(office.hosts[1]) == pytest.approx((125e6, 250e6, 40e-6, 9e9, 1e-6))
    assert office.hosts[2].up_bytes_per_s == 12.5e6
    assert office.late_s == (0, 0, 0, 0.5, 0)


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text('{"hosts": [{"count": 3, "up": "1gbit"}], "late": {"1": "2s"}}')
    cluster = Cluster.load(path)
    assert (cluster.name, cluster.num_ranks, cluster.late_s) == ("cluster", 3, (0, 2, 0))


def test_hosts_with_lists_of_ranks() -> None:
    mixed = Cluster.from_mapping({"hosts": [{"ranks": [0, 3]}, {"ranks": [2, 1]}]})
    assert mixed.host_of == (0, 1, 1, 0)
    for wrong in ([0, 2], [0, 0], [], [-1, 0], [0.5], ["0"], [0, 10**9]):
        with pytest.raises(UsageError):
            Cluster.from_mapping({"hosts": [{"ranks": wrong}]})
    with pytest.raises(UsageError, match="for one host only"):
        Cluster.from_mapping({"hosts": [{"ranks": [0], "count": 2}]})


HOSTILE = {
    "empty": "",
    "no hosts": 'name = "x"',
    "hosts a number": "hosts = 3",
    "host a number": "hosts = [3]",
    "unknown key": '[[hosts]]\nspeed = "1gbit"',
    "unknown top key": 'color = "red"\n[[hosts]]\n',
    "rate a number": "[[hosts]]\nup = 3",
    "rate of nan": '[[hosts]]\nup = "nanbit"',
    "no rate": '[[hosts]]\nup = "0mbit"',
    "huge count": "[[hosts]]\ncount = 1000000000000",
    "negative ranks": "[[hosts]]\nranks = -4",
    "late rank unknown": '[[hosts]]\n[late]\n7 = "1s"',
    "late rank negative": '[[hosts]]\n[late]\n-1 = "1s"',
    "late a number": "[[hosts]]\n[late]\n0 = 5",
    "tiny rate": '[[hosts]]\nup = "1e-300bit"',
    "late forever": '[[hosts]]\n[late]\n0 = "1e300s"',
    "wire factor huge": "wire_factor = 1" + "0" * 400 + "\n[[hosts]]\n",
    "dotted key": "a" + ".a" * 40000 + " = 1",
    "escapes": '"\\u001b[31m" = 3',
    "wire factor nan": "wire_factor = nan\n[[hosts]]\n",
    "wire factor small": "wire_factor = 0.5\n[[hosts]]\n",
    "bool for int": "[[hosts]]\ncount = true",
    "not toml": "\x00\x01\x02",
    "deep": "a = " + "[" * 5000 + "]" * 5000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_files_get_one_sentence(tmp_path: Path, case: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(HOSTILE[case])
    with pytest.raises(FileFormatError, match="is not a cluster file") as caught:
        Cluster.load(path)
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


def test_other_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        Cluster.load(tmp_path / "none.toml")
    with pytest.raises(UsageError, match="cannot read"):
        Cluster.load(tmp_path)
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * (2 << 20))
    with pytest.raises(FileFormatError, match="is larger than"):
        Cluster.load(large)
    (tmp_path / "latin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(FileFormatError):
        Cluster.load(tmp_path / "latin.toml")


@pytest.mark.timeout(10)
def test_many_hosts_are_read_in_no_time() -> None:
    assert Cluster.from_mapping({"hosts": [{}] * 32768}).num_ranks == 32768


def test_a_name_from_a_file_is_printable() -> None:
    assert Cluster.from_mapping({"name": "\x1b[31m" + "x" * 1000, "hosts": [{}]}).name.isprintable()


def test_presets() -> None:
    hosts_and_ranks = {
        "lan8": (8, 8), "lan4": (4, 4), "uplink8": (8, 8), "lan4x2": (4, 8), "lan2x4": (2, 8),
        "gpu8": (1, 8), "eth64": (16, 64), "fattree188": (188, 188),
    }  # fmt: skip
    found = {name: Cluster.preset(name) for name in PRESETS}
    assert {name: (len(one.hosts), one.num_ranks) for name, one in found.items()} == hosts_and_ranks
    assert Cluster.preset("lan4x2").host_of == (0, 0, 1, 1, 2, 2, 3, 3)
    assert Cluster.preset("lan2x4").hosts[0] == Cluster.preset("lan4").hosts[0]
    assert all(Cluster.preset(name).name == name and Cluster.preset(name).note for name in PRESETS)
    assert Cluster.preset("lan8").hosts[0].up_bytes_per_s == 62.5e6
    with pytest.raises(UsageError, match="there is no cluster 'lan9'"):
        Cluster.preset("lan9")


def test_wrong_clusters() -> None:
    host = Host()
    for wrong in (
        lambda: Cluster((host,), ()),
        lambda: Cluster((host, host), (0, 0)),
        lambda: Cluster((host,), (0, 1)),
        lambda: Cluster((host,), (0, 0), (0.0,)),
        lambda: Cluster((host,), (0,), (float("nan"),)),
        lambda: Cluster((host,), (0,), (-1.0,)),
        lambda: Host(up_bytes_per_s=0),
        lambda: Host(latency_s=-1),
        lambda: Cluster.uniform(0),
        lambda: Cluster.uniform(10**9),
        lambda: Cluster.uniform(3).with_late({3: 1.0}),
    ):
        with pytest.raises(PacelineError):
            wrong()


def test_resized_keeps_the_kind_of_cluster_and_who_is_last() -> None:
    eth = Cluster.preset("eth64").with_late({60: 2.0})
    small, large = eth.resized(10), eth.resized(100)
    assert (small.num_ranks, len(small.hosts), max(small.late_s)) == (10, 3, 2.0)
    assert (large.num_ranks, len(large.hosts), large.late_s[60]) == (100, 25, 2.0)
