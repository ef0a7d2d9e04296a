from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import Config, Options
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


def test_secret_file() -> None:
    assert Config.from_environment({"PACELINE_SECRET_FILE": "job.secret"}).secret_file == Path("job.secret")
    assert Config.from_environment({"PACELINE_SECRET_FILE": ""}).secret_file is None


def test_host_timeout() -> None:
    assert Config.from_environment({"PACELINE_HOST_TIMEOUT": "2.5s"}).host_timeout_s == 2.5
    assert Config.from_environment({"PACELINE_HOST_TIMEOUT": "0s"}).host_timeout_s == 0


def test_congestion_control_is_the_systems_unless_given() -> None:
    assert Config.from_environment({}).congestion == ""
    assert Config.from_environment({"PACELINE_CONGESTION": "bbr"}).congestion == "bbr"


def test_links_given() -> None:
    config = Config.from_environment({"PACELINE_RATE": "8gbit", "PACELINE_LATENCY": "50us"})
    assert config.rate_bytes_per_s == 1e9
    assert config.latency_s == pytest.approx(50e-6)


def test_multicast() -> None:
    assert Config.from_environment({"PACELINE_MULTICAST": "on"}).multicast == "on"
    assert Config.from_environment({"PACELINE_MCAST_ADDRESS": "239.193.1.2"}).multicast_address == "239.193.1.2"
    assert Config.from_environment({"PACELINE_MCAST_ADDRESS": "FF15::1:2"}).multicast_address == "ff15::1:2"
    assert Config.from_environment({"PACELINE_MCAST_PORTS": "5000-5009"}).multicast_ports == (5000, 5009)
    assert Config.from_environment({"PACELINE_MCAST_PORTS": "5000"}).multicast_ports == (5000, 5000)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PACELINE_MULTICAST", "perhaps"),
        ("PACELINE_MCAST_ADDRESS", "10.0.0.1"),
        ("PACELINE_MCAST_ADDRESS", "somewhere"),
        ("PACELINE_MCAST_PORTS", "5009-5000"),
        ("PACELINE_MCAST_PORTS", "0-10"),
        ("PACELINE_MCAST_PORTS", "many"),
        ("PACELINE_TRANSPORT", "pigeon"),
        ("PACELINE_HUGE_PAGES", "vast"),
        ("PACELINE_LOG", "loud"),
        ("PACELINE_RATE", "fast"),
        ("PACELINE_LATENCY", "soon"),
        ("PACELINE_HOST_TIMEOUT", "10"),
        ("PACELINE_ALGORITHM", "allsum:ring"),
    ],
)
def test_nonsense_gets_a_sentence_that_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(UsageError, match=variable):
        Config.from_environment({variable: value})


def test_what_a_group_is_told_in_code_goes_before_the_variables() -> None:
    config = Config.from_environment({"PACELINE_ALGORITHM": "ring", "PACELINE_LATE": "off"})
    told = config.told(Options(algorithm="allgather:direct", in_turn=True))
    assert told.algorithms == {Kind.ALL_GATHER: "direct"}
    assert (told.late, told.in_turn) == ("off", True)
    assert config.told(Options()) == config.told(None) == config


def test_options_of_another_backend_are_refused() -> None:
    with pytest.raises(UsageError, match=r"are paceline\.Options, not dict"):
        Config().told({"algorithm": "ring"})
    with pytest.raises(UsageError, match="there is no collective"):
        Config().told(Options(algorithm="allsum:ring"))
