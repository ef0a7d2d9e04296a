"""A group generator and its workers, event by event: what can happen next, and what must hold whatever happens.

The workers make a few steps, ask for a group after each, drain and leave. Some crash, come late, or fail in a group.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.policy.group_messages import Abort, Commit, Evicted, Joined, Left, Message, Solo, Start
from paceline.policy.grouping import Connectivity
from paceline.policy.groups import Formation, GroupGenerator, Phase, Rules, _Group, _has_arrived

LEASE_S, PATIENCE_S = 1.0, 1000.0

ENDLESS = Rules(
    2, slow_factor=math.inf, patience_s=math.inf, longest_average_s=math.inf, lease_s=math.inf, window_rounds=0
)
"""Nothing ends a wait."""

PATIENT = replace(ENDLESS, lease_s=LEASE_S)
"""Only a lease ends a wait."""


class Choices(random.Random):
    """Random numbers from a list; what the list does not say is the first possibility."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        super().__init__(0)
        self.script = list(script)
        self.taken: list[tuple[int, int]] = []  # the choice, and of how many

    def __reduce__(self) -> Any:
        return Choices, ()

    def _next(self, options: int) -> int:
        place = len(self.taken)
        chosen = self.script[place] if place < len(self.script) else 0
        self.taken.append((chosen, options))
        return chosen

    def shuffle(self, x: Any) -> None:
        x[:] = list(itertools.permutations(x))[self._next(math.factorial(len(x)))]

    def sample(self, population: Any, k: int, **_: Any) -> Any:
        combinations = list(itertools.combinations(population, k))
        return list(combinations[self._next(len(combinations))])

    def choice(self, seq: Any) -> Any:
        return seq[self._next(len(seq))]


@dataclass
class Client:
    """A worker as it sees itself: computing, asked, in a group, draining, left, out (evicted), crashed or not begun."""

    state: str
    steps_left: int
    serial: int = -1
    said: bool = False  # that the group is finished
    drains: bool = False
    asked_again: bool = False
    epoch: int = 0


