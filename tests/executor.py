"""A slow, obvious executor: ranks with mailboxes, integers for data, and a scheduler that picks any enabled action.

It shares no code with the proof. Each rank knows only the transfers it takes part in. Messages of a pair arrive in the
order they were sent. A rank may send a chunk once everything that earlier steps write to it has been written; it may
apply a message once all earlier writes of that chunk, and all reads of this and earlier steps, are done.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass

from paceline.ir.collective import Kind
from paceline.ir.schedule import Schedule


class WrongError(Exception):
    """The run read what was not there, deadlocked, or ended with a wrong number."""


@dataclass
class _Event:
    """One read or one write of one chunk at one rank."""

    index: int  # position in the table
    step: int
    write: bool
    reduce: bool
    peer: int
    chunk: int
    done: bool = False


def inputs_of(kind: Kind, num_ranks: int, root: int, chunk: int, per_rank: int) -> list[int]:
    """Which ranks hold an input for a chunk; written down again here so that the proof is not its own judge."""
    if kind in (Kind.BROADCAST, Kind.SCATTER):
        return [root]
    if kind in (Kind.ALL_GATHER, Kind.GATHER):
        return [chunk // per_rank]
    if kind is Kind.ALL_TO_ALL:
        return [chunk // (per_rank * num_ranks)]
    return list(range(num_ranks))


def outputs_of(kind: Kind, num_ranks: int, root: int, chunk: int, per_rank: int) -> list[int]:
    """Which ranks need a chunk."""
    if kind in (Kind.REDUCE, Kind.GATHER):
        return [root]
    if kind in (Kind.REDUCE_SCATTER, Kind.SCATTER):
        return [chunk // per_rank]
    if kind is Kind.ALL_TO_ALL:
        return [chunk // per_rank % num_ranks]
    return list(range(num_ranks))


def execute(schedule: Schedule, seed: int) -> None:
    """Run the schedule once with random timing; raise WrongError unless every needed number is right."""
    rng = random.Random(seed)
    collective, ranks, chunks = schedule.collective, schedule.num_ranks, schedule.num_chunks
    kind, root = collective.kind, collective.root
    per_rank = chunks // (ranks * ranks if kind is Kind.ALL_TO_ALL else ranks)
    barrier = kind is Kind.BARRIER
    value: dict[tuple[int, int], int] = {}
    want: dict[int, int] = {}
    for chunk in range(chunks):
        holders = inputs_of(kind, ranks, root, chunk, per_rank)
        for rank in holders:
            value[rank, chunk] = 1 << rank if barrier else rng.getrandbits(60) + 1
        parts = [value[rank, chunk] for rank in holders]
        want[chunk] = (1 << ranks) - 1 if barrier else sum(parts)

    agenda: dict[tuple[int, int], list[_Event]] = defaultdict(list)  # (rank, chunk): its events in table order
    sends: dict[tuple[int, int], deque[_Event]] = defaultdict(deque)  # (source, destination): in table order
    arrivals: dict[tuple[int, int], deque[_Event]] = defaultdict(deque)
    for index, row in enumerate(schedule.transfers):
        for chunk in range(row.chunk, row.chunk + row.count):
            for to in row.destinations:
                read = _Event(index, row.step, False, row.reduce, to, chunk)
                write = _Event(index, row.step, True, row.reduce, row.source, chunk)
                agenda[row.source, chunk].append(read)
                agenda[to, chunk].append(write)
                sends[row.source, to].append(read)
                arrivals[row.source, to].append(write)

    wires: dict[tuple[int, int], deque[int]] = defaultdict(deque)

    def may(rank: int, event: _Event) -> bool:
        for other in agenda[rank, event.chunk]:
            if other.done or other is event:
                continue
            if other.write and (
                other.step < event.step or (event.write and other.step == event.step and other.index < event.index)
            ):
                return False
            if not other.write and event.write and other.step <= event.step:
                return False
        return True

    def enabled() -> list[tuple[str, tuple[int, int]]]:
        actions = [("send", pair) for pair, queue in sends.items() if queue and may(pair[0], queue[0])]
        actions += [
            ("apply", pair) for pair, queue in arrivals.items() if queue and wires[pair] and may(pair[1], queue[0])
        ]
        return actions

    while any(arrivals.values()):
        actions = enabled()
        if not actions:
            raise WrongError("deadlock")
        action, pair = rng.choice(actions)
        if action == "send":
            event = sends[pair].popleft()
            if (pair[0], event.chunk) not in value:
                raise WrongError(f"rank {pair[0]} sends chunk {event.chunk} before it has it")
            wires[pair].append(value[pair[0], event.chunk])
        else:
            event = arrivals[pair].popleft()
            payload, place = wires[pair].popleft(), (pair[1], event.chunk)
            if event.reduce:
                if place not in value:
                    raise WrongError(f"rank {pair[1]} has nothing of chunk {event.chunk} to add to")
                value[place] = value[place] | payload if barrier else value[place] + payload
            else:
                value[place] = payload
        event.done = True

    for chunk in range(chunks):
        for rank in outputs_of(kind, ranks, root, chunk, per_rank):
            if value.get((rank, chunk)) != want[chunk]:
                raise WrongError(f"rank {rank} ends with a wrong chunk {chunk}")
