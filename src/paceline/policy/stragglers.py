"""Late ranks: who will be late, whether that is worth another schedule, and which. Numbers in, decision out.

A *choice* is what the ranks of a group agree on, as text: the late ranks, each with its lateness in milliseconds
behind the rest (``3:200``, ``2:400,5:1200``), or without where it is only known that they are late (``3``). Empty:
nobody is. :func:`decide` turns a choice into a plan for a size, by price; all ranks have the same numbers, so they
get the same.

Two forms lead to a choice. *Prediction*: :func:`forecast` finds ranks that keep coming late, from what a coordinator or
the ranks themselves have seen. *Announcement*: a rank is missing now, and :func:`rules` says how long the coordinator
waits for it before it says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from paceline.errors import UsageError
from paceline.ir.cluster import Cluster
from paceline.ir.collective import Collective, Kind
from paceline.ir.cost import cost
from paceline.policy.planning import Plan, late_enough_s, plan

_WORTH_IT = 0.97
"""A schedule for late ranks must promise to save 3% of what the plain one costs."""

_ENTER, _LEAVE = 0.45, 0.27
"""A rank counts as late from so much of a buffer time on; one that counted as late, down to the second."""

RECENT, _PERSISTENT, _STILL = 5, 4, 3
"""Late is who was late in 4 of the last 5 collectives, and stays late who was in 3 of them."""

_PATIENCE, _LEAST_PATIENCE_S = 0.6, 0.02
"""How long to wait for a missing rank: in buffer times, and at least. Who comes just after an announcement would have
been better off without: below 0.2 buffer times of lateness the plain schedule wins, and most jitter is shorter."""

_ROUND_TRIPS, _HANDLING_S = 800, 20e-6
"""A collective awaits a decision if it takes so many times what that costs; a frame costs the coordinator this."""

_WINDOW = 8
"""Collectives for which a forecast is granted."""

_MOST_GREEDY_RANKS = 32
"""Up to so many ranks a schedule for several late ones is built within a second or so."""


@dataclass(frozen=True)
class Rules:
    """What the engine's coordinator needs: which all-reduces await a decision, and when a missing rank is announced."""

    least_bytes: int
    patience_s_per_byte: float
    least_patience_s: float
    most_late: int
    window: int = _WINDOW


@dataclass(frozen=True)
class Seen:
    """One all-reduce: its buffer time, and for each rank the seconds after the first one's arrival."""

    buffer_s: float
    late_s: Sequence[float]

    @classmethod
    def inside(cls, spent_s: Sequence[float]) -> Seen:
        """From how long each rank spent in it: no clock needs to be synchronised.

        Ranks leave an all-reduce together, give or take a message. So whoever spent the least time in it came last, and
        its time is that of the transfer alone: 2 (n - 1) / n buffer times.
        """
        most_s, ranks = max(spent_s), len(spent_s)
        return cls(min(spent_s) * ranks / (2 * (ranks - 1)), [most_s - spent for spent in spent_s])


def seconds_per_byte(cluster: Cluster) -> float:
    """Time of a byte over the slowest port: a buffer time is this times its size."""
    return max(1 / min(host.up_bytes_per_s, host.down_bytes_per_s) for host in cluster.hosts) * cluster.wire_factor


def rules(cluster: Cluster) -> Rules | None:
    """The rules for a group on this cluster; None where no collective should wait for a decision."""
    ranks = cluster.num_ranks
    if len(cluster.hosts) < 2 or ranks < 3:
        return None
    decision_s = 2 * max(host.latency_s for host in cluster.hosts) + ranks * _HANDLING_S
    ring_s_per_byte = 2 * (ranks - 1) / ranks * seconds_per_byte(cluster)
    return Rules(
        least_bytes=math.ceil(_ROUND_TRIPS * decision_s / ring_s_per_byte),
        patience_s_per_byte=_PATIENCE * seconds_per_byte(cluster),
        least_patience_s=_LEAST_PATIENCE_S,
        most_late=most_late(ranks),
    )


def most_late(num_ranks: int) -> int:
    """With more late ranks than this there are too few to do anything without them."""
    return (num_ranks - 1) // 2


