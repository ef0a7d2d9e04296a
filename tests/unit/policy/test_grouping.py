"""Group sizes, partitions, slow workers and isolation."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from paceline.errors import UsageError
from paceline.policy.grouping import (
    Connectivity,
    LinkClass,
    PaceFilter,
    bridges,
    choose_group_size,
    inter_intra_groups,
    link_classes,
    random_groups,
    static_groups,
)


@pytest.mark.parametrize(
    ("all_reduce_s", "num_workers", "size"),
    [
        (0.0, 8, 8),  # communication is free
        (0.038, 8, 8),  # 33 ms, and 26 ms until the eighth has come
        (0.06, 8, 4),
        (0.073, 8, 2),  # half of it in pairs, three quarters in fours, seven eighths in eights
        (0.1, 8, 2),
        (9.9, 8, 2),  # even pairs take longer than a step
        (0.0, 6, 6),
        (0.055, 6, 4),
        (0.0, 2, 2),
        (0.0, 1, 1),
    ],
)
def test_the_group_size_hides_behind_a_step(all_reduce_s: float, num_workers: int, size: int) -> None:
    assert choose_group_size(0.06, all_reduce_s, num_workers) == size


@pytest.mark.parametrize(("compute_s", "all_reduce_s", "num_workers"), [(-1.0, 0.1, 4), (0.1, -1.0, 4), (0.1, 0.1, 0)])
def test_group_sizes_need_times_and_workers(compute_s: float, all_reduce_s: float, num_workers: int) -> None:
    with pytest.raises(UsageError, match="at least one worker"):
        choose_group_size(compute_s, all_reduce_s, num_workers)


def test_slow_links_are_a_class_with_smaller_groups() -> None:
    found = link_classes({"a": 1e9, "b": 6e8, "c": 2e8, "d": 4e8, "e": 1e7}, group_size=8)
    assert {host: link.number for host, link in found.items()} == {"a": 0, "b": 0, "d": 1, "c": 2, "e": 3}
    assert found["a"].group_size == 8
    assert found["d"].group_size == 2  # 7/8 at 600 MB/s is 1.46; 1/2 at 400 is 1.25, 2/3 is 1.67
    assert found["e"].group_size == 2
    assert link_classes({"a": 1.0, "b": 1.0}, 4)["b"] == LinkClass(0, 4)
    assert link_classes({}, 4) == {}


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_rates_are_positive(rate: float) -> None:
    with pytest.raises(UsageError, match="host b has no rate"):
        link_classes({"a": 1.0, "b": rate}, 4)


@examples(100)
@given(st.integers(1, 40), st.integers(2, 9), st.randoms(use_true_random=False))
def test_random_groups_are_a_partition(workers: int, size: int, rng: random.Random) -> None:
    groups = random_groups(range(workers), size, rng)
    assert sorted(worker for group in groups for worker in group) == list(range(workers))
    assert all(len(group) in {size, size + 1} for group in groups[:-1])
    assert workers == 1 or all(2 <= len(group) <= size + 1 for group in groups)


@examples(100)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(2, 6), st.randoms(use_true_random=False))
def test_inter_intra_uses_one_worker_a_host_between_hosts(places: list[int], size: int, rng: random.Random) -> None:
    host_of = {worker: f"host{place}" for worker, place in enumerate(places)}
    groups = inter_intra_groups(list(host_of), host_of, size, rng)
    hosts = sorted(set(host_of.values()))
    across = [group for group in groups if len({host_of[worker] for worker in group}) > 1]
    assert sorted(host_of[worker] for group in across for worker in group) == (hosts if len(hosts) > 1 else [])
    heads = {worker for group in across for worker in group}
    whole = [group for group in groups if heads & set(group) and group not in across]
    if len(hosts) > 1:
        assert sorted(host_of[group[0]] for group in whole) == [
            host for host in hosts if places.count(int(host[4:])) > 1
        ]
    assert all(len(group) > 1 for group in groups)
    assert groups[: len(across)] == across  # what a head brings is passed on afterwards
    assert all(sum(worker in group for group in groups) <= 2 for worker in host_of)


def test_a_worker_is_slow_by_its_average_and_recovers() -> None:
    paces = PaceFilter(1.5)
    assert not paces.is_slow(0)
    for _ in range(10):
        for worker in range(8):
            paces.observe(worker, 5.0 if worker == 3 else 1.0)
    assert [worker for worker in range(8) if paces.is_slow(worker)] == [3]
    steps = 0
    while paces.is_slow(3):
        for worker in range(8):
            paces.observe(worker, 1.0)
        steps += 1
    assert 1 < steps < 10
    paces.observe(3, 1000.0)  # one pause, however long
    steps = 0
    while paces.is_slow(3):
        paces.observe(3, 1.0)
        steps += 1
    assert 1 < steps < 10
    paces.forget(3)
    assert not paces.is_slow(3)


def test_several_workers_are_slow_as_long_as_most_are_not() -> None:
    paces = PaceFilter(1.5)
    for _ in range(10):
        for worker in range(8):
            paces.observe(worker, 2.0 if worker < 3 else 1.0)
    assert [paces.is_slow(worker) for worker in range(8)] == [True] * 3 + [False] * 5


@examples(200)
@given(
    st.lists(st.lists(st.integers(0, 11), min_size=2, max_size=4, unique=True), max_size=12),
    st.sets(st.integers(0, 11)),
)
def test_components_are_those_of_the_graph(groups: list[list[int]], asked: set[int]) -> None:
    connectivity = Connectivity()
    for worker in asked:
        connectivity.add_request(worker)
    for group in groups:
        connectivity.add_commit(group)
    label = {worker: worker for worker in asked | {worker for group in groups for worker in group}}
    for _ in label:
        for group in groups:
            least = min(label[worker] for worker in group)
            label.update(dict.fromkeys(group, least))
    expected = [{worker for worker in label if label[worker] == least} for least in sorted(set(label.values()))]
    found = sorted((set(component) for component in connectivity.components()), key=min)
    assert found == (expected if len(expected) > 1 else [])
    assert connectivity.num_commits == len(groups)


@given(st.integers(0, 30), st.integers(2, 6))
def test_bridges_connect_all(count: int, size: int) -> None:
    groups = bridges(range(count), size)
    connectivity = Connectivity()
    for worker in range(count):
        connectivity.add_request(worker)
    for group in groups:
        assert 2 <= len(group) <= size
        connectivity.add_commit(group)
    assert not connectivity.components()
    assert len(groups) == max(0, -(-(count - 1) // (size - 1)))


def _averaging(groups: list[list[int]], num_workers: int) -> np.ndarray:
    """What one step does to the weights of all workers."""
    matrix = np.eye(num_workers)
    for group in groups:
        matrix[np.ix_(group, group)] = 1 / len(group)
    return matrix


def _left_over(steps: range, hosts: list[list[int]], size: int) -> float:
    """What remains of the worst disagreement after these steps."""
    num_workers = sum(map(len, hosts))
    product = np.eye(num_workers)
    for step in steps:
        product = _averaging(static_groups(step, hosts, size), num_workers) @ product
    return float(np.linalg.norm(product - 1 / num_workers, 2))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=9), st.integers(2, 5), st.integers(0, 40))
def test_static_groups_are_disjoint_and_use_one_worker_a_host(counts: list[int], size: int, step: int) -> None:
    ends = np.cumsum(counts).tolist()
    hosts = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
    groups = static_groups(step, hosts, size)
    members = [worker for group in groups for worker in group]
    assert len(set(members)) == len(members)
    assert all(len(group) > 1 for group in groups)
    host_of = {worker: number for number, host in enumerate(hosts) for worker in host}
    across = [worker for group in groups if len({host_of[one] for one in group}) > 1 for worker in group]
    assert len({host_of[worker] for worker in across}) == len(across)
    assert all(len(group) <= size for group in groups if group[0] in across)


@pytest.mark.parametrize("num_hosts", range(2, 17))
def test_static_groups_of_four_workers_a_host_contract_in_four_steps(num_hosts: int) -> None:
    hosts = [list(range(4 * host, 4 * host + 4)) for host in range(num_hosts)]
    assert _left_over(range(4), hosts, size=num_hosts) <= 0.65


@pytest.mark.parametrize(("num_hosts", "size", "steps"), [(8, 2, 3), (16, 4, 2), (27, 3, 3), (5, 5, 1)])
def test_static_groups_of_single_workers_average_all(num_hosts: int, size: int, steps: int) -> None:
    hosts = [[host] for host in range(num_hosts)]
    assert _left_over(range(steps), hosts, size) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("counts", [[3, 1, 2], [1, 1, 1, 1, 1, 1, 1], [5], [2, 2]])
def test_static_groups_reach_everybody_in_the_end(counts: list[int]) -> None:
    ends = np.cumsum(counts).tolist()
    hosts = [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]
    assert _left_over(range(60), hosts, size=2) < 0.01


def test_static_groups_have_two_members() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        static_groups(0, [[0], [1]], 1)
