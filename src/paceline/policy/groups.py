"""The group generator of partial all-reduce: which workers average their weights, and in which order. Pure.

In Ripples (arXiv 1909.08029) each worker makes local steps, and averages its weights with a small group now and then.
One service forms the groups. This is its core, as a state machine without network, threads or clock: an event of a
worker and the time go in, messages to workers come out. The same events and the same seed give the same messages.

A worker is in one of these phases:

==========  ============================================================================================
phase       what holds
==========  ============================================================================================
COMPUTE     the worker makes local steps; nobody waits for an answer
ARRIVED     the worker has asked for a group, or drains, and its next group has not started
IN_GROUP    the first group of its buffer has started; the worker has not been told how it ended
LEFT        the worker has served its buffer and is gone
DEAD        the worker was evicted; it must join again, and copy weights, before it may average
==========  ============================================================================================

==========  =======================================  ===================================================
phase       event                                    becomes, and what is said
==========  =======================================  ===================================================
COMPUTE     ``request``                              ARRIVED, or still COMPUTE: Solo
COMPUTE     ``drain`` with an empty buffer           LEFT: Left (with groups in the buffer: ARRIVED)
ARRIVED     all members of its first group arrived   IN_GROUP: Start
ARRIVED     ``drain`` with an empty buffer           LEFT: Left
ARRIVED     the deadline of its first group          IN_GROUP with those who came: Start; alone, COMPUTE: Solo
IN_GROUP    all members ``finished``                 COMPUTE: Commit; if it drains, ARRIVED or LEFT
IN_GROUP    a member failed, is late or evicted      COMPUTE: Abort; if it drains, ARRIVED or LEFT
all three   ``tick`` after its lease                 DEAD: Evicted, and the epoch grows by one
all three   ``evict``, or ``join`` of its successor  DEAD, and the epoch grows by one
==========  =======================================  ===================================================

*Group Buffer*: a group gets the next serial number and is appended to the buffers of all its members in one step, and
each worker serves its buffer from the head. So buffers are sorted by serial, and the group with the lowest serial heads
the buffers of all its members. It starts when they arrive: there is no deadlock. Appended one by one, two groups can
each wait for the other.

*Formation*: a request that finds an empty buffer forms groups, see :class:`Formation`. *Isolation*: if recent groups do
not connect all workers, groups that do are appended (:class:`paceline.policy.grouping.Connectivity`).

A worker applies what it has averaged only when told Commit: a group changes the weights of all members or of none. The
worker may go on with local steps while it waits or averages; the generator does not mind.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.errors import UsageError
from paceline.policy.group_messages import Abort, Commit, Evicted, Joined, Left, Message, Solo, Start, Wait
from paceline.policy.grouping import (
    Connectivity,
    LinkClass,
    PaceFilter,
    bridges,
    inter_intra_groups,
    link_classes,
    random_groups,
)

_WORKERS_FOR_CHOICE = 4
"""Groups wait for further arrivals to choose among where there are so many times their workers: others come soon ..."""
_CHOICE_STEPS = 0.25
"""... and for so many typical steps at most."""
_MET = 32


class Phase(Enum):
    """Where a worker is; see the table above."""

    COMPUTE = 0
    ARRIVED = 1
    IN_GROUP = 2
    LEFT = 3
    DEAD = 4


class Formation(Enum):
    """How a request with an empty buffer gets a group.

    Workers that are *free* have an empty buffer, do not drain and are not slow.
    """

    FIRST_COME = "first_come"
    """The first workers that arrive form a group. Nobody waits for a certain worker, so nobody waits for a slow one.

    Workers that once arrive together would do so again and again. With ``Rules.extra_arrivals`` a group waits a little
    for more workers than it needs, and takes those whom the first one has not averaged with for longest.
    """

    DIVISION = "division"
    """All free workers are partitioned into disjoint random groups at once (Group Division)."""

    INTER_INTRA = "inter_intra"
    """As DIVISION, with one worker of each host averaging across hosts, and then each host (Inter-Intra)."""

    RANDOM = "random"
    """The worker gets a group with random others, free or not. Most then wait for a slow one: for comparison only."""


@dataclass(frozen=True)
class Rules:
    """How groups are formed, and how long anything waits."""

    group_size: int = 4
    formation: Formation = Formation.FIRST_COME
    slow_factor: float = 1.5
    """A worker whose steps take this many times the median is slow: only its own requests give it a group."""
    patience_s: float = 10.0
    """A group starts without its missing members so long after the first one arrived."""
    longest_average_s: float = 300.0
    """A group that not all members have finished so long after Start is aborted."""
    lease_s: float = 30.0
    """A worker that says nothing for so long is evicted."""
    extra_arrivals: int = 0
    """First come: so many workers more than a group needs are awaited, to choose among. Worth it with overlap: 1."""
    window_rounds: int = 12
    """The groups of this many rounds connect all workers. A round is a group for each; 0 turns this off."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UsageError(f"group_size is {self.group_size}: a group has at least 2 workers")
        if not all(
            number > 0 for number in (self.slow_factor - 1, self.patience_s, self.longest_average_s, self.lease_s)
        ):
            raise UsageError("slow_factor must be above 1; patience_s, longest_average_s and lease_s above 0")
        if self.extra_arrivals < 0:
            raise UsageError(f"extra_arrivals is {self.extra_arrivals}: it must be 0 or more")
        if self.window_rounds < 0:
            raise UsageError(f"window_rounds is {self.window_rounds}: it must be 0 or more")