def parse(choice: str, num_ranks: int) -> dict[int, float | None]:
    """The late ranks of a choice and their lateness in seconds, None where it is not known.

    >>> parse("2:400,5", 8)
    {2: 0.4, 5: None}
    """
    late: dict[int, float | None] = {}
    for entry in filter(None, choice.split(",")):
        rank, colon, milliseconds = entry.partition(":")
        if not rank.isdecimal() or (colon and not milliseconds.isdecimal()) or len(entry) > 20:
            raise UsageError(
                f"late ranks are given like 3 or 2:400,5:1200 (rank and milliseconds), not {choice!r:.100}"
            )
        if int(rank) >= num_ranks or int(rank) in late:
            raise UsageError(f"rank {rank} cannot be late (again): the ranks are 0 to {num_ranks - 1}, each named once")
        late[int(rank)] = int(milliseconds) / 1e3 if colon else None
    return late


def within(choice: str, num_ranks: int) -> str:
    """The part of a choice that is about ranks of a group of this size."""
    return ",".join(entry for entry in choice.split(",") if entry and int(entry.partition(":")[0]) < num_ranks)


def spell(late_s: Mapping[int, float]) -> str:
    """The choice for these ranks: what :func:`parse` reads."""
    return ",".join(f"{rank}:{round(late_s[rank] * 1e3)}" for rank in sorted(late_s))


def decide(collective: Collective, cluster: Cluster, size_bytes: float, choice: str, plain: Plan) -> Plan:
    """The plan for a choice: the cheapest schedule for these late ranks, or the plain one where that is as good."""
    late = parse(choice, cluster.num_ranks)
    if collective.kind is not Kind.ALL_REDUCE or not late or cluster.num_ranks < 3:
        return plain
    enough_s = late_enough_s(collective, cluster, size_bytes)
    behind = cluster.with_late({rank: enough_s if seconds is None else seconds for rank, seconds in late.items()})
    plans = [plan(collective, behind, size_bytes, "stragglar")]
    if len(late) > 1 and cluster.num_ranks <= _MOST_GREEDY_RANKS:
        plans.append(plan(collective, behind, size_bytes, "late_ranks"))
    best = min(plans, key=lambda found: found.cost.exposed_s)
    plain_s = cost(plain.schedule, behind, size_bytes).exposed_s
    return best if best.cost.exposed_s <= _WORTH_IT * plain_s else plain


def lateness(seen: Seen, least_s: float) -> dict[int, float]:
    """Who came more than this after all others, and how much: ranks that are late together are late behind the rest."""
    middle_s = median(seen.late_s)
    late = [rank for rank, seconds in enumerate(seen.late_s) if seconds - middle_s > least_s]
    if not late:
        return {}
    rest_s = max(seconds for rank, seconds in enumerate(seen.late_s) if rank not in late)
    return {rank: seen.late_s[rank] - rest_s for rank in late if seen.late_s[rank] - rest_s > least_s}


def forecast(history: Sequence[Seen], before: Mapping[int, float], least_s: float = 0.0) -> dict[int, float]:
    """The ranks that will be late in the next collectives, and by how many seconds; empty: nobody, or who knows.

    ``history`` is oldest first; ``before`` is the forecast so far. It takes more to become late than to stay late, two
    collectives in time end it, and a lateness stays what it was while it is right within a factor of two. However short
    the buffer time, nobody becomes late by less than ``least_s``.
    """
    recent = history[-RECENT:]
    entering = [lateness(seen, max(least_s, _ENTER * seen.buffer_s)) for seen in recent]
    staying = [lateness(seen, _LEAVE / _ENTER * max(least_s, _ENTER * seen.buffer_s)) for seen in recent]
    ranks = len(recent[-1].late_s) if recent else 0
    found: dict[int, float] = {}
    for rank in range(ranks):
        late_s = sorted(late[rank] for late in (staying if rank in before else entering) if rank in late)
        recovered = not any(rank in late for late in staying[-2:])
        if recovered or len(late_s) < (_STILL if rank in before else _PERSISTENT):
            continue
        expected_s = late_s[min(1, len(late_s) - 1)]  # it is mostly at least as late as that
        told_s = before.get(rank, 0.0)
        found[rank] = told_s if told_s <= expected_s < 2 * told_s else _rounded(expected_s)
    return found if len(found) <= most_late(ranks) else {}


def _rounded(seconds: float) -> float:
    """Down to a power of the square root of two, in whole milliseconds: few choices, so few schedules."""
    milliseconds = max(1.0, seconds * 1e3)
    return max(1, math.floor(2 ** (math.floor(2 * math.log2(milliseconds)) / 2))) / 1e3