@dataclass
class Model:
    """The generator, its workers, and how many faults may still come."""

    generator: GroupGenerator
    clients: list[Client]
    crashes: int = 0
    crash_states: tuple[str, ...] = ("compute", "asked", "in", "draining")
    failures: int = 0
    restarts: int = 0
    suspicions: int = 0
    deadlines: int = 0
    overlap: bool = False
    now_s: float = 0.0
    running: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def events(self) -> Iterator[tuple[str, int]]:
        """What can happen next. Events in capitals are faults and deadlines, which may never happen."""
        for worker, client in enumerate(self.clients):
            if client.state == "compute":
                yield ("request" if client.steps_left else "drain"), worker
            if client.state == "in" and not client.said:
                yield "finish", worker
                if self.failures:
                    yield "FAIL", worker
            if self.overlap and client.state == "in" and client.steps_left and not client.asked_again:
                yield "request", worker
            if client.state in ("out", "new"):
                yield "join", worker
            if client.state in self.crash_states and self.crashes:
                yield "CRASH", worker
            if client.state in ("compute", "asked", "in", "draining") and self.suspicions:
                yield "SUSPECT", worker
            if client.state == "crashed" and self.restarts:
                yield "RESTART", worker
        members = self.generator._workers
        if self.generator.rules.lease_s < math.inf and any(
            client.state == "crashed" and worker in members for worker, client in enumerate(self.clients)
        ):
            yield "lease", -1
        if self.deadlines and self.generator.next_tick_s < self.now_s + 2 * PATIENCE_S:
            yield "DEADLINE", -1
        for place in range(len(getattr(self.generator, "undelivered", ()))):
            yield "deliver", place

    def apply(self, event: tuple[str, int]) -> None:
        kind, worker = event
        generator, now_s = self.generator, self.now_s
        client = self.clients[worker]
        if kind == "request":
            client.steps_left -= 1
            if client.state == "in":
                client.asked_again = True
            else:
                client.state = "asked"
            self.hear(generator.request(worker, now_s, client.epoch))
        elif kind == "drain":
            client.state, client.drains = "draining", True
            self.hear(generator.drain(worker, now_s, client.epoch))
        elif kind in ("finish", "FAIL"):
            client.said = True
            self.failures -= kind == "FAIL"
            self.hear(generator.finished(worker, client.serial, kind == "finish", now_s, client.epoch))
        elif kind in ("join", "RESTART"):
            self.restarts -= kind == "RESTART"
            self.clients[worker] = Client("joining", client.steps_left)
            self.hear(generator.join(worker, f"host{worker % 2}", now_s))
        elif kind == "CRASH":
            self.crashes -= 1
            client.state = "crashed"
        elif kind == "deliver":
            generator.deliver(worker)  # type: ignore[attr-defined]
            self.hear(generator._take_messages())
        else:
            self.deadlines -= kind == "DEADLINE"
            self.suspicions -= kind == "SUSPECT"
            self.now_s += 2 * PATIENCE_S if kind == "DEADLINE" else LEASE_S
            for alive, other in enumerate(self.clients):
                silent = (kind == "lease" and other.state == "crashed") or (kind == "SUSPECT" and alive == worker)
                if alive in generator._workers and not silent:
                    self.hear(generator.heartbeat(alive, self.now_s, generator._workers[alive].epoch))
            self.hear(generator.tick(self.now_s))

    def hear(self, messages: Iterable[Message]) -> None:
        """Deliver messages, each of which must make sense to the worker that gets it."""
        for message in messages:
            if isinstance(message, Start):
                assert not {member for group in self.running.values() for member in group} & set(message.members)
                self.running[message.serial] = message.members
            if isinstance(message, (Commit, Abort)):
                members = self.running.pop(message.serial)
                assert set(message.members) <= set(members)
                assert isinstance(message, Abort) or message.members == members
            for worker in message.to:
                client = self.clients[worker]
                if client.state == "crashed":
                    continue
                if isinstance(message, Joined):
                    assert client.state == "joining"
                    client.state, client.epoch = "compute", message.epoch
                elif isinstance(message, Start):
                    assert client.state in ("asked", "draining")
                    assert message.serial > client.serial
                    client.state, client.serial, client.said = "in", message.serial, False
                elif isinstance(message, (Commit, Abort)):
                    assert (client.state, client.serial) == ("in", message.serial)
                    assert client.said or isinstance(message, Abort)
                    client.state = "asked" if client.asked_again else "draining" if client.drains else "compute"
                    client.asked_again = False
                elif isinstance(message, Solo):
                    assert client.state == "asked"
                    client.state = "compute"
                elif isinstance(message, Left):
                    assert client.state == "draining"
                    client.state = "left"
                elif isinstance(message, Evicted):
                    client.state = "out"

    def check(self) -> None:
        """The invariants of buffers, phases and groups."""
        generator = self.generator
        unfinished: dict[int, _Group] = {}
        for state in generator._workers.values():
            serials = [group.serial for group in state.buffer]
            assert serials == sorted(set(serials))
            assert (state.phase is Phase.IN_GROUP) == (bool(state.buffer) and state.buffer[0].running)
            assert not any(group.running for group in list(state.buffer)[1:])
            assert not any(group.closed for group in state.buffer)
            assert not (state.draining and state.phase is Phase.COMPUTE)
            unfinished.update((group.serial, group) for group in state.buffer)
        for group in unfinished.values():
            assert all(group in member.buffer for member in group.members)
            assert len(group.members) >= 2
            arrived = [member for member in group.members if _has_arrived(member, group)]
            assert group.running or group.num_arrived == len(arrived) < len(group.members)
            assert group.running or not arrived or any(group is awaited for _, _, awaited in generator._awaited)
        if unfinished:
            lowest = unfinished[min(unfinished)]
            assert all(member.buffer[0] is lowest for member in lowest.members)
        assert {serial: group.numbers for serial, group in unfinished.items() if group.running} == self.running

    def key(self) -> Any:
        """All that matters for what can happen: not times, and of serials the order alone."""
        generator = self.generator
        workers = sorted(generator._workers.items())
        by_serial = {group.serial: group for _, state in workers for group in state.buffer}
        groups = [by_serial[serial] for serial in sorted(by_serial)]
        order = {group.serial: place for place, group in enumerate(groups)}
        return (
            tuple((number, state.phase, state.draining, state.asks_again, state.epoch) for number, state in workers),
            tuple(tuple(order[group.serial] for group in state.buffer) for _, state in workers),
            tuple((group.running, group.num_arrived, frozenset(group.done), group.numbers) for group in groups),
            tuple((tuple(lane.queue), frozenset(lane.free)) for lane in generator._lanes.values()),
            tuple(
                (client.state, client.steps_left, client.said, client.drains, client.asked_again)
                for client in self.clients
            ),
            (self.crashes, self.failures, self.restarts, self.suspicions, self.deadlines),
            tuple((number, order.get(group.serial)) for number, group in getattr(generator, "undelivered", ())),
            (generator._connectivity.num_commits, frozenset(map(frozenset, _sets(generator._connectivity))))
            if generator.rules.window_rounds
            else None,
        )


def _sets(connectivity: Connectivity) -> list[list[int]]:
    found: dict[int, list[int]] = {}
    for worker in list(connectivity._parent):
        found.setdefault(connectivity._find(worker), []).append(worker)
    return list(found.values())


def model(
    formation: Formation,
    steps: Sequence[int],
    make: Callable[..., GroupGenerator] = GroupGenerator,
    rules: Rules = PATIENT,
    rng: random.Random | None = None,
    late: int = 0,
    rates: dict[str, float] | None = None,
    **faults: Any,
) -> Model:
    """Workers with so many steps each, the last ``late`` of which have not joined yet."""
    generator = make(replace(rules, formation=formation), rate_bytes_per_s=rates, rng=rng or Choices())
    found = Model(generator, [Client("joining", number) for number in steps], **faults)
    for worker in range(len(steps)):
        if worker < len(steps) - late:
            found.hear(generator.join(worker, f"host{worker % 2}", 0.0))
        else:
            found.clients[worker].state = "new"
    return found
