"""The group generator, event by event, under fuzzed events, and at work with simulated workers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import examples
from group_model import ENDLESS, PATIENT, model
from group_simulation import Simulation
from paceline.errors import UsageError
from paceline.policy.group_messages import Abort, Commit, Evicted, Joined, Left, Solo, Start, Wait
from paceline.policy.grouping import Connectivity, choose_group_size
from paceline.policy.groups import Formation, GroupGenerator, Phase, Rules

PAIRS = Rules(group_size=2, window_rounds=0)


def generator(workers: int, rules: Rules = PAIRS, rates: dict[str, float] | None = None) -> GroupGenerator:
    """A generator with workers that joined at time 0, two a host."""
    found = GroupGenerator(rules, rate_bytes_per_s=rates)
    for worker in range(workers):
        joined = found.join(worker, f"host{worker // 2}", 0.0)
        assert joined == [Joined(worker, 1, worker - 1 if worker else None)]
    return found


def commit(machine: GroupGenerator, start: Start, now_s: float) -> None:
    """All members finish."""
    said = [list(machine.finished(worker, start.serial, True, now_s, 1)) for worker in start.members]
    assert said[:-1] == [[]] * (len(said) - 1)
    assert said[-1][0] == Commit(start.serial, start.epoch, start.members)


# First come


def test_the_first_that_come_are_a_group() -> None:
    machine = generator(4)
    assert machine.request(2, 1.0, 1) == []
    assert machine.phase(2) is Phase.ARRIVED
    [start] = machine.request(0, 1.1, 1)
    assert start == Start(0, 1, (0, 2))
    assert start.to == (0, 2)
    assert machine.phase(0) is machine.phase(2) is Phase.IN_GROUP
    assert machine.request(1, 1.2, 1) == []
    assert machine.request(3, 1.2, 1) == [Start(1, 1, (1, 3))]
    commit(machine, start, 1.3)
    assert machine.phase(0) is Phase.COMPUTE


def test_a_worker_alone_goes_on_alone() -> None:
    machine = generator(1)
    assert machine.request(0, 1.0, 1) == [Solo(0)]
    assert machine.phase(0) is Phase.COMPUTE


def test_a_group_is_no_larger_than_those_who_are_there() -> None:
    machine = generator(4, replace(PAIRS, group_size=4))
    for worker in range(3):
        assert machine.request(worker, 1.0, 1) == []
    assert machine.drain(3, 1.0, 1) == [Left(3), Start(0, 1, (0, 1, 2))]
    assert machine.phase(3) is Phase.LEFT


def test_a_deadline_shrinks_what_waits_to_those_who_came() -> None:
    machine = generator(6, replace(PAIRS, group_size=4, patience_s=2.0))
    machine.request(5, 1.0, 1)
    machine.request(3, 2.5, 1)
    assert machine.next_tick_s == 3.0
    assert machine.tick(2.9) == []
    assert machine.tick(3.0) == [Start(0, 1, (3, 5))]
    machine.request(0, 4.0, 1)
    assert machine.tick(6.0) == [Solo(0)]


def test_a_request_while_averaging_counts_afterwards() -> None:
    machine = generator(3)
    machine.request(0, 1.0, 1)
    [start] = machine.request(1, 1.0, 1)
    assert machine.request(0, 1.1, 1) == []
    assert machine.request(0, 1.1, 1) == []  # said twice, it counts once
    assert machine.request(2, 1.1, 1) == []
    machine.finished(0, start.serial, True, 1.2, 1)
    assert machine.finished(1, start.serial, True, 1.2, 1) == [Commit(0, 1, (0, 1)), Start(1, 1, (0, 2))]


def test_what_is_said_of_a_former_group_does_not_count_for_the_next() -> None:
    machine = generator(3)
    machine.request(0, 1.0, 1)
    machine.request(1, 1.0, 1)
    machine.request(2, 1.0, 1)
    machine.request(0, 1.1, 1)
    abort, start = machine.finished(1, 0, False, 1.2, 1)
    assert (abort.to, start) == ((0, 1), Start(1, 1, (0, 2)))
    assert machine.finished(0, 0, False, 1.2, 1) == []  # said before it heard of either
    assert machine.finished(0, 1, True, 1.3, 1) == []
    assert machine.finished(2, 1, True, 1.3, 1) == [Commit(1, 1, (0, 2))]


# Buffers


def test_division_partitions_all_that_are_free() -> None:
    machine = generator(8, replace(PAIRS, formation=Formation.DIVISION))
    starts = [message for worker in range(8) for message in machine.request(worker, 1.0, 1)]
    assert sorted(worker for start in starts for worker in start.to) == list(range(8))
    assert sorted(start.serial for start in starts if isinstance(start, Start)) == [0, 1, 2, 3]


def test_division_without_anybody_free_is_solo() -> None:
    machine = generator(3, replace(PAIRS, formation=Formation.DIVISION))
    machine.request(0, 1.0, 1)  # all three are one group
    assert machine.waits(1.5) == [Wait(0, (0, 1, 2), (1, 2), 0.5)]
    assert machine.join(3, "host9", 1.0) == [Joined(3, 1, 0)]
    assert machine.request(3, 1.1, 1) == [Solo(3)]


def test_inter_intra_serves_across_hosts_first_and_then_the_host() -> None:
    machine = generator(6, replace(PAIRS, formation=Formation.INTER_INTRA, group_size=3))
    hosts = [{0, 1}, {2, 3}, {4, 5}]
    starts = [message for worker in range(6) for message in machine.request(worker, 1.0, 1)]
    [across] = [start for start in starts if isinstance(start, Start)]
    assert [len(host & set(across.members)) for host in hosts] == [1, 1, 1]
    commit(machine, across, 1.1)
    within = [message for worker in across.members for message in machine.request(worker, 1.2, 1)]
    assert sorted(within, key=lambda start: start.to) == [
        Start(serial, 1, tuple(sorted(host)))
        for host in hosts
        for serial in [start.serial for start in within if isinstance(start, Start) and set(start.members) == host]
    ]


def test_a_deadline_takes_missing_members_out_of_a_group() -> None:
    rules = Rules(4, Formation.DIVISION, patience_s=2.0, window_rounds=0)
    machine = generator(4, rules)
    for worker in (0, 1, 3):
        assert machine.request(worker, 1.0, 1) == []
    assert machine.tick(3.0) == [Start(0, 1, (0, 1, 3))]
    assert machine.phase(2) is Phase.COMPUTE
    assert machine.request(2, 3.1, 1) == [Solo(2)]  # everybody else is busy


def test_a_worker_that_misses_a_deadline_is_not_waited_for_again() -> None:
    machine = generator(4, Rules(4, Formation.DIVISION, patience_s=2.0, window_rounds=0))
    for worker in range(4):
        machine.request(worker, 1.0, 1)
    for worker in range(4):
        machine.finished(worker, 0, True, 1.1, 1)
    for worker in range(3):
        machine.request(worker, 2.1, 1)
    assert machine.tick(4.1) == [Start(1, 1, (0, 1, 2))]
    for worker in range(3):
        machine.finished(worker, 1, True, 4.2, 1)
    assert [machine.request(worker, 5.2, 1) for worker in range(3)] == [[], [], [Start(2, 1, (0, 1, 2))]]
    assert machine.request(3, 5.3, 1) == [Solo(3)]
    for worker in range(3):
        machine.finished(worker, 2, True, 5.4, 1)
    assert machine.request(3, 5.5, 1) == []  # its own request pulls in the others
    assert machine.waits(5.5) == [Wait(3, (0, 1, 2, 3), (0, 1, 2), 0.0)]


def test_a_deadline_dissolves_a_group_of_one() -> None:
    machine = generator(2, replace(ENDLESS, formation=Formation.DIVISION, patience_s=2.0))
    machine.request(0, 1.0, 1)
    assert machine.tick(3.0) == [Solo(0)]
    assert machine.waits(3.0) == []
    assert machine.request(0, 3.0, 1) == []  # a new group
    assert machine.request(1, 3.0, 1) == [Start(1, 1, (0, 1))]


# Ends


def test_a_failure_aborts_the_group_for_all() -> None:
    machine = generator(2)
    machine.request(0, 1.0, 1)
    machine.request(1, 1.0, 1)
    machine.finished(0, 0, True, 1.1, 1)
    [abort] = machine.finished(1, 0, False, 1.1, 1)
    assert abort == Abort(0, 1, (0, 1), "worker 1 (host host0) could not finish it")
    assert machine.finished(0, 0, True, 1.1, 1) == []  # late, and void
    assert machine.phase(0) is machine.phase(1) is Phase.COMPUTE


def test_an_average_that_takes_too_long_is_aborted() -> None:
    machine = generator(2, replace(PAIRS, longest_average_s=5.0))
    machine.request(0, 1.0, 1)
    machine.request(1, 1.0, 1)
    machine.finished(0, 0, True, 1.1, 1)
    assert machine.next_tick_s == 6.0
    assert machine.tick(5.9) == []
    [abort] = machine.tick(6.0)
    assert abort == Abort(0, 1, (0, 1), "worker 1 (host host0) did not finish it within 5.0 s")


def test_a_drained_worker_serves_its_buffer_and_leaves() -> None:
    machine = generator(2, replace(PAIRS, formation=Formation.DIVISION))
    machine.request(0, 1.0, 1)
    assert machine.drain(1, 1.1, 1) == [Start(0, 1, (0, 1))]  # it arrives by itself
    machine.finished(0, 0, True, 1.2, 1)
    assert machine.finished(1, 0, True, 1.2, 1) == [Commit(0, 1, (0, 1)), Left(1)]
    assert machine.phase(1) is Phase.LEFT
    assert machine.request(1, 1.3, 1) == [Evicted(1, 1)]  # nobody any more
    assert machine.request(0, 1.3, 1) == [Solo(0)]
    assert machine.drain(0, 1.4, 1) == [Left(0)]


def test_a_worker_that_drains_while_it_waits_leaves() -> None:
    machine = generator(3)
    machine.request(0, 1.0, 1)
    assert machine.drain(0, 1.1, 1) == [Left(0)]
    assert machine.drain(1, 1.1, 1) == [Left(1)]
    assert machine.request(2, 1.2, 1) == [Solo(2)]


# Leases and epochs


def test_a_silent_worker_is_evicted_and_its_group_aborted() -> None:
    machine = generator(3, replace(PAIRS, lease_s=5.0))
    machine.request(0, 1.0, 1)
    machine.request(1, 2.0, 1)
    machine.heartbeat(2, 2.0, 1)
    machine.finished(1, 0, True, 5.0, 1)
    machine.heartbeat(2, 5.0, 1)
    assert machine.next_tick_s == 6.0
    said = machine.tick(6.0)
    assert said == [Evicted(0, 2), Abort(0, 1, (1,), "worker 0 (host host0) was silent for 5.0 s")]
    assert machine.phase(0) is Phase.DEAD
    assert machine.epoch == 2
    assert machine.request(1, 6.1, 1) == []  # the others' membership stands
    assert machine.request(2, 6.1, 1) == [Start(1, 2, (1, 2))]


def test_stale_workers_are_told_to_join_again() -> None:
    machine = generator(3, replace(PAIRS, lease_s=5.0))
    machine.heartbeat(1, 4.0, 1)
    machine.heartbeat(2, 4.0, 1)
    machine.tick(5.0)
    for said in (
        machine.request(0, 5.1, 1),
        machine.finished(0, 0, True, 5.1, 1),
        machine.drain(0, 5.1, 1),
        machine.heartbeat(0, 5.1, 1),
        machine.request(7, 5.1, 1),
    ):
        assert said in ([Evicted(0, 2)], [Evicted(7, 2)])
    assert machine.join(0, "host0", 5.2) == [Joined(0, 2, 2)]
    assert machine.request(0, 5.3, 1) == [Evicted(0, 2)]  # from before
    assert machine.request(0, 5.3, 2) == []
    assert machine.request(1, 5.3, 1) == [Start(0, 2, (0, 1))]


def test_a_worker_that_joins_while_it_is_a_member_was_restarted() -> None:
    machine = generator(2)
    machine.request(0, 1.0, 1)
    machine.request(1, 1.0, 1)
    assert machine.join(1, "host0", 1.1) == [
        Abort(0, 1, (0,), "worker 1 (host host0) was replaced by a new process"),
        Joined(1, 2, 0),
    ]
    assert machine.finished(1, 0, True, 1.2, 1) == [Evicted(1, 2)]


def test_an_eviction_dissolves_groups_of_one() -> None:
    machine = generator(2, replace(PAIRS, formation=Formation.DIVISION, lease_s=5.0))
    machine.request(0, 4.0, 1)
    assert machine.tick(5.0) == [Evicted(1, 2), Solo(0)]


def test_an_eviction_completes_a_group_that_waited() -> None:
    machine = generator(3, replace(PAIRS, formation=Formation.DIVISION, lease_s=5.0))
    machine.request(0, 4.0, 1)
    machine.request(1, 4.0, 1)
    assert machine.tick(5.0) == [Evicted(2, 2), Start(0, 2, (0, 1))]


# Changes, and being asked


def test_rules_and_rates_change_while_running() -> None:
    machine = generator(8, replace(PAIRS, group_size=8))
    for worker in (0, 1, 4, 5):
        assert machine.request(worker, 1.0, 1) == []
    rates = {"host0": 1e9, "host1": 1e9, "host2": 1e7, "host3": 1e7}
    assert machine.change(1.5, rate_bytes_per_s=rates) == [Start(0, 1, (4, 5))]  # slow links: pairs
    assert machine.change(1.6, rules=PAIRS) == [Start(1, 1, (0, 1))]
    machine.request(2, 2.0, 1)
    assert machine.change(2.1, rules=replace(PAIRS, formation=Formation.DIVISION)) == []
    assert machine.waits(2.1) == [Wait(2, (2, 3), (3,), pytest.approx(0.1))]
    assert machine.request(3, 2.2, 1) == [Start(2, 1, (2, 3))]


@pytest.mark.parametrize(
    "wrong",
    [{"group_size": 1}, {"slow_factor": 1.0}, {"patience_s": 0.0}, {"lease_s": math.nan}, {"window_rounds": -1}],
)
def test_rules_make_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Rules(**wrong)  # type: ignore[arg-type]


# Whatever happens


@examples(2000)
@given(
    st.sampled_from(Formation),
    st.integers(2, 9),
    st.integers(2, 5),
    st.booleans(),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_invariants_hold_and_all_workers_end(
    formation: Formation, workers: int, size: int, overlap: bool, faults: int, rng: random.Random
) -> None:
    rules = replace(
        PATIENT, group_size=size, window_rounds=rng.choice([0, 1, 3]), patience_s=rng.choice([1e3, math.inf])
    )
    now = model(
        formation,
        [rng.randint(0, 6) for _ in range(workers)],
        rules=rules,
        rng=random.Random(rng.randint(0, 9)),
        late=rng.randint(0, workers - 1),
        rates={"host1": 1e8, "host0": 1e9} if rng.random() < 0.3 else None,
        crashes=faults,
        restarts=faults,
        failures=faults,
        suspicions=faults,
        deadlines=faults,
        overlap=overlap,
    )
    while events := list(now.events()):
        now.apply(rng.choice(events))
        now.check()
    assert all(client.state in ("left", "crashed") for client in now.clients)
    assert all(client.steps_left == 0 for client in now.clients if client.state == "left")


def test_the_same_seed_says_the_same() -> None:
    def commits(seed: int) -> list[tuple[float, tuple[int, ...], float]]:
        noise = random.Random(5)
        machine = GroupGenerator(Rules(formation=Formation.DIVISION), rng=random.Random(seed))
        workers = Simulation(machine, ["host"] * 8, lambda *_: noise.uniform(0.9, 1.1), lambda _: 0.1)
        workers.run(30.0)
        return workers.commits

    assert commits(1) == commits(1)
    assert commits(1) != commits(2)


# At work


def at_work(
    rules: Rules,
    compute_s: Callable[[int, float], float],
    *,
    workers: int = 16,
    until_s: float = 120.0,
    overlap: bool = False,
    group_s: Callable[[Sequence[int]], float] = lambda _: 0.1,
    rates: dict[str, float] | None = None,
) -> Simulation:
    """Simulated workers, four a host, for two minutes of steps of about a second."""
    machine = GroupGenerator(rules, rate_bytes_per_s=rates)
    simulation = Simulation(
        machine, [f"host{worker // 4}" for worker in range(workers)], compute_s, group_s, overlap=overlap
    )
    simulation.run(until_s, tick_s=0.5)
    return simulation


def jittered(slow: dict[int, float] | None = None, seed: int = 1) -> Callable[[int, float], float]:
    """Steps of a second give or take 5%, and some workers slower."""
    rng = random.Random(seed)
    return lambda worker, _: (slow or {}).get(worker, 1.0) * rng.uniform(0.95, 1.05)


def rate(simulation: Simulation, leave_out: int = 3) -> float:
    """Steps a second of the other workers."""
    return mean(steps for worker, steps in enumerate(simulation.steps) if worker != leave_out) / simulation.now_s


@pytest.mark.parametrize("slower", [2.0, 5.0])
def test_one_slow_worker_costs_the_others_nothing(slower: float) -> None:
    alike = at_work(Rules(), jittered(), overlap=True)
    one_slow = at_work(Rules(), jittered({3: slower}), overlap=True)
    assert rate(alike) > 0.98
    assert rate(one_slow) >= 0.95 * rate(alike)
    assert one_slow.steps[3] >= 0.95 * one_slow.now_s / slower


def test_the_chosen_group_size_hides_and_twice_that_does_not() -> None:
    def group_s(members: Sequence[int]) -> float:
        return 1.5 * (1 - 1 / len(members))

    def rate_in_groups(size: int) -> float:
        return rate(at_work(Rules(size), jittered(), overlap=True, group_s=group_s))

    assert choose_group_size(compute_s=1.0, all_reduce_s=1.5, num_workers=16) == 2
    assert rate_in_groups(2) > 0.95
    assert rate_in_groups(4) < 0.9


def test_rates_are_those_of_the_paper() -> None:
    """Blocking averages. A group with random others convoys; a filter keeps a slow worker out of the others' way."""
    unfiltered = Rules(slow_factor=math.inf)
    slow = jittered({3: 5.0})
    assert rate(at_work(unfiltered, jittered())) == pytest.approx(0.88, abs=0.03)
    assert rate(at_work(replace(unfiltered, formation=Formation.RANDOM), jittered())) < 0.45
    assert rate(at_work(unfiltered, slow)) == pytest.approx(0.78, abs=0.03)
    assert rate(at_work(replace(unfiltered, formation=Formation.DIVISION), slow)) == pytest.approx(0.67, abs=0.05)
    assert rate(at_work(Rules(formation=Formation.DIVISION), slow)) > 0.84


