"""The part of a proven schedule that one rank plays, as whole messages in the order in which it posts them.

For executors on top of somebody else's point-to-point messages (``torch_p2p``). What must have happened before a
message may be sent, or received where it belongs, is worked out here, once for a schedule; running it is then a loop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from paceline.ir.schedule import Schedule
from paceline.ir.verify import Proof


@dataclass(frozen=True)
class Run:
    """Neighbouring chunks [first, last) that are copied or reduced together."""

    first: int
    last: int
    reduce: bool


@dataclass(frozen=True)
class Message:
    """What travels at once between this rank and a peer.

    ``writes_before`` are the receives (by their place in the program) that must be in memory before: for a send, what
    it reads; for a receive, what it overwrites or adds to. ``reads_before`` are the sends that must be done before a
    receive changes what they read. ``direct`` says that it can be received where it belongs, without scratch.
    """

    step: int
    peer: int
    receives: bool
    runs: tuple[Run, ...]
    writes_before: tuple[int, ...]
    reads_before: tuple[int, ...] = ()
    direct: bool = False


@dataclass(frozen=True)
class MessageProgram:
    """All messages of one rank: by step, sends before receives, then in the order of the table.

    The peer of a message has it in the same place among its messages with us, so that messages need no names.
    """

    rank: int
    num_ranks: int
    num_chunks: int
    algorithm: str
    digest: str
    messages: tuple[Message, ...]

    def among(self, members: Sequence[int]) -> MessageProgram:
        """The same for some of a group's ranks: ``members[i]`` plays the part of rank i."""
        messages = tuple(replace(message, peer=members[message.peer]) for message in self.messages)
        return replace(self, rank=members[self.rank], messages=messages)

    @cached_property
    def steps(self) -> list[tuple[list[int], list[int]]]:
        """The sends and the receives of each step in which this rank takes part."""
        found = []
        for _, group in groupby(range(len(self.messages)), key=lambda index: self.messages[index].step):
            indices = list(group)
            sends = [index for index in indices if not self.messages[index].receives]
            found.append((sends, indices[len(sends) :]))
        return found


def message_program(proof: Proof, rank: int) -> MessageProgram:
    """The messages of one rank. Only proofs are taken, so nothing unproven reaches a wire."""
    schedule = proof.schedule
    messages: list[Message] = []
    written: dict[int, int] = {}  # chunk: the receive that wrote it last
    read: dict[int, list[int]] = defaultdict(list)  # chunk: the sends that read it since
    for step, peer, receives, runs in _traffic(schedule, rank):
        chunks = [chunk for run in runs for chunk in range(run.first, run.last)]
        writes = tuple(sorted({written[chunk] for chunk in chunks if chunk in written}))
        if not receives:
            for chunk in chunks:
                read[chunk].append(len(messages))
            messages.append(Message(step, peer, False, runs, writes))
            continue
        reads = tuple(sorted({index for chunk in chunks for index in read[chunk]}))
        # What this step reads or writes too is set aside: so no message of a step waits for another of that step.
        busy = any(messages[index].step == step for index in (*reads, *writes))
        direct = len(runs) == 1 and not runs[0].reduce and not busy
        for chunk in chunks:
            written[chunk] = len(messages)
            read[chunk] = []
        messages.append(Message(step, peer, True, runs, writes, reads, direct))
    return MessageProgram(
        rank, schedule.num_ranks, schedule.num_chunks, schedule.algorithm, schedule.digest, tuple(messages)
    )


def _traffic(schedule: Schedule, rank: int) -> list[tuple[int, int, bool, tuple[Run, ...]]]:
    """Step, peer, direction and chunks of each message of the rank, in the order of the program."""
    table = schedule.transfers
    number = np.cumsum(table.opens_message())
    transfer = np.repeat(np.arange(len(table)), table.fanout)
    mine = np.flatnonzero((table.source[transfer] == rank) | (table.destination == rank))
    found: dict[tuple[int, bool, int, int], list[Run]] = {}
    for at in mine.tolist():
        row = int(transfer[at])
        receives = bool(table.destination[at] == rank)
        peer = int(table.source[row] if receives else table.destination[at])
        runs = found.setdefault((int(table.step[row]), receives, int(number[row]), peer), [])
        first, reduce = int(table.chunk[row]), bool(table.reduce[row])
        last = first + int(table.count[row])
        if runs and runs[-1].last == first and runs[-1].reduce == reduce:
            runs[-1] = Run(runs[-1].first, last, reduce)
        else:
            runs.append(Run(first, last, reduce))
    ordered = sorted(found.items(), key=lambda item: item[0][:3])
    return [(step, peer, receives, tuple(runs)) for (step, receives, _, peer), runs in ordered]