class _Lane:
    """Workers with links of one class. Groups are formed within a lane; only bridges against isolation cross lanes."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.active: OrderedDict[int, _Worker] = OrderedDict()  # all that do not drain
        self.free: OrderedDict[int, _Worker] = OrderedDict()  # COMPUTE, with an empty buffer, not slow
        self.queue: OrderedDict[int, _Worker] = OrderedDict()  # ARRIVED, with an empty buffer: FIRST_COME only
        self._roster: list[int] = []

    def roster(self) -> list[int]:
        """All active workers, as a list to sample from."""
        self._roster = self._roster or list(self.active)
        return self._roster

    def add(self, state: _Worker) -> None:
        """A worker that does not drain joins the lane."""
        self.active[state.number] = state
        self._roster = []

    def remove(self, state: _Worker) -> None:
        """A worker is no longer to be grouped."""
        for members in (self.active, self.free, self.queue):
            members.pop(state.number, None)
        self._roster = []


class _Worker:
    __slots__ = ("asks_again", "buffer", "draining", "epoch", "host", "lane", "met", "number", "phase", "since_s")

    def __init__(self, number: int, host: str, epoch: int, lane: _Lane, now_s: float) -> None:
        self.number = number
        self.host = host
        self.epoch = epoch
        self.lane = lane
        self.phase = Phase.COMPUTE
        self.since_s = now_s
        self.buffer: deque[_Group] = deque()
        self.met: deque[int] = deque(maxlen=_MET)  # members of its last groups, the latest last
        self.draining = False
        self.asks_again = False  # it asked while its group runs: that counts when the group ends


class _Group:
    __slots__ = ("closed", "done", "epoch", "members", "num_arrived", "running", "serial", "since_s")

    def __init__(self, serial: int, members: list[_Worker]) -> None:
        self.serial = serial
        self.members = members
        self.epoch = 0
        self.num_arrived = 0  # members that are ARRIVED with this group at the head of their buffer
        self.since_s = math.inf  # the first arrival, and then the start
        self.running = False
        self.closed = False
        self.done: set[int] = set()

    def members_not_done(self) -> list[_Worker]:
        return [member for member in self.members if member.number not in self.done]

    @property
    def is_awaited(self) -> bool:
        return not (self.running or self.closed)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(member.number for member in self.members))


class GroupGenerator:
    """The state machine: each event returns the messages that it causes.

    >>> generator = GroupGenerator(Rules(group_size=2))
    >>> [joined] = generator.join(0, "hosta", 0.0)
    >>> _ = generator.join(1, "hostb", 0.0)
    >>> generator.request(0, 1.0, joined.epoch)
    []
    >>> generator.request(1, 1.1, joined.epoch)
    [Start(serial=0, epoch=1, members=(0, 1))]

    ``rate_bytes_per_s`` gives the measured rate of each host's link. Groups are then formed among links of about the
    same rate, and are smaller where links are slow. A generator that replaces a lost one needs a higher ``epoch`` than
    any before, so that all workers join again.
    """

    def __init__(
        self,
        rules: Rules | None = None,
        *,
        rate_bytes_per_s: Mapping[str, float] | None = None,
        rng: random.Random | None = None,
        epoch: int = 1,
    ) -> None:
        self.rules = rules or Rules()
        self.epoch = epoch
        self._rng = rng or random.Random(0)
        self._now_s = -math.inf
        self._next_serial = 0
        self._workers: dict[int, _Worker] = {}
        self._gone: dict[int, Phase] = {}
        self._heard_s: OrderedDict[int, float] = OrderedDict()  # by worker, the longest silent first
        self._awaited: list[tuple[float, int, _Group]] = []  # a heap: groups with arrivals, by the first one's time
        self._running: OrderedDict[int, _Group] = OrderedDict()  # by start
        self._paces = PaceFilter(self.rules.slow_factor)
        self._connectivity = Connectivity()
        self._messages: list[Message] = []
        self._class_of_host: dict[str, LinkClass] = {}
        self._lanes: dict[int, _Lane] = {}
        self._rates: Mapping[str, float] = {}
        self._set_links(rate_bytes_per_s or {})

    # Events

    def join(self, worker: int, host: str, now_s: float) -> Sequence[Message]:
        """Add a worker, at any time. If it is still a member, its process was replaced: the former one is evicted."""
        self._now_s = max(self._now_s, now_s)
        if worker in self._workers:
            self._evict(self._workers[worker], "was replaced by a new process")
        copy_from = next(reversed(self._heard_s), None)
        state = _Worker(worker, host, self.epoch, self._lane_of(host), self._now_s)
        self._gone.pop(worker, None)
        self._workers[worker] = state
        self._heard_s[worker] = self._now_s
        state.lane.add(state)
        self._add_if_free(state)
        self._messages.append(Joined(worker, self.epoch, copy_from))
        return self._take_messages()

    def request(self, worker: int, now_s: float, epoch: int, step_s: float | None = None) -> Sequence[Message]:
        """Ask for a group: the worker has arrived. The answer is Start or Solo, now or later.

        ``step_s`` is how long the worker's last local step took. The default, the time since the last answer, is right
        where the worker stands still while it waits and averages.
        """
        state = self._member(worker, now_s, epoch)
        if state is None or state.draining or state.phase is Phase.ARRIVED:
            return self._take_messages()
        self._connectivity.add_request(worker)
        if step_s is not None or state.phase is Phase.COMPUTE:
            self._paces.observe(worker, self._now_s - state.since_s if step_s is None else step_s)
        if state.phase is Phase.COMPUTE:
            self._arrive(state)
        else:
            state.asks_again = True
        return self._take_messages()

    def finished(self, worker: int, serial: int, ok: bool, now_s: float, epoch: int) -> Sequence[Message]:
        """The worker has averaged with its group, or could not. Ignored if the group has ended."""
        state = self._member(worker, now_s, epoch)
        if state is None or state.phase is not Phase.IN_GROUP or state.buffer[0].serial != serial:
            return self._take_messages()
        group = state.buffer[0]
        group.done.add(worker)
        if not ok:
            self._end(group, f"worker {worker} (host {state.host}) could not finish it")
        elif len(group.done) == len(group.members):
            self._end(group, None)
        return self._take_messages()

    def drain(self, worker: int, now_s: float, epoch: int) -> Sequence[Message]:
        """The worker makes no more steps. It arrives at each group left in its buffer by itself, and then leaves."""
        state = self._member(worker, now_s, epoch)
        if state is None or state.draining:
            return self._take_messages()
        state.draining = True
        state.lane.remove(state)
        if not state.buffer:
            self._leave(state)
        elif state.phase is Phase.COMPUTE:
            self._arrive(state)
        self._serve_queue(state.lane)
        return self._take_messages()

    def heartbeat(self, worker: int, now_s: float, epoch: int) -> Sequence[Message]:
        """The worker is alive: its lease begins anew. Every other message of it does the same."""
        self._member(worker, now_s, epoch)
        return self._take_messages()

    def tick(self, now_s: float) -> Sequence[Message]:
        """Time has passed: evict workers whose lease is over, and start or dissolve groups that waited too long."""
        self._now_s = max(self._now_s, now_s)
        while self._heard_s:
            worker, heard_s = next(iter(self._heard_s.items()))
            if heard_s + self.rules.lease_s > self._now_s:
                break
            self._messages.append(Evicted(worker, self.epoch + 1))
            self._evict(self._workers[worker], f"was silent for {self._now_s - heard_s:.1f} s")
        while (first := self._first_awaited()) and first.since_s + self.rules.patience_s <= self._now_s:
            self._shrink(first)
        while self._running:
            group = next(iter(self._running.values()))
            if group.since_s + self.rules.longest_average_s > self._now_s:
                break
            silent = ", ".join(f"{state.number} (host {state.host})" for state in group.members_not_done())
            self._end(group, f"worker {silent} did not finish it within {self._now_s - group.since_s:.1f} s")
        for lane in self._lanes.values():
            self._serve_overdue(lane)
        return self._take_messages()

    def change(
        self, now_s: float, *, rules: Rules | None = None, rate_bytes_per_s: Mapping[str, float] | None = None
    ) -> Sequence[Message]:
        """Change the rules or the measured rates. Groups that were formed stay as they are."""
        self._now_s = max(self._now_s, now_s)
        self.rules = rules or self.rules
        self._paces.slow_factor = self.rules.slow_factor
        self._set_links(self._rates if rate_bytes_per_s is None else rate_bytes_per_s)
        for lane in list(self._lanes.values()):
            if self.rules.formation is Formation.FIRST_COME:
                self._serve_queue(lane)
            else:
                while lane.queue:
                    self._find_group(lane.queue.popitem(last=False)[1])
        return self._take_messages()

    def evict(self, worker: int, reason: str, now_s: float) -> Sequence[Message]:
        """A worker is known to be gone before its lease is over. Ignored if it is not a member."""
        self._now_s = max(self._now_s, now_s)
        if worker in self._workers:
            self._evict(self._workers[worker], reason)
        return self._take_messages()

    def advance(self, epoch: int, serial: int) -> None:
        """Use no epoch and no serial number below these from now on."""
        self.epoch = max(self.epoch, epoch)
        self._next_serial = max(self._next_serial, serial)

    def take_serial(self) -> int:
        """Return a serial number for an operation that is none of the generator's, in one order with its groups."""
        self._next_serial += 1
        return self._next_serial - 1

    # Questions

    def phase(self, worker: int) -> Phase:
        """Return the phase of a worker that has joined."""
        state = self._workers.get(worker)
        return state.phase if state else self._gone[worker]

    @property
    def next_tick_s(self) -> float:
        """When :meth:`tick` next has something to do, if nothing happens until then."""
        leases = [heard_s + self.rules.lease_s for heard_s in itertools.islice(self._heard_s.values(), 1)]
        waits = [next(iter(lane.queue.values())).since_s for lane in self._lanes.values() if lane.queue]
        if first := self._first_awaited():
            waits.append(first.since_s)
        ends = [group.since_s + self.rules.longest_average_s for group in itertools.islice(self._running.values(), 1)]
        choices = [self._choice_ends_s(lane) for lane in self._lanes.values() if lane.queue]
        return min(
            [*leases, *ends, *choices, *(since_s + self.rules.patience_s for since_s in waits)], default=math.inf
        )

    def waits(self, now_s: float) -> list[Wait]:
        """Return the groups that wait for members, the longest wait first."""
        return [
            Wait(
                group.serial,
                group.numbers,
                tuple(sorted(member.number for member in group.members if not _has_arrived(member, group))),
                now_s - group.since_s,
            )
            for since_s, _, group in sorted(self._awaited)
            if group.is_awaited and since_s == group.since_s
        ]

    # What a worker does

    def _member(self, worker: int, now_s: float, epoch: int) -> _Worker | None:
        """Renew a worker's lease, or tell it to join again if it has been evicted, has left or never joined."""
        self._now_s = max(self._now_s, now_s)
        state = self._workers.get(worker)
        if state is None or state.epoch != epoch:
            self._messages.append(Evicted(worker, self.epoch))
            return None
        self._heard_s[worker] = self._now_s
        self._heard_s.move_to_end(worker)
        return state

    def _arrive(self, state: _Worker) -> None:
        state.phase, state.since_s = Phase.ARRIVED, self._now_s
        state.lane.free.pop(state.number, None)
        if state.buffer:
            self._arrive_at_group(state)
        else:
            self._find_group(state)

    def _arrive_at_group(self, state: _Worker) -> None:
        """The worker has arrived at the first group of its buffer."""
        group = state.buffer[0]
        group.num_arrived += 1
        if group.since_s > state.since_s:
            group.since_s = state.since_s
            heapq.heappush(self._awaited, (group.since_s, group.serial, group))
        self._first_awaited()  # forgets what has started
        self._start_or_dissolve(group)

    def _release(self, state: _Worker) -> None:
        """The worker has its answer."""
        state.phase, state.since_s = Phase.COMPUTE, self._now_s
        asks, state.asks_again = state.asks_again, False
        if state.draining and not state.buffer:
            self._leave(state)
        elif state.draining or asks:
            self._arrive(state)
        else:
            self._add_if_free(state)

    def _solo(self, state: _Worker) -> None:
        if not state.draining:
            self._messages.append(Solo(state.number))
        self._release(state)

    def _leave(self, state: _Worker) -> None:
        self._forget(state, Phase.LEFT)
        self._messages.append(Left(state.number))

    def _evict(self, state: _Worker, reason: str) -> None:
        self.epoch += 1
        groups = list(state.buffer)
        for group in groups:
            group.num_arrived -= _has_arrived(state, group)
            group.members.remove(state)
        self._forget(state, Phase.DEAD)
        for group in groups:
            if group.running:
                self._end(group, f"worker {state.number} (host {state.host}) {reason}")
            else:
                self._start_or_dissolve(group)
        self._serve_queue(state.lane)

    def _forget(self, state: _Worker, phase: Phase) -> None:
        state.lane.remove(state)
        del self._workers[state.number], self._heard_s[state.number]
        self._paces.forget(state.number)
        self._gone[state.number] = state.phase = phase

    # What becomes of a group

    def _append_groups(self, groups: Iterable[Sequence[int]]) -> None:
        """Make groups, and append each to the buffers of all its members in one step."""
        made = []
        for numbers in groups:
            group = _Group(self._next_serial, [self._workers[number] for number in numbers])
            self._next_serial += 1
            made.append(group)
            for member in group.members:
                member.buffer.append(group)
                member.lane.free.pop(member.number, None)
                member.lane.queue.pop(member.number, None)
        for group in made:
            for member in list(group.members):
                if _has_arrived(member, group):
                    self._arrive_at_group(member)

    def _start_or_dissolve(self, group: _Group) -> None:
        """Start a group that has all its members, or dissolve it if a single one is left."""
        if not group.is_awaited:
            return
        if len(group.members) < 2:
            group.closed = True
            for member in group.members:
                waited = _has_arrived(member, group)
                member.buffer.remove(group)
                if waited:
                    self._solo(member)
                else:
                    self._add_if_free(member)
        elif group.num_arrived == len(group.members):
            group.running, group.epoch, group.since_s = True, self.epoch, self._now_s
            self._running[group.serial] = group
            for member in group.members:
                member.phase = Phase.IN_GROUP
            self._messages.append(Start(group.serial, group.epoch, group.numbers))

    def _first_awaited(self) -> _Group | None:
        """Return the group that has waited longest."""
        while self._awaited and not self._awaited[0][2].is_awaited:
            heapq.heappop(self._awaited)
        return self._awaited[0][2] if self._awaited else None

    def _shrink(self, group: _Group) -> None:
        """Let a group go without the members that have not arrived."""
        for member in [member for member in group.members if not _has_arrived(member, group)]:
            group.members.remove(member)
            member.buffer.remove(group)
            if member.phase is Phase.COMPUTE:
                self._paces.observe(member.number, self._now_s - member.since_s)
                self._add_if_free(member)
        self._start_or_dissolve(group)

    def _end(self, group: _Group, reason: str | None) -> None:
        """Commit a group, or abort it for a reason."""
        numbers = group.numbers
        group.closed = True
        del self._running[group.serial]
        if reason is None:
            self._messages.append(Commit(group.serial, group.epoch, numbers))
            self._connectivity.add_commit(numbers)
            for member in group.members:
                member.met.extend(number for number in numbers if number != member.number)
        elif numbers:
            self._messages.append(Abort(group.serial, group.epoch, numbers, reason))
        for member in group.members:
            member.buffer.popleft()
            self._release(member)
        self._append_bridges()

    # Who is grouped with whom

    def _find_group(self, state: _Worker) -> None:
        """Form groups for a worker with an empty buffer, or let it wait for the next that come."""
        lane, formation = state.lane, self.rules.formation
        if formation is Formation.FIRST_COME:
            lane.queue[state.number] = state
            self._serve_queue(lane)
            return
        if formation is Formation.RANDOM:
            chosen = self._rng.sample(lane.roster(), min(lane.group_size, len(lane.active)))
            others = [number for number in chosen if number != state.number and not self._paces.is_slow(number)]
            groups = [[state.number, *others[: lane.group_size - 1]]] if others else []
        elif formation is Formation.DIVISION:
            groups = random_groups([state.number, *lane.free], lane.group_size, self._rng) if lane.free else []
        else:
            host_of = {member.number: member.host for member in [state, *lane.free.values()]}
            groups = inter_intra_groups(list(host_of), host_of, lane.group_size, self._rng)
        self._append_groups(groups)
        if not state.buffer and state.phase is Phase.ARRIVED:
            self._solo(state)

    def _serve_queue(self, lane: _Lane) -> None:
        """First come: group workers that wait, as soon as they are enough, or all that there are."""
        while lane.queue:
            size = min(lane.group_size, len(lane.active))
            if size < 2:
                self._solo(lane.queue.popitem(last=False)[1])
            elif len(lane.queue) >= size + self._choice(lane):
                self._append_groups([self._chosen(lane, size)])
            else:
                return

    def _choice(self, lane: _Lane) -> int:
        """How many workers more than a group needs it waits for, to choose among them."""
        return self.rules.extra_arrivals if len(lane.active) >= _WORKERS_FOR_CHOICE * lane.group_size else 0

    def _chosen(self, lane: _Lane, size: int) -> list[int]:
        """The one that waits longest, and of the others those that it has not met for longest."""
        first, *others = lane.queue.values()
        met = {number: place for place, number in enumerate(first.met)}
        others.sort(key=lambda state: met.get(state.number, -1))
        return [first.number, *(state.number for state in others[: size - 1])]

    def _choice_ends_s(self, lane: _Lane) -> float:
        """When the first of a queue that has enough for a group waits no longer for others to choose among."""
        if self.rules.formation is not Formation.FIRST_COME or len(lane.queue) < max(2, lane.group_size):
            return math.inf
        return next(iter(lane.queue.values())).since_s + _CHOICE_STEPS * self._paces.typical_s

    def _serve_overdue(self, lane: _Lane) -> None:
        """First come: do not let the first of the queue wait any longer than it should."""
        while self._choice_ends_s(lane) <= self._now_s:
            self._append_groups([self._chosen(lane, lane.group_size)])
        while lane.queue and next(iter(lane.queue.values())).since_s + self.rules.patience_s <= self._now_s:
            if len(lane.queue) > 1:
                self._append_groups([_first(lane.queue, lane.group_size)])
            else:
                self._solo(lane.queue.popitem(last=False)[1])

    def _append_bridges(self) -> None:
        """At the end of a block of commits, append groups (bridges) that connect what the block's groups did not.

        A block is a third of the window. So each window has a whole block and the one in which its bridges commit.
        """
        groups_a_round = math.ceil(len(self._workers) / self.rules.group_size)
        block = math.ceil(self.rules.window_rounds * groups_a_round / 3)
        if not block or self._connectivity.num_commits < block:
            return
        components, self._connectivity = self._connectivity.components(), Connectivity()
        representatives = []
        for component in components:
            active = [self._workers[number] for number in component if number in self._workers]
            costs = {state.number: self._bridge_cost(state) for state in active if not state.draining}
            if costs:
                least = min(costs.values())
                representatives.append(self._rng.choice([number for number, cost in costs.items() if cost == least]))
        self._append_groups(bridges(representatives, self.rules.group_size))

    def _bridge_cost(self, state: _Worker) -> tuple[bool, bool, int]:
        """Who serves a bridge soonest: a worker that waits for a group, else one that is not slow, with few groups."""
        waits = state.phase is Phase.ARRIVED and not state.buffer
        return not waits, self._paces.is_slow(state.number), len(state.buffer)

    def _add_if_free(self, state: _Worker) -> None:
        if state.phase is Phase.COMPUTE and not (state.buffer or state.draining or self._paces.is_slow(state.number)):
            state.lane.free[state.number] = state

    # Links, and small things

    def _set_links(self, rate_bytes_per_s: Mapping[str, float]) -> None:
        self._rates = dict(rate_bytes_per_s)
        self._class_of_host = link_classes(self._rates, self.rules.group_size)
        queued = [state for lane in self._lanes.values() for state in lane.queue.values()]
        self._lanes = {}
        for state in self._workers.values():
            state.lane = self._lane_of(state.host)
            if not state.draining:
                state.lane.add(state)
                self._add_if_free(state)
        for state in sorted(queued, key=lambda waiting: waiting.since_s):
            state.lane.queue[state.number] = state

    def _lane_of(self, host: str) -> _Lane:
        """Hosts whose rate is not known count as fast."""
        found = self._class_of_host.get(host, LinkClass(0, self.rules.group_size))
        return self._lanes.setdefault(found.number, _Lane(found.group_size))

    def _take_messages(self) -> Sequence[Message]:
        said, self._messages = self._messages, []
        return said


def _has_arrived(state: _Worker, group: _Group) -> bool:
    return state.phase is Phase.ARRIVED and bool(state.buffer) and state.buffer[0] is group


def _first(queue: Mapping[int, _Worker], count: int) -> list[int]:
    return list(itertools.islice(queue, count))
