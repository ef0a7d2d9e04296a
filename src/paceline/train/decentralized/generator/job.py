"""What the group generator's service does with a worker's message. Pure: no sockets, no threads, no clock.

:class:`Job` stands between connections and :class:`paceline.policy.groups.GroupGenerator`. It gives workers their
numbers, knows which connection is whose, and takes care of averages of all workers. A worker is in one of these stages:

==========  =========================================  ==========================================================
stage       what holds                                 leaves it by
==========  =========================================  ==========================================================
COPYING     joined with ``copy=True``; in no group     Ready: ACTIVE. Drain: LEFT
ACTIVE      a member of the GroupGenerator             Drain, when it has served its groups: LEFT
LEFT        makes no steps; waits for the final        Goodbye
            average, and contributes to others
==========  =========================================  ==========================================================

From each stage a worker is forgotten by Goodbye; when its connection ends, after ``grace_s``; and when it is silent for
its lease, with Evicted. A Join of the same number begins anew.

A message counts for the worker that joined on its connection, so none can speak for another. What makes no sense in the
worker's stage, or names a group or average that it is not in, is ignored.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from paceline.policy import group_messages as say
from paceline.policy.group_tuning import GroupSizeSearch, LinkRates
from paceline.policy.groups import GroupGenerator
from paceline.train.decentralized.generator.averages import Averages
from paceline.train.decentralized.generator.messages import (
    Abort,
    Alive,
    AskAverage,
    AverageFinished,
    Commit,
    Drain,
    Enough,
    Evicted,
    Finished,
    Goodbye,
    Heartbeat,
    Join,
    Joined,
    Left,
    Ready,
    Refused,
    Request,
    Solo,
    Start,
    ToService,
    ToWorker,
)
from paceline.train.decentralized.generator.numbers import WorkerNumbers

_log = logging.getLogger("paceline.generator")

_SERIALS_PER_MS = 1000
_DAYS_AHEAD_MS = 10 * 24 * 3600 * 1000
_LOG_EVERY_S = 60.0


class Connection(Protocol):
    """Where a worker's messages come from, and go to."""

    name: str

    def send(self, message: ToWorker) -> None:
        """Send, some time."""

    def close(self, reason: str) -> None:
        """Send what is to be sent, and close."""


class Stage(Enum):
    """Where a worker is; see the table above."""

    COPYING = "copying"
    ACTIVE = "active"
    LEFT = "left"


@dataclass(eq=False)
class _Member:
    number: int
    join: Join
    connection: Connection | None
    heard_s: float
    stage: Stage
    ready: bool
    epoch: int = 0
    lost_s: float = math.inf
    across_hosts: bool = False  # its last group was
    knows: bool = False  # it has been told that it is a member

    @property
    def title(self) -> str:
        return f"worker {self.number} (host {self.join.host})"


@dataclass
class Settings:
    """What a service is told besides the rules of groups."""

    total_steps: int | None = None
    adapt_group_size: bool = False
    link_aware: bool = False
    first_number: int = 1
    grace_s: float = 1.0
    settle_s: float = 3.0


