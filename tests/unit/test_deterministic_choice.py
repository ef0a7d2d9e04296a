"""With ``PACELINE_DETERMINISTIC=1`` algorithms do not depend on what links measure; without it they do."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from paceline import backend, config
from paceline.config import Config, Shared
from paceline.errors import UsageError
from paceline.ir.collective import Collective, Kind
from paceline.observe import links
from paceline.observe.links import Links
from paceline.planner import Planner
from paceline.policy.select import cluster_of, select

HOSTS = ["a", "b", "c", "d"]
NETWORKS = {
    "thin": Links(1e-6, (1.25e6,) * 4),
    "far": Links(2e-2, (2e9,) * 4),
    "uneven": Links(1e-4, (1e9, 1e6, 1e9, 1e6)),
}


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_known_links", {})
    config._warn_of_difference.cache_clear()


def _no_exchange(to: int, source: int, num_bytes: int) -> float:
    raise AssertionError(f"{num_bytes} bytes from {source} to {to} were timed")


def _no_multicast(address: str, first: int, last: int, up: int, down: int) -> str:
    raise AssertionError(f"multicast was tried at {address}, ports {first} to {last}, with rates {up} and {down}")


def _chosen(monkeypatch: pytest.MonkeyPatch, network: str, environment: dict[str, str]) -> list[str]:
    """What all-reduces and all-gathers run on every rank, where a measurement would say that."""
    monkeypatch.setattr(links, "measure", lambda *_, **__: NETWORKS[network])
    monkeypatch.setattr(backend, "_known_links", {})
    settings = Config.from_environment(environment)
    planner = backend._planner(settings, 1, None, HOSTS, backend._published(settings), _no_exchange, _no_multicast)
    return [
        select(Collective(kind, 4), planner._cluster, 2.0**power).algorithm
        for kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER)
        for power in range(4, 27)
    ]


def test_measured_links_decide_unless_runs_must_be_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [_chosen(monkeypatch, network, {}) for network in NETWORKS]
    assert measured[0] != measured[1] != measured[2] != measured[0]
    alike = [_chosen(monkeypatch, network, {"PACELINE_DETERMINISTIC": "1"}) for network in NETWORKS]
    assert alike == [alike[0]] * 3
    given = {"PACELINE_DETERMINISTIC": "1", "PACELINE_RATE": "10mbit", "PACELINE_LATENCY": "1us"}
    assert [_chosen(monkeypatch, network, given) for network in NETWORKS] == [measured[0]] * 3


@pytest.mark.parametrize("given", [{"PACELINE_RATE": "10mbit"}, {"PACELINE_LATENCY": "20ms"}])
def test_what_is_given_in_part_is_completed_by_the_nominal_numbers(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    alike = [_chosen(monkeypatch, network, {"PACELINE_DETERMINISTIC": "1", **given}) for network in NETWORKS]
    assert alike == [alike[0]] * 3
    measured = [_chosen(monkeypatch, network, given) for network in NETWORKS]
    assert measured != [measured[0]] * 3


def test_nothing_is_measured_and_no_earlier_measurement_counts() -> None:
    settings = Config(deterministic=True)
    backend._known(settings).learn(HOSTS, NETWORKS["far"])
    planner = backend._planner(settings, 0, None, HOSTS, backend._published(settings), _no_exchange, _no_multicast)
    assert planner._cluster == cluster_of(HOSTS, rate_bytes_per_s=1.25e9, latency_s=30e-6)  # as the table says
    assert planner.rules is None


@pytest.mark.parametrize(
    ("rank_0", "own"),
    [
        (Config(deterministic=True), Config()),
        (Config(rate_bytes_per_s=1e6, latency_s=1e-3), Config()),
        (Config(rate_bytes_per_s=1e6, latency_s=1e-3), Config(rate_bytes_per_s=1e9, deterministic=True)),
        (Config(deterministic=True, latency_s=1e-3), Config(late="off", rate_bytes_per_s=1e7)),
    ],
)
def test_rank_0s_settings_hold_for_all(rank_0: Config, own: Config, caplog: pytest.LogCaptureFixture) -> None:
    groups: list[Any] = []
    for settings in (rank_0, own):
        with caplog.at_level(logging.WARNING, "paceline"):
            groups.append(
                backend._planner(settings, 0, None, HOSTS, backend._published(rank_0), _no_exchange, _no_multicast)
            )
    assert groups[0]._cluster == groups[1]._cluster
    assert groups[0]._config.shared == groups[1]._config.shared == rank_0.shared
    assert groups[1]._config.late == own.late
    assert [line.levelname for line in caplog.records] == ["WARNING"]
    assert "all take those of rank 0" in caplog.text


def test_a_group_of_one_rank_has_nothing_published() -> None:
    planner = backend._planner(Config(deterministic=True), 0, None, ["a"], "", _no_exchange, _no_multicast)
    assert planner._config.shared == Shared(deterministic=True)


def _planner_on_slow_uplinks(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], why_not: str) -> Planner:
    """The planner of four hosts whose uplinks measure a fifth of their downlinks."""

    def measure(*_: object, down: bool) -> Links:
        return Links(1e-4, (12.5e6,) * 4, (62.5e6,) * 4 if down else ())

    def try_multicast(_address: str, _first: int, _last: int, up: int, down: int) -> str:
        assert down == pytest.approx(5 * up, rel=1e-6), "it is paced by what hosts receive, not by what they send"
        return why_not

    monkeypatch.setattr(links, "measure", measure)
    monkeypatch.setattr(backend, "_known_links", {})
    settings = Config.from_environment(environment)
    return backend._planner(settings, 1, None, HOSTS, backend._published(settings), _no_exchange, try_multicast)


def test_where_multicast_is_wanted_slow_uplinks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"PACELINE_ALGORITHM": "allgather:multicast"}
    planner = _planner_on_slow_uplinks(monkeypatch, wanted, "")
    assert planner("allgather", 0, 64_000_000, True, "").name == "multicast"
    assert planner("allreduce", 0, 64_000_000, False, "").name == "multicast", "by price"
    assert planner("allgather", 0, 64_000_000, True, "", [0, 1, 3]).name != "multicast", "a team has none"


def test_multicast_is_tried_on_all_ranks_or_on_none_as_rank_0_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = Config.from_environment({"PACELINE_ALGORITHM": "allgather:multicast"})
    tried = []

    def try_multicast(*_: object) -> str:
        tried.append(True)
        return ""

    monkeypatch.setattr(links, "measure", lambda *_, down: Links(1e-4, (12.5e6,) * 4, (62.5e6,) * 4 if down else ()))
    for of_rank_0, own, times in ((Config(), asking, 0), (asking, Config(), 1)):
        monkeypatch.setattr(backend, "_known_links", {})
        backend._planner(own, 1, None, HOSTS, backend._published(of_rank_0), _no_exchange, try_multicast)
        assert len(tried) == times


def test_without_multicast_a_deterministic_job_that_wants_it_fails() -> None:
    settings = Config(deterministic=True, multicast="on")
    with pytest.raises(UsageError, match="PACELINE_MULTICAST=off"):
        backend._planner(settings, 1, None, HOSTS, backend._published(settings), _no_exchange, lambda *_: "no way")


def test_without_multicast_all_goes_to_one_rank_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"PACELINE_ALGORITHM": "allgather:multicast"}
    for environment, why_not in (({}, ""), (wanted, "packets do not reach host c")):
        planner = _planner_on_slow_uplinks(monkeypatch, environment, why_not)
        for kind in ("allgather", "allreduce", "broadcast"):
            assert planner(kind, 0, 64_000_000, True, "").name != "multicast"
