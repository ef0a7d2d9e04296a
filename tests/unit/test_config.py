from __future__ import annotations

import pytest

from paceline.config import Config
from paceline.errors import UsageError
from paceline.ir.collective import Kind


def test_nothing_set_means_defaults() -> None:
    assert Config.from_environment({}) == Config()


def test_algorithms_for_all_and_by_collective() -> None:
    config = Config.from_environment({"PACELINE_ALGORITHM": "ring, broadcast:chain"})
    assert config.algorithms == {None: "ring", Kind.BROADCAST: "chain"}


def test_interface_falls_back_to_gloos() -> None:
    assert Config.from_environment({"GLOO_SOCKET_IFNAME": "eth1"}).interface == "eth1"
    both = {"GLOO_SOCKET_IFNAME": "eth1", "PACELINE_IFNAME": "eth0"}
    assert Config.from_environment(both).interface == "eth0"


def test_links_given() -> None:
    config = Config.from_environment({"PACELINE_RATE": "8gbit", "PACELINE_LATENCY": "50us"})
    assert config.rate_bytes_per_s == 1e9
    assert config.latency_s == pytest.approx(50e-6)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PACELINE_TRANSPORT", "pigeon"),
        ("PACELINE_LOG", "loud"),
        ("PACELINE_RATE", "fast"),
        ("PACELINE_LATENCY", "soon"),
        ("PACELINE_ALGORITHM", "allsum:ring"),
    ],
)
def test_nonsense_gets_a_sentence_that_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=variable):
        Config.from_environment({variable: value})