class Job:
    """The workers of a job and what they are told."""

    def __init__(self, generator: GroupGenerator, instance: int, now_ms: int, settings: Settings) -> None:
        self.instance = instance
        self.steps = 0
        self._generator = generator
        self._settings = settings
        self._members: dict[int, _Member] = {}
        self._member_of: dict[Connection, _Member] = {}
        self._lost: dict[int, _Member] = {}
        self._model = ""  # that of the first member
        self._newcomers: list[tuple[Connection, Join]] = []  # wait for a number until workers of before are back
        self._settled_s = math.inf
        self._numbers = WorkerNumbers(settings.first_number)
        self._averages = Averages(generator.take_serial, self._send, generator.rules.longest_average_s)
        self._sizes = GroupSizeSearch()
        self._rates = LinkRates()
        self._counts = dict.fromkeys(("requests", "solos", "started", "committed", "aborted", "members"), 0)
        self._next_log_s = math.inf
        self._next_look_s = math.inf
        self._is_settling = False
        self._warned_of: set[int] = set()
        self._advance(now_ms)

    # Events

    def receive(self, connection: Connection, message: ToService, now_s: float, now_ms: int) -> None:
        """A message has come."""
        member = self._member_of.get(connection)
        if member is not None:
            member.heard_s = now_s
        if isinstance(message, Join):
            self._join(connection, message, now_s, now_ms)
        elif isinstance(message, Heartbeat):
            connection.send(Alive(self.steps, self._numbers.highest))
            if member is not None and member.stage is Stage.ACTIVE:
                self._deliver(self._generator.heartbeat(member.number, now_s, member.epoch))
        elif member is not None:
            self._serve(member, message, now_s)
        self._go_on(now_s)

    def closed(self, connection: Connection, now_s: float) -> None:
        """A connection has ended. Its worker may come back soon."""
        self._newcomers = [waiting for waiting in self._newcomers if waiting[0] is not connection]
        member = self._member_of.pop(connection, None)
        if member is not None:
            member.connection, member.lost_s = None, now_s
            self._lost[member.number] = member
            _log.warning("%s has lost its connection", member.title)

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        self._deliver(self._generator.tick(now_s))
        for member in [one for one in self._lost.values() if one.lost_s + self._settings.grace_s <= now_s]:
            self._forget(member, "lost its connection", now_s)
        if self._next_look_s <= now_s:
            self._next_look_s = now_s + self._look_every_s
            self._check_leases(now_s)
            self._warn_of_waits(now_s)
        self._averages.tick(now_s)
        if self._is_settling and self._settled_s <= now_s:
            self._is_settling = False
            newcomers, self._newcomers = self._newcomers, []
            for connection, join in newcomers:
                self._join(connection, join, now_s, 0)
        if self._next_log_s <= now_s:
            self._next_log_s = now_s + _LOG_EVERY_S
            _log.info("group generator: %s", self.status(now_s))
        self._go_on(now_s)

    @property
    def next_tick_s(self) -> float:
        """When :meth:`tick` next has something to do."""
        graces = [member.lost_s + self._settings.grace_s for member in self._lost.values()]
        settled = [self._settled_s] if self._is_settling else []
        return min(
            self._generator.next_tick_s,
            self._averages.next_tick_s,
            self._next_look_s,
            self._next_log_s,
            *graces,
            *settled,
        )

    def is_attached(self, connection: Connection) -> bool:
        """Whether a worker has joined on this connection, or waits for its number."""
        return connection in self._member_of or any(waiting[0] is connection for waiting in self._newcomers)

    def status(self, now_s: float) -> dict[str, object]:
        """Return what a log or a user wants to know."""
        phases: dict[str, int] = {}
        for member in self._members.values():
            active = member.stage is Stage.ACTIVE
            name = self._generator.phase(member.number).name.lower() if active else member.stage.value
            phases[name] = phases.get(name, 0) + 1
        counts = dict(self._counts)
        members = counts.pop("members")
        return {
            "workers": phases,
            "lost": len(self._lost),
            "steps": self.steps,
            **counts,
            "group_size": self._generator.rules.group_size,
            "mean_group_size": members / counts["started"] if counts["started"] else 0.0,
            "epoch": self._generator.epoch,
            "rates_bytes_per_s": self._rates.rate_bytes_per_s,
            "waits": [
                {"serial": wait.serial, "members": wait.members, "missing": wait.missing, "waited_s": wait.waited_s}
                for wait in self._generator.waits(now_s)
            ],
        }

    # Joining

    def _join(self, connection: Connection, join: Join, now_s: float, now_ms: int) -> None:
        if not self._members:
            self._advance(now_ms)
        if self._settled_s == math.inf:
            self._settled_s = now_s + self._settings.settle_s
            self._is_settling = True
            self._next_log_s = now_s + _LOG_EVERY_S
            self._next_look_s = now_s + self._look_every_s
        self._learn_of_former_service(join, now_s, now_ms)
        if (own := self._member_of.get(connection)) is not None:
            self._forget(own, "joined anew", now_s)
        if self._numbers.known(join) is None and now_s < self._settled_s:
            self._newcomers.append((connection, join))
            return
        self._model = self._model if self._members else join.model
        if reason := self._numbers.refusal(join) or self._refusal(join):
            _log.warning("%s of host %s is refused: %s", connection.name, join.host, reason)
            connection.send(Refused(reason))
            connection.close(reason)
            return
        number = self._numbers.take(join)
        former = self._members.get(number)
        copied = former is None or former.ready
        was_evicted = join.previous is not None and join.previous[0] == self.instance and former is None
        if former is not None:
            self._replace(former, join, now_s)
        copy = (join.fresh or join.stale or was_evicted or not copied) and self._anybody_has_weights
        member = _Member(number, join, connection, now_s, Stage.COPYING, ready=False)
        self._members[number] = self._member_of[connection] = member
        if join.rate_bytes_per_s is not None:
            self._rates.tell(join.host, join.rate_bytes_per_s)
        _log.info("%s has joined from %s%s", member.title, connection.name, ", and copies weights" if copy else "")
        if copy:
            member.knows = True
            connection.send(Joined(number, self._generator.epoch, self.instance, True, self._generator.rules.lease_s))
            self._averages.ask(number)
        else:
            self._activate(member, now_s)
        if self._has_enough:
            connection.send(Enough(self.steps))

    def _refusal(self, join: Join) -> str | None:
        if join.model != self._model:
            return (
                f"its model is not the one of the job's other workers: {join.model} here, {self._model} there; build "
                "the same on all"
            )
        if self._has_enough and not self._members and join.previous is None:
            return f"the job has ended after {self.steps} steps, and no worker is left: start another generator"
        return None

    def _replace(self, former: _Member, join: Join, now_s: float) -> None:
        connection = former.connection
        self._forget(former, "joined anew" if former.join.process == join.process else "was replaced", now_s)
        if connection is not None:
            if former.join.process != join.process:
                connection.send(Refused(f"another process has joined as worker {former.number}, from {join.host}"))
            connection.close("its worker has joined on another connection")

    def _learn_of_former_service(self, join: Join, now_s: float, now_ms: int) -> None:
        """Go on where a former service ended. Only within reason: it is the word of one worker."""
        if join.previous is not None and join.previous[0] == self.instance:
            return
        if join.epoch_seen < now_ms + _DAYS_AHEAD_MS and join.serial_seen < (now_ms + _DAYS_AHEAD_MS) * _SERIALS_PER_MS:
            self._generator.advance(join.epoch_seen + 1 if join.epoch_seen else 0, join.serial_seen + 1)
        if join.previous is not None and now_s <= self._settled_s:
            self._count_steps(max(0, join.steps_seen - self.steps))
            self._numbers.leave_out(join.highest_worker_seen)

    def _advance(self, now_ms: int) -> None:
        """Begin with an epoch and serial numbers that no former service has used."""
        self._generator.advance(now_ms, now_ms * _SERIALS_PER_MS)

    def _activate(self, member: _Member, now_s: float) -> None:
        """The worker has the weights: it may be in groups."""
        member.stage, member.ready = Stage.ACTIVE, True
        self._deliver(self._generator.join(member.number, member.join.host, now_s))

    # A worker's messages

    def _serve(self, member: _Member, message: ToService, now_s: float) -> None:
        number, active = member.number, member.stage is Stage.ACTIVE
        if isinstance(message, Request):
            self._count_steps(message.steps)
            if active:
                self._counts["requests"] += 1
                self._learn(member, message, now_s)
                self._deliver(self._generator.request(number, now_s, member.epoch, message.step_s))
            else:
                self._send([number], Solo())
        elif isinstance(message, Finished):
            if active:
                self._deliver(self._generator.finished(number, message.serial, message.ok, now_s, member.epoch))
        elif isinstance(message, AverageFinished):
            self._averages.finished(number, message.serial, message.ok)
        elif isinstance(message, AskAverage):
            self._averages.ask(number)
        elif isinstance(message, Ready):
            if member.stage is Stage.COPYING:
                self._averages.withdraw(number)
                self._activate(member, now_s)
        elif isinstance(message, Drain):
            if active:
                self._deliver(self._generator.drain(number, now_s, member.epoch))
            elif member.stage is Stage.COPYING:
                member.stage = Stage.LEFT
                self._send([number], Left())
        elif isinstance(message, Goodbye):
            connection = member.connection
            self._forget(member, "has left", now_s)
            if connection is not None:
                connection.close("goodbye")
        if member.stage is Stage.ACTIVE and not isinstance(message, (Request, Finished, Drain, Goodbye, Ready)):
            self._deliver(self._generator.heartbeat(number, now_s, member.epoch))

    @property
    def _has_enough(self) -> bool:
        return self._settings.total_steps is not None and self.steps >= self._settings.total_steps

    def _count_steps(self, steps: int) -> None:
        had_enough = self._has_enough
        self.steps += steps
        if self._has_enough and not had_enough:
            _log.info("the workers have made %d steps: that is enough", self.steps)
            self._send(self._members, Enough(self.steps))

    def _learn(self, member: _Member, request: Request, now_s: float) -> None:
        """Choose the group size and the classes of links from what is reported."""
        rules, generator = self._generator.rules, self._generator
        if self._settings.adapt_group_size:
            self._sizes.observe(request.step_s, request.average_s, request.group_size)
            active = sum(one.stage is Stage.ACTIVE for one in self._members.values()) if self._sizes.is_due else 0
            size = max(2, self._sizes.choose(rules.group_size, active)) if active else rules.group_size
            if size != rules.group_size:
                _log.info("groups have %d workers from now on, not %d", size, rules.group_size)
                self._deliver(generator.change(now_s, rules=replace(rules, group_size=size)))
        if self._settings.link_aware:
            if member.across_hosts:
                self._rates.observe(member.join.host, request.average_s, request.average_bytes, int(request.group_size))
            rates = self._rates.changed(generator.rules.group_size)
            if rates is not None:
                _log.info(
                    "links of hosts, in bytes a second: %s", {host: f"{rate:.3g}" for host, rate in rates.items()}
                )
                self._deliver(generator.change(now_s, rate_bytes_per_s=rates))

    # What workers are told

    def _deliver(self, messages: Sequence[say.Message]) -> None:
        for message in messages:
            if isinstance(message, say.Start):
                self._counts["started"] += 1
                self._counts["members"] += len(message.members)
                members = [self._members[number] for number in message.members]
                hosts = {member.join.host for member in members}
                for member in members:
                    member.across_hosts = len(hosts) > 1
                addresses = tuple(member.join.address for member in members)
                self._send(message.to, Start(message.serial, message.epoch, message.members, addresses))
            elif isinstance(message, say.Commit):
                self._counts["committed"] += 1
                self._send(message.to, Commit(message.serial))
            elif isinstance(message, say.Abort):
                self._counts["aborted"] += 1
                _log.warning("group %d of %s is aborted: %s", message.serial, list(message.members), message.reason)
                self._send(message.to, Abort(message.serial, message.reason))
            elif isinstance(message, say.Solo):
                self._counts["solos"] += 1
                self._send(message.to, Solo())
            elif isinstance(message, say.Left):
                self._members[message.worker].stage = Stage.LEFT
                self._send(message.to, Left())
            elif isinstance(message, say.Evicted):
                self._evicted(message.worker, "was silent for its lease")
            else:
                self._member_of_generator(self._members[message.worker], message.epoch)

    def _member_of_generator(self, member: _Member, epoch: int) -> None:
        member.epoch = epoch
        if not member.knows:
            member.knows = True
            lease_s = self._generator.rules.lease_s
            self._send([member.number], Joined(member.number, epoch, self.instance, False, lease_s))

    def _send(self, workers: Iterable[int], message: ToWorker) -> None:
        for worker in workers:
            member = self._members.get(worker)
            if member is not None and member.connection is not None:
                member.connection.send(message)

    # Workers that go

    def _evicted(self, worker: int, reason: str) -> None:
        """Tell the worker, should it still listen, and forget it. The generator has done so already."""
        member = self._members.get(worker)
        if member is not None:
            _log.warning("%s is evicted: it %s", member.title, reason)
            self._send([worker], Evicted(self._generator.epoch, reason))
            self._remove(member)

    def _forget(self, member: _Member, reason: str, now_s: float) -> None:
        _log.info("%s is no member any more: it %s", member.title, reason)
        self._remove(member)
        self._deliver(self._generator.evict(member.number, reason, now_s))

    def _remove(self, member: _Member) -> None:
        del self._members[member.number]
        self._lost.pop(member.number, None)
        if member.connection is not None:
            self._member_of.pop(member.connection, None)
        self._averages.gone(member.number)
        if not any(other.join.host == member.join.host for other in self._members.values()):
            self._rates.forget(member.join.host)

    def _check_leases(self, now_s: float) -> None:
        """Evict silent workers that the generator does not know."""
        lease_s = self._generator.rules.lease_s
        for member in [one for one in self._members.values() if one.stage is not Stage.ACTIVE]:
            if member.heard_s + lease_s <= now_s:
                self._evicted(member.number, "was silent for its lease")

    @property
    def _look_every_s(self) -> float:
        return min(self._generator.rules.lease_s, self._generator.rules.patience_s) / 4

    def _warn_of_waits(self, now_s: float) -> None:
        """Name groups that wait for long, each once."""
        waits = self._generator.waits(now_s)
        self._warned_of &= {wait.serial for wait in waits}
        for wait in waits:
            if wait.waited_s >= self._generator.rules.patience_s / 2 and wait.serial not in self._warned_of:
                self._warned_of.add(wait.serial)
                missing = ", ".join(self._members[number].title for number in wait.missing if number in self._members)
                _log.warning("group %d of %s waits %.1f s for %s", wait.serial, wait.members, wait.waited_s, missing)

    # Averages of all workers

    def _contributors(self) -> list[int]:
        return [number for number, member in self._members.items() if member.ready and member.connection is not None]

    def _is_final(self, now_s: float) -> bool:
        """Whether all workers have left, and some wait for the final average."""
        return (
            self._settled_s <= now_s
            and not self._lost
            and all(member.stage is Stage.LEFT for member in self._members.values())
            and not self._averages.had_final.issuperset(self._members)
        )

    def _go_on(self, now_s: float) -> None:
        """Start the next average of all workers, if one is wanted."""
        if self._averages.is_running:
            return
        final = self._is_final(now_s)
        if not final and not self._averages.waiting:
            return
        if contributors := self._contributors():
            connected = {number: member for number, member in self._members.items() if member.connection is not None}
            addresses = {number: member.join.address for number, member in connected.items()}
            self._averages.start(contributors, addresses, self._generator.epoch, now_s, final=final)
        elif not self._anybody_has_weights:
            for member in list(self._members.values()):
                self._keep_own_weights(member, now_s)
            self._go_on(now_s)

    @property
    def _anybody_has_weights(self) -> bool:
        """Whether there is a worker to copy from, perhaps one that is about to connect again."""
        return any(member.ready for member in self._members.values())

    def _keep_own_weights(self, member: _Member, now_s: float) -> None:
        """Nobody is left whose weights this worker could copy."""
        if self._has_enough and member.join.fresh and member.connection is not None:
            reason = f"the job has ended after {self.steps} steps, and no worker is left to copy weights from"
            member.connection.send(Refused(reason))
            member.connection.close(reason)
            self._forget(member, "came too late", now_s)
            return
        _log.warning("nobody is left whose weights %s could copy: it keeps its own", member.title)
        self._averages.withdraw(member.number)
        member.ready, member.knows = True, False
        if member.stage is Stage.COPYING:
            self._activate(member, now_s)
