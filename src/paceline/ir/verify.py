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
missing             a rank ends without some contribution to a chunk it needs, which it never had
overwritten         the same, because a copy destroyed it: there, or everywhere
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
of chunks, and slices of a tick, bound the memory, also for hostile files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.ir import blame
from paceline.ir.collective import IntArray
from paceline.ir.places import IndexArray, Places
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Moves

if TYPE_CHECKING:
    from collections.abc import Sequence

Masks = npt.NDArray[np.uint64]

_EXACT, _DOUBLE = 1, 2  # status of a place; 0: nothing is there
_BLOCK_BYTES = 384 << 20
_SLICE_BYTES = 32 << 20


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
    moves = np.cumsum(edges[:-1])
    num_bytes = np.minimum(2 * moves + 1, ranks) * (8 * _num_words(schedule) + 32) + moves * 64
    bytes_before = np.concatenate(([0], np.cumsum(num_bytes)))
    begin = 0
    while begin < schedule.num_chunks:
        fits = int(np.searchsorted(bytes_before, bytes_before[begin] + _BLOCK_BYTES, side="right")) - 1
        end = max(fits, begin + 1)
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
    row = (moves.chunk - begin).astype(np.int64) * ranks
    needer = collective.needer(chunks, schedule.num_chunks)
    contributor = collective.contributor(chunks, schedule.num_chunks)
    single_needs = None if needer is None else np.arange(len(chunks)) * ranks + needer
    places = Places.of(row + moves.source, row + moves.destination, len(chunks) * ranks, single_needs)
    needed, held = _are(needer, places.key, ranks), _are(contributor, places.key, ranks)
    _check_all_reached(schedule, begin, end, places, needed, held if contributor is not None else held & (ranks == 1))

    masks, complete = _initial(held, contributor, places.key % ranks, ranks, _num_words(schedule))
    state = _State(masks, held.astype(np.uint8) * _EXACT, idempotent=collective.idempotent)
    order, ticks = _by_tick(moves)
    source, target, reduce = places.read[order], places.written[order], moves.reduce[order]
    newest_read = np.full(len(masks), -1, np.int32)
    staged = []
    for tick, (first, last) in enumerate(pairwise(ticks.tolist())):
        src, dst, red = source[first:last], target[first:last], reduce[first:last]
        present = state.status[src]
        if not present.all():
            raise blame.move(schedule, moves, order[first + int(np.argmin(present))], "sent-too-early")
        newest_read[src] = tick
        read_too = newest_read[dst] == tick
        if read_too.any():
            staged.append(order[first:last][read_too])
        bad = state.tick(src, dst, red)
        if bad is not None:
            raise blame.move(schedule, moves, order[first + bad], "nothing-to-add-to")

    good = state.status == _EXACT
    for word in range(masks.shape[1]):
        good &= masks[:, word] == complete[word]
    wrong = needed & ~good
    if wrong.any():
        key = int(places.key[np.argmax(wrong)])
        raise blame.result(schedule, key % ranks, begin + key // ranks)
    held_back = np.concatenate(staged) if staged else np.zeros(0, np.int64)
    return moves.step[held_back].astype(np.int64) * ranks + moves.destination[held_back]


def _are(rank: IntArray | None, key: IndexArray, ranks: int) -> npt.NDArray[np.bool_]:
    """Which places a column of the collective's table names: one rank a chunk, or every rank."""
    if rank is None:
        return np.ones(len(key), np.bool_)
    named: npt.NDArray[np.bool_] = rank[key // ranks] == key % ranks
    return named


def _check_all_reached(
    schedule: Schedule,
    begin: int,
    end: int,
    places: Places,
    needed: npt.NDArray[np.bool_],
    complete_at_start: npt.NDArray[np.bool_],
) -> None:
    """Raise unless every place that needs something is written. Comes first, before anything large is allocated."""
    ranks = schedule.num_ranks
    written = np.zeros(len(places.key), np.bool_)
    written[places.written] = True
    never = places.key[needed & ~complete_at_start & ~written]
    everybody_needs = schedule.collective.needer(np.zeros(1, np.int32), schedule.num_chunks) is None
    if not len(never) and everybody_needs and len(places.key) < (end - begin) * ranks:
        # Some place is not even touched: find the first chunk that lacks one, and the first rank there.
        touched = np.bincount(places.key // ranks, minlength=end - begin)
        chunk = int(np.argmax(touched < ranks))
        there = np.zeros(ranks, np.bool_)
        there[places.key[places.key // ranks == chunk] % ranks] = True
        never = np.array([chunk * ranks + int(np.argmin(there))])
    if len(never):
        raise blame.never_received(schedule, int(never[0]) % ranks, begin + int(never[0]) // ranks)


class _State:
    """What every place holds: a set of contributors, and whether one was counted twice."""

    def __init__(self, masks: Masks, status: npt.NDArray[np.uint8], *, idempotent: bool) -> None:
        self.masks, self.status, self.idempotent = masks, status, idempotent
        self._newest_write = np.zeros(len(status), np.int32)
        self._most_payloads = max(1024, _SLICE_BYTES // (8 * masks.shape[1]))

    def tick(self, src: IndexArray, dst: IndexArray, reduce: npt.NDArray[np.bool_]) -> int | None:
        """Do the moves of one tick: all read, then all write. The index of a reduce into nothing, or None."""
        if len(src) <= self._most_payloads:
            return self._write(dst, reduce, self.masks[src], self.status[src])
        # Too many payloads to hold at once: set aside what is both read and written, and go slice by slice.
        is_written = np.zeros(len(self.status), np.bool_)
        is_written[dst] = True
        aside = np.unique(src[is_written[src]])
        masks_aside, status_aside = self.masks[aside], self.status[aside]
        where = np.full(len(self.status), -1, np.int64)
        where[aside] = np.arange(len(aside))
        for begin in range(0, len(src), self._most_payloads):
            part = slice(begin, begin + self._most_payloads)
            sent, sent_status, kept = self.masks[src[part]], self.status[src[part]], where[src[part]]
            sent[kept >= 0], sent_status[kept >= 0] = masks_aside[kept[kept >= 0]], status_aside[kept[kept >= 0]]
            bad = self._write(dst[part], reduce[part], sent, sent_status)
            if bad is not None:
                return begin + bad
        return None

    def _write(
        self, dst: IndexArray, reduce: npt.NDArray[np.bool_], sent: Masks, sent_status: npt.NDArray[np.uint8]
    ) -> int | None:
        """Write payloads in the order of the table."""
        index = np.arange(len(dst), dtype=np.int32)
        self._newest_write[dst] = index
        if (self._newest_write[dst] == index).all():
            return self._write_once(dst, reduce, sent, sent_status)
        order = np.argsort(dst, kind="stable")
        first = np.flatnonzero(np.concatenate(([True], np.diff(dst[order]) != 0)))
        if reduce.all():
            empty = self._add_up(dst[order[first]], first, sent[order], sent_status[order])
            return None if empty is None else int(order[first[empty]])
        occurrence = np.arange(len(dst)) - np.repeat(first, np.diff(np.append(first, len(dst))))
        by_round = order[np.argsort(occurrence, kind="stable")]
        for part in np.split(by_round, np.cumsum(np.bincount(occurrence))[:-1]):
            bad = self._write_once(dst[part], reduce[part], sent[part], sent_status[part])
            if bad is not None:
                return int(part[bad])
        return None

    def _write_once(
        self, dst: IndexArray, reduce: npt.NDArray[np.bool_], sent: Masks, sent_status: npt.NDArray[np.uint8]
    ) -> int | None:
        """Write payloads to places that are all different."""
        adds = None
        if not reduce.all():
            copies, adds = np.flatnonzero(~reduce), np.flatnonzero(reduce)
            self.masks[dst[copies]], self.status[dst[copies]] = sent[copies], sent_status[copies]
            dst, sent, sent_status = dst[adds], sent[adds], sent_status[adds]
        present, present_status = self.masks[dst], self.status[dst]
        if not present_status.all():
            empty = int(np.argmin(present_status))
            return empty if adds is None else int(adds[empty])
        if not self.idempotent:
            twice = (present & sent).any(axis=1)
            worst = np.maximum(present_status, sent_status)
            self.status[dst] = np.maximum(worst, np.where(twice, _DOUBLE, _EXACT))
        np.bitwise_or(present, sent, out=present)
        self.masks[dst] = present
        return None

    def _add_up(
        self, place: IndexArray, first: npt.NDArray[np.int64], sent: Masks, sent_status: npt.NDArray[np.uint8]
    ) -> int | None:
        """Add many payloads to each place: those from ``first[i]`` on to place i."""
        present, present_status = self.masks[place], self.status[place]
        if not present_status.all():
            return int(np.argmin(present_status))
        together = np.bitwise_or.reduceat(sent, first, axis=0) | present
        if not self.idempotent:
            bits = np.add.reduceat(np.bitwise_count(sent).sum(axis=1, dtype=np.int64), first)
            bits += np.bitwise_count(present).sum(axis=1, dtype=np.int64)
            twice = bits > np.bitwise_count(together).sum(axis=1, dtype=np.int64)
            worst = np.maximum(np.maximum.reduceat(sent_status, first), present_status)
            self.status[place] = np.maximum(worst, np.where(twice, _DOUBLE, _EXACT))
        self.masks[place] = together
        return None


def _initial(
    held: npt.NDArray[np.bool_], contributor: IntArray | None, rank: IndexArray, ranks: int, num_words: int
) -> tuple[Masks, Masks]:
    """Contributor sets at the start, and the set that a needer must end with."""
    masks = np.zeros((len(held), num_words), np.uint64)
    if contributor is not None:
        masks[held, 0] = 1
        return masks, np.ones(1, np.uint64)
    masks[np.arange(len(rank)), rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
    everybody = np.arange(ranks, dtype=np.uint64)
    complete = np.zeros(num_words, np.uint64)
    np.bitwise_or.at(complete, (everybody // np.uint64(64)).astype(np.int64), np.uint64(1) << everybody % np.uint64(64))
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