def test_a_worker_that_recovers_is_grouped_again() -> None:
    steady = jittered()
    recovers = at_work(
        Rules(formation=Formation.DIVISION),
        lambda worker, now_s: steady(worker, now_s) * (5.0 if worker == 3 and now_s < 60 else 1.0),
        until_s=180.0,
    )

    def groups(worker: int, begin_s: float, end_s: float) -> int:
        return sum(worker in members for when_s, members, _ in recovers.commits if begin_s <= when_s < end_s)

    assert groups(3, 20, 60) < 0.4 * groups(4, 20, 60)
    assert groups(3, 80, 180) > 0.85 * groups(4, 80, 180)


@pytest.mark.parametrize("formation", Formation)
@pytest.mark.parametrize("overlap", [False, True])
def test_waits_are_bounded_whatever_the_speeds(formation: Formation, overlap: bool) -> None:
    rng = random.Random(3)

    def compute_s(worker: int, _: float) -> float:
        pause_s = 30.0 if rng.random() < 0.01 else 0.0
        return min(20.0, 0.5 * rng.paretovariate(1.2)) * (1 + worker % 3) + pause_s

    rules = Rules(formation=formation, patience_s=3.0)
    simulation = at_work(rules, compute_s, workers=10, until_s=200.0, overlap=overlap)
    before = list(simulation.steps)
    simulation.run(300.0)
    assert max(simulation.waits_s) <= 3.0 + 0.5
    assert all(steps > earlier for steps, earlier in zip(simulation.steps, before, strict=True))
    assert all(wait.waited_s <= 3.5 for wait in simulation.generator.waits(simulation.now_s))


