"""Proof that a schedule implements its collective, with no knowledge of the algorithm that made it.

The proof is an exact symbolic execution. The value at a *place* (a chunk of a rank) is the set of ranks whose
contributions it holds, plus a mark if one of them was counted twice; a copy replaces the set, a reduce unites
it. A schedule is accepted if and only if each of these rules holds:

==================  =====================================================================================
rule                broken when
==================  =====================================================================================
sent-too-early      the source of a transfer holds nothing of the chunk yet
nothing-to-add-to   a reduce arrives where there is nothing of the chunk
never-received      a rank that needs a chunk and has not all of it is sent none
missing             a rank ends without some contribution to a chunk it needs, never having been sent it
overwritten         the same, because a copy destroyed a contribution that was still needed
counted-twice       a rank ends with a contribution counted more than once
==================  =====================================================================================

**Why no timing can break a proven schedule.** At run time each pair of ranks delivers in order, and each rank
orders the reads and writes of a place by step (a step reads before it writes), then by the table. So every
run computes what the execution in table order computes. Nor can one deadlock: what a transfer waits for (the
writes its source reads, the reads and writes before its own write, the earlier transfers of its pair) comes
before it in the table, or is a read of the same step, which needs nothing but the transfer's payload to be
set aside. So the first unfinished transfer of the table can always proceed. ``Proof.staged_chunks`` says how
many chunks a rank must be able to set aside for that (zero for most algorithms).

**Why it is fast.** Chunks never mix. Each chunk therefore gets a clock of its own, which ticks only when
something happens to that chunk, and all chunks are executed side by side, one tick of numpy at a time. Blocks
of chunks bound the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.ir import blame
from paceline.ir.collective import IntArray
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Moves

if TYPE_CHECKING:
    from collections.abc import Sequence

Masks = npt.NDArray[np.uint64]

_EMPTY, _EXACT, _DOUBLE = 0, 1, 2
_BLOCK_STATE_BYTES = 192 << 20
_BLOCK_MOVES = 4 << 20


@dataclass(frozen=True, eq=False)
class Proof:
    """A schedule that has been proven, and what the proof saw. Only :func:`verify` makes one.

    Traffic is in chunks; :meth:`host_traffic` adds it up by host. A multicast is one send and one receive at
    each destination.
    """

    schedule: Schedule
    num_messages: int
    chunks_sent: npt.NDArray[np.int64] = field(repr=False)
    chunks_received: npt.NDArray[np.int64] = field(repr=False)
    most_sends_at_once: int
    most_receives_at_once: int
    staged_chunks: int

    def host_traffic(self, host_of: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Chunks that leave and enter each host's port when rank r is on host host_of[r].

        A multicast crosses a port once, however many ranks behind it want it.
        """
        table, hosts = self.schedule.transfers, np.asarray(host_of)
        row = np.repeat(np.arange(len(table)), table.fanout)
        source, target = hosts[table.source[row]], hosts[table.destination]
        num_hosts = int(hosts.max()) + 1
        crosses = source != target
        leaving = np.unique(row[crosses])
        entering = np.unique(row[crosses].astype(np.int64) * num_hosts + target[crosses])
        sent = _count(hosts[table.source[leaving]], num_hosts, table.count[leaving])
        received = _count(entering % num_hosts, num_hosts, table.count[entering // num_hosts])
        return sent, received


def verify(schedule: Schedule) -> Proof:
    """Prove the schedule, or raise :class:`ProofError` naming the transfer, the ranks, the chunk and the rule."""
    staged = [_prove_block(schedule, begin, end) for begin, end in _blocks(schedule)]
    return _summary(schedule, np.concatenate(staged))


def _blocks(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Cut the chunks into blocks [from, to) that fit the memory budget."""
    table, ranks = schedule.transfers, schedule.num_ranks
    edges = np.zeros(schedule.num_chunks + 1, np.int64)
    np.add.at(edges, table.chunk, table.fanout)
    np.add.at(edges, table.chunk + table.count, -table.fanout)
    moves_before = np.concatenate(([0], np.cumsum(np.cumsum(edges[:-1]))))
    most_chunks = max(1, _BLOCK_STATE_BYTES // (ranks * (8 * _num_words(schedule) + 16)))
    begin = 0
    while begin < schedule.num_chunks:
        by_moves = int(np.searchsorted(moves_before, moves_before[begin] + _BLOCK_MOVES, side="right")) - 1
        end = min(max(by_moves, begin + 1), begin + most_chunks, schedule.num_chunks)
        yield begin, end
        begin = end


def _num_words(schedule: Schedule) -> int:
    """64-bit words for a set of contributors: one bit each, or one bit in all where there is one contributor."""
    one = schedule.collective.contributor(np.zeros(1, np.int32), schedule.num_chunks) is not None
    return 1 if one else -(-schedule.num_ranks // 64)


def _prove_block(schedule: Schedule, begin: int, end: int) -> npt.NDArray[np.int64]:
    """Execute all transfers of chunks [begin, end), then check the postcondition. Place = chunk * n + rank.

    Returns step * n + rank of each chunk that arrives in a step in which its receiver also sends it on.
    """
    collective, ranks = schedule.collective, schedule.num_ranks
    chunks = np.arange(begin, end, dtype=np.int32)
    moves = schedule.transfers.moves(begin, end)
    source = (moves.chunk - begin).astype(np.int64) * ranks + moves.source
    target = (moves.chunk - begin).astype(np.int64) * ranks + moves.destination

    needer = collective.needer(chunks, schedule.num_chunks)
    contributor = collective.contributor(chunks, schedule.num_chunks)
    needed = _places(needer, len(chunks), ranks)
    held = _places(contributor, len(chunks), ranks)
    complete_at_start = held if contributor is not None else (held & (ranks == 1))
    written = np.zeros(len(chunks) * ranks, np.bool_)
    written[target] = True
    never = needed & ~complete_at_start & ~written
    if never.any():
        place = int(np.argmax(never))
        raise blame.never_received(schedule, place % ranks, begin + place // ranks)

    masks, complete = _initial(held, contributor, ranks, _num_words(schedule))
    status = held.astype(np.uint8) * _EXACT
    order, ticks = _by_tick(moves)
    source, target, reduce = source[order], target[order], moves.reduce[order]
    newest_write, newest_read = np.zeros(len(status), np.int32), np.full(len(status), -1, np.int32)
    staged = []
    for tick, (first, last) in enumerate(zip(ticks[:-1].tolist(), ticks[1:].tolist(), strict=True)):
        src, dst, red = source[first:last], target[first:last], reduce[first:last]
        sent, sent_status = masks[src], status[src]
        if not sent_status.all():
            raise blame.move(schedule, moves, order[first + int(np.argmin(sent_status))], "sent-too-early")
        newest_read[src] = tick
        read_too = newest_read[dst] == tick
        if read_too.any():
            staged.append(order[first:last][read_too])
        index = np.arange(last - first, dtype=np.int32)
        newest_write[dst] = index
        rounds = [slice(None)] if (newest_write[dst] == index).all() else _one_write_each(dst)
        for part in rounds:
            bad = _apply(masks, status, dst[part], red[part], sent[part], sent_status[part], collective.idempotent)
            if bad is not None:
                raise blame.move(schedule, moves, order[first + int(index[part][bad])], "nothing-to-add-to")

    good = status == _EXACT
    for word in range(masks.shape[1]):
        good &= masks[:, word] == complete[word]
    wrong = needed & ~good
    if wrong.any():
        place = int(np.argmax(wrong))
        raise blame.result(schedule, place % ranks, begin + place // ranks)
    held_back = np.concatenate(staged) if staged else np.zeros(0, np.int64)
    return moves.step[held_back].astype(np.int64) * ranks + moves.destination[held_back]


def _apply(
    masks: Masks,
    status: npt.NDArray[np.uint8],
    dst: npt.NDArray[np.int64],
    reduce: npt.NDArray[np.bool_],
    sent: Masks,
    sent_status: npt.NDArray[np.uint8],
    idempotent: bool,
) -> int | None:
    """Write payloads to distinct places; the index of a reduce that finds nothing to add to, or None."""
    if not reduce.any():
        masks[dst], status[dst] = sent, sent_status
        return None
    if not reduce.all():
        copies = np.flatnonzero(~reduce)
        masks[dst[copies]], status[dst[copies]] = sent[copies], sent_status[copies]
        adds = np.flatnonzero(reduce)
        dst, sent, sent_status = dst[adds], sent[adds], sent_status[adds]
    else:
        adds = None
    present, present_status = masks[dst], status[dst]
    if not present_status.all():
        empty = int(np.argmin(present_status))
        return empty if adds is None else int(adds[empty])
    if not idempotent:
        twice = (present & sent).any(axis=1)
        status[dst] = np.maximum(np.maximum(present_status, sent_status), np.where(twice, _DOUBLE, _EXACT))
    np.bitwise_or(present, sent, out=present)
    masks[dst] = present
    return None


def _places(rank: IntArray | None, num_chunks: int, ranks: int) -> npt.NDArray[np.bool_]:
    """Which places a column of the collective's table names: one rank a chunk, or every rank."""
    if rank is None:
        return np.ones(num_chunks * ranks, np.bool_)
    places = np.zeros(num_chunks * ranks, np.bool_)
    places[np.arange(num_chunks) * ranks + rank] = True
    return places


def _initial(
    held: npt.NDArray[np.bool_], contributor: IntArray | None, ranks: int, num_words: int
) -> tuple[Masks, Masks]:
    """Contributor sets at the start, and the set that a needer must end with."""
    masks = np.zeros((len(held), num_words), np.uint64)
    if contributor is not None:
        masks[held, 0] = 1
        return masks, np.ones(1, np.uint64)
    bit = np.uint64(1) << (np.arange(ranks, dtype=np.uint64) % np.uint64(64))
    by_rank = masks.reshape(-1, ranks, num_words)
    by_rank[:, np.arange(ranks), np.arange(ranks) // 64] = bit
    complete: Masks = np.bitwise_or.reduce(by_rank[0], axis=0)
    return masks, complete


def _by_tick(moves: Moves) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """An order of the moves in which each chunk's own clock never runs back, and where each tick begins."""
    by_chunk = np.argsort(moves.chunk, kind="stable")
    chunk, step = moves.chunk[by_chunk], moves.step[by_chunk]
    other_chunk = np.concatenate(([True], np.diff(chunk) != 0))[: len(chunk)]
    other_step = np.concatenate(([True], np.diff(step) != 0))[: len(step)]
    clock = np.cumsum(other_chunk | other_step)
    starts = np.flatnonzero(other_chunk)
    tick: npt.NDArray[np.int64] = clock - np.repeat(clock[starts], np.diff(np.concatenate((starts, [len(chunk)]))))
    by_tick = np.argsort(tick, kind="stable")
    counts = np.bincount(tick)
    return by_chunk[by_tick], np.concatenate(([0], np.cumsum(counts)))


def _one_write_each(dst: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Cut a tick's writes into rounds with at most one write a place, in the order of the table."""
    order = np.argsort(dst, kind="stable")
    ordered = dst[order]
    starts = np.flatnonzero(np.concatenate(([True], np.diff(ordered) != 0)))
    length = np.diff(np.concatenate((starts, [len(dst)])))
    occurrence = np.arange(len(dst)) - np.repeat(starts, length)
    by_round = order[np.argsort(occurrence, kind="stable")]
    return np.split(by_round, np.cumsum(np.bincount(occurrence))[:-1])


def _count(keys: npt.NDArray[np.integer], size: int, weights: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    return np.bincount(keys, weights=weights, minlength=size).astype(np.int64)


def _summary(schedule: Schedule, staged: npt.NDArray[np.int64]) -> Proof:
    table, ranks = schedule.transfers, schedule.num_ranks
    row = np.repeat(np.arange(len(table), dtype=np.int32), table.fanout)
    opens = table.opens_message()
    return Proof(
        schedule=schedule,
        num_messages=int(opens.sum()),
        chunks_sent=_count(table.source, ranks, table.count),
        chunks_received=_count(table.destination, ranks, table.count[row]),
        most_sends_at_once=_most_at_once(table.step[opens], table.source[opens], ranks),
        most_receives_at_once=_most_at_once(table.step[row][opens[row]], table.destination[opens[row]], ranks),
        staged_chunks=int(np.unique(staged, return_counts=True)[1].max()) if len(staged) else 0,
    )


def _most_at_once(step: IntArray, rank: IntArray, ranks: int) -> int:
    if not len(step):
        return 0
    keys = step.astype(np.int64) * ranks + rank
    span = (int(step[-1]) + 1) * ranks
    counts = np.bincount(keys) if span <= 8 * len(keys) + 1024 else np.unique(keys, return_counts=True)[1]
    return int(counts.max())
