"""Every order of events of up to four workers, breadth first: no order deadlocks, and broken generators do.

All random choices of the generator are explored, too. Waits have no deadline unless a case says so: a deadline would
hide a deadlock.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from effort import thorough
from group_model import ENDLESS, PATIENCE_S, PATIENT, Choices, Model, model
from paceline.policy.group_messages import Message
from paceline.policy.groups import Formation, GroupGenerator, Phase, _Group


def explore(model: Model, check: bool = True) -> tuple[int, list[tuple[str, int]] | None]:
    """Return the number of states, and the shortest way to a deadlock, if there is one."""
    begin = pickle.dumps(model)
    parents: dict[Any, tuple[Any, tuple[str, int]] | None] = {model.key(): None}
    fringe = deque([(begin, model.key())])
    while fringe:
        frozen, key = fringe.popleft()
        now: Model = pickle.loads(frozen)
        events = list(now.events())
        if all(kind.isupper() and kind != "DEADLINE" for kind, _ in events) and any(
            client.state not in ("left", "crashed") for client in now.clients
        ):
            way = []
            while (step := parents[key]) is not None:
                key = step[0]
                way.append(step[1])
            return len(parents), way[::-1]
        for event in events:
            script: list[int] | None = []
            while script is not None:
                following: Model = pickle.loads(frozen)
                choices = following.generator._rng = Choices(script)
                following.apply(event)
                if check:
                    following.check()
                script = _next_script(choices.taken)
                reached = following.key()
                if reached not in parents:
                    parents[reached] = (key, event)
                    fringe.append((pickle.dumps(following), reached))
    return len(parents), None


def _next_script(taken: Sequence[tuple[int, int]]) -> list[int] | None:
    for place in range(len(taken) - 1, -1, -1):
        chosen, options = taken[place]
        if chosen + 1 < options:
            return [before for before, _ in taken[:place]] + [chosen + 1]
    return None


WATCHED = replace(PATIENT, window_rounds=3)
THREES = replace(PATIENT, group_size=3)
BOUNDED = replace(ENDLESS, group_size=3, patience_s=PATIENCE_S)
SLOW_LINK = {"host0": 1e9, "host1": 1e8}

CASES: dict[str, dict[str, Any]] = {
    "two workers, a crash, a restart, a failure": {"steps": [2, 2], "crashes": 1, "restarts": 1, "failures": 1},
    "three workers, three steps": {"steps": [3, 3, 3]},
    "three workers, unequal steps": {"steps": [3, 1, 2]},
    "three workers, a crash and a restart": {"steps": [1, 1, 1], "crashes": 1, "restarts": 1},
    "three workers, a crash": {"steps": [2, 2, 2], "crashes": 1},
    "three workers, two crashes": {"steps": [1, 1, 1], "crashes": 2},
    "three workers, one evicted though alive": {"steps": [2, 1, 1], "suspicions": 1},
    "three workers, one comes late": {"steps": [1, 2, 1], "late": 1, "failures": 1},
    "three workers that ask while they average": {"steps": [2, 2, 2], "overlap": True},
    "three workers that ask while they average, a crash": {"steps": [2, 1, 1], "overlap": True, "crashes": 1},
    "three workers, isolation watched": {"steps": [2, 2, 1], "rules": WATCHED, "crashes": 1},
    "three workers, two deadlines": {"steps": [2, 2, 2], "rules": BOUNDED, "deadlines": 2},
    "four workers": {"steps": [1, 1, 1, 1]},
    "four workers in threes": {"steps": [1, 2, 1, 1], "rules": THREES},
    "four workers, a crash": {"steps": [1, 1, 1, 1], "crashes": 1},
    "four workers, two slow links, isolation watched": {"steps": [2, 2, 1, 1], "rules": WATCHED, "rates": SLOW_LINK},
}


LONG = {(Formation.RANDOM, "four workers, a crash"), (Formation.INTER_INTRA, "four workers, a crash")}
ALL = [(formation, case) for case in CASES for formation in Formation]


@pytest.mark.parametrize(("formation", "case"), thorough(ALL, [pair for pair in ALL if pair not in LONG]))
def test_no_order_of_events_deadlocks(formation: Formation, case: str) -> None:
    states, deadlock = explore(model(formation, **CASES[case]))
    assert deadlock is None
    assert states > 10


class AppendsOneByOne(GroupGenerator):
    """Broken: a group comes to its first member's buffer at once, and to the others' whenever."""

    undelivered: list[tuple[int, _Group]]

    def _append_groups(self, groups: Iterable[Sequence[int]]) -> None:
        for numbers in groups:
            group = _Group(self._next_serial, [self._workers[number] for number in numbers])
            self._next_serial += 1
            self.undelivered = [*getattr(self, "undelivered", ()), *((number, group) for number in numbers)]
            self.deliver(len(self.undelivered) - len(numbers))

    def deliver(self, place: int) -> None:
        number, group = self.undelivered.pop(place)
        member = self._workers[number]
        member.buffer.append(group)
        member.lane.free.pop(number, None)
        if member.phase is Phase.ARRIVED and member.buffer[0] is group:
            self._arrive_at_group(member)


class LeavesAtOnce(GroupGenerator):
    """Broken: a worker that is done leaves the groups in its buffer behind."""

    def drain(self, worker: int, now_s: float, epoch: int) -> Sequence[Message]:
        state = self._member(worker, now_s, epoch)
        assert state is not None
        self._leave(state)
        return self._take_messages()


def test_groups_appended_one_by_one_deadlock() -> None:
    _, deadlock = explore(model(Formation.RANDOM, [2, 2], AppendsOneByOne), check=False)
    assert deadlock is not None
    assert [kind for kind, _ in deadlock].count("deliver") == 2  # each buffer has the two groups in another order


@pytest.mark.parametrize("formation", [Formation.DIVISION, Formation.INTER_INTRA, Formation.RANDOM])
def test_leaving_without_draining_deadlocks(formation: Formation) -> None:
    _, deadlock = explore(model(formation, [2, 1, 1], LeavesAtOnce), check=False)
    assert deadlock is not None
    assert "drain" in [kind for kind, _ in deadlock]


@pytest.mark.parametrize("formation", Formation)
def test_a_crash_without_a_lease_deadlocks(formation: Formation) -> None:
    _, deadlock = explore(model(formation, [1, 1], rules=ENDLESS, crashes=1))
    assert deadlock is not None
    assert len(deadlock) <= 3
    assert "CRASH" in [kind for kind, _ in deadlock]


def test_a_deadline_ends_the_wait_for_a_member_that_never_comes() -> None:
    faults = {"crashes": 1, "crash_states": ("compute",), "deadlines": 9}
    states, deadlock = explore(model(Formation.RANDOM, [2, 1, 1], rules=BOUNDED, **faults))
    assert deadlock is None
    assert states > 10