def test_link_aware_groups_average_faster() -> None:
    rates = {f"host{host}": 1e9 if host % 2 else 2e8 for host in range(4)}

    def group_s(members: Sequence[int]) -> float:
        return 2 * (len(members) - 1) / len(members) * 1e8 / min(rates[f"host{member // 4}"] for member in members)

    def average_s(formation: Formation, known: dict[str, float] | None) -> float:
        rules = Rules(formation=formation)
        commits = at_work(rules, jittered(), overlap=True, group_s=group_s, rates=known).commits
        assert connected(commits, range(16), rules.window_rounds * 16 // rules.group_size)
        return mean(took_s for _, members, took_s in commits for _ in members)

    for formation in (Formation.FIRST_COME, Formation.DIVISION):
        assert average_s(formation, None) > 1.5 * average_s(formation, rates)


def connected(commits: Sequence[tuple[float, tuple[int, ...], float]], workers: Sequence[int], window: int) -> bool:
    """Whether the groups of each window of commits connect all workers."""
    assert len(commits) > 2 * window
    for begin in range(len(commits) - window + 1):
        connectivity = Connectivity()
        for worker in workers:
            connectivity.add_request(worker)
        for _, members, _ in commits[begin : begin + window]:
            connectivity.add_commit(members)
        if connectivity.components():
            return False
    return True


@pytest.mark.parametrize("slow", [{}, {3: 2.0}, {0: 2.0, 1: 2.0, 2: 2.0}])
@pytest.mark.parametrize("overlap", [False, True])
def test_no_worker_is_isolated(slow: dict[int, float], overlap: bool) -> None:
    """Workers in lockstep meet the same ones for ever, unless that is watched."""
    watched = Rules(2, window_rounds=12)
    lockstep: Callable[[int, float], float] = lambda worker, _: slow.get(worker, 1.0) + worker // 2 / 100  # noqa: E731
    commits = at_work(watched, lockstep, workers=8, overlap=overlap).commits
    assert connected(commits, range(8), 12 * 8 // 2)
    unwatched = at_work(replace(watched, window_rounds=0), lockstep, workers=8, overlap=overlap).commits
    assert slow or not connected(unwatched, range(8), 12 * 8 // 2)


def test_a_choice_of_partners_ends_lockstep() -> None:
    """With one arrival more than a pair needs, workers in lockstep meet all others, and hardly wait for longer."""
    lockstep: Callable[[int, float], float] = lambda worker, _: 1.0 + worker // 2 / 100  # noqa: E731
    pairs = Rules(2, window_rounds=0)
    for overlap in (False, True):
        chosen = at_work(replace(pairs, extra_arrivals=1), lockstep, workers=8, overlap=overlap)
        assert connected(chosen.commits, range(8), 12 * 8 // 2)
        assert max(chosen.waits_s) < 1.0
        met = {frozenset(members) for _, members, _ in chosen.commits}
        assert len(met) > 20  # of 28 pairs; without a choice it is the same few
    same = {frozenset(members) for _, members, _ in at_work(pairs, lockstep, workers=8, overlap=True).commits}
    assert len(same) < 10


def test_a_choice_needs_workers_that_come_soon() -> None:
    machine = generator(7, Rules(2, extra_arrivals=1))
    assert machine.request(0, 1.0, 1) == []
    assert isinstance(machine.request(1, 1.0, 1)[0], Start)  # of seven workers the next may come late
    with pytest.raises(UsageError, match="extra_arrivals"):
        Rules(extra_arrivals=-1)


def test_isolation_is_not_hidden_by_a_slow_link() -> None:
    """One host with a slow link has nobody of its class; bridges alone connect it."""
    rates = {"host0": 1e9, "host1": 1e9, "host2": 1e7}
    commits = at_work(Rules(2), jittered(), workers=9, rates=rates).commits
    assert connected(commits, range(9), 12 * 9 // 2 + 1)


def test_nothing_ends_a_wait_without_deadlines() -> None:
    machine = generator(2, replace(ENDLESS, formation=Formation.DIVISION))
    machine.request(0, 1.0, 1)
    assert machine.tick(1e9) == []
    assert machine.next_tick_s == math.inf


# What a service needs besides


def test_a_worker_that_is_known_to_be_gone_is_evicted_at_once() -> None:
    machine = generator(3)
    machine.request(0, 1.0, 1)
    [start] = machine.request(1, 1.0, 1)
    [abort] = machine.evict(0, "has crashed", 1.1)
    assert abort == Abort(start.serial, 1, (1,), "worker 0 (host host0) has crashed")
    assert machine.phase(0) is Phase.DEAD
    assert machine.phase(1) is Phase.COMPUTE
    assert machine.epoch == 2
    assert machine.evict(0, "has crashed", 1.2) == machine.evict(77, "never was", 1.2) == []
    assert machine.epoch == 2


def test_serials_for_other_operations_are_in_one_order_with_groups() -> None:
    machine = generator(2)
    machine.advance(epoch=1000, serial=50)
    machine.advance(epoch=5, serial=5)
    assert machine.take_serial() == 50
    machine.request(0, 1.0, 1)
    assert machine.request(1, 1.0, 1) == [Start(51, 1000, (0, 1))]
    assert machine.take_serial() == 52
