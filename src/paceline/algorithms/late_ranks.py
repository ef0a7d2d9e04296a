"""Several late ranks: absorb them in the order of arrival, then finish.

Time is counted in rounds: a rank sends at most one chunk and receives at most one chunk a round. Until a chunk is
complete, some ranks hold disjoint *parts* of it (partial sums); one of them is its *home*, where its parts are
merged.

**Absorb**, before the last arrival: everybody sends its parts to their homes. Among ranks that came at the same
time this is a reduce-scatter. A rank that comes later, but not last, adds a part to every chunk and takes over its
fair share of homes, the least merged ones first.

**Finish**, at the last arrival. If the last rank is the only one with parts outside the homes, and the homes are
spread evenly, that is the situation of :mod:`~paceline.algorithms.stragglar`, whose exchange is round-optimal.
Otherwise each round is filled greedily (:class:`_Finish`).

The lower bound for m ranks that come together, after all else is done, is (n + m - 1)/n of a buffer time. It is
Paceline's own result, as is the construction; `finish` has no proven bound on its rounds, but every schedule is
proven correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.algorithms import stragglar
from paceline.algorithms.registry import Draft, algorithm
from paceline.errors import UnsupportedError, UsageError
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfers

Message = tuple[int, int, int, bool]
"""Source, destination, chunk, and whether the destination adds it."""

Rounds = list[list[Message]]

_MOST_WORK, _MOST_CHUNKS = 1 << 16, 1 << 10
"""Ranks times chunks, and chunks, up to which the construction ends within a minute or so."""


def round_bound(parts: npt.NDArray[Any]) -> int:
    """Rounds that any schedule needs from here; parts[c, r]: does rank r hold a part of chunk c?"""
    ranks = int(parts.shape[1])
    holders = parts.sum(axis=1)
    messages = int((holders + ranks - 2).sum())
    unfinished = int(parts[holders > 1].sum(axis=0).max(initial=0))
    return max(-(-messages // ranks), unfinished - 1 + (ranks - 1).bit_length() if unfinished else 0)


class _Absorb:
    """The rounds before the last arrival."""

    def __init__(self, arrivals: Sequence[int], num_chunks: int) -> None:
        ranks = len(arrivals)
        self.last = max(range(ranks), key=lambda rank: (arrivals[rank], rank))
        self.num_chunks = num_chunks
        self.rounds: Rounds = []
        order = sorted(range(ranks), key=lambda rank: (arrivals[rank], rank))
        self.present = [rank for rank in order if arrivals[rank] == arrivals[order[0]]]
        self.parts = np.zeros((num_chunks, ranks), np.bool_)
        self.parts[:, self.present] = True
        self.home = np.array(self.present)[np.arange(num_chunks) % len(self.present)]
        to_come = order[len(self.present) :]
        for now in range(arrivals[order[0]], arrivals[self.last]):
            while to_come and arrivals[to_come[0]] <= now:
                self._welcome(to_come.pop(0))
            messages = self._merge_round()
            if messages:
                self.rounds.append(messages)
            elif not to_come or arrivals[to_come[0]] == arrivals[self.last]:
                break
        for rank in to_come:  # all of them come in the last round
            self._welcome(rank)

    def _welcome(self, rank: int) -> None:
        self.present.append(rank)
        self.parts[:, rank] = True
        if rank == self.last:
            return
        count = np.bincount(self.home, minlength=self.parts.shape[1])
        num_parts = self.parts.sum(axis=1)
        for _ in range(self.num_chunks // len(self.present)):
            richest = max(self.present, key=lambda other: (count[other], -other))
            candidates = np.flatnonzero(self.home == richest)
            chunk = candidates[np.lexsort((candidates, num_parts[candidates]))[-1]]
            self.home[chunk] = rank
            count[richest] -= 1
            count[rank] += 1

    def _merge_round(self) -> list[Message]:
        """Each rank, those with most to send first, sends the next of its parts whose home is free to receive."""
        place = np.full(self.parts.shape[1], -1)
        place[self.present] = np.arange(len(self.present))
        batch = np.arange(self.num_chunks) // len(self.present)
        todo = {rank: np.flatnonzero(self.parts[:, rank] & (self.home != rank)) for rank in self.present}
        receiving = np.zeros(self.parts.shape[1], np.bool_)
        messages: list[Message] = []
        for rank in sorted(self.present, key=lambda rank: (-len(todo[rank]), rank)):
            chunks = todo[rank][~receiving[self.home[todo[rank]]]]
            if len(chunks):
                distance = (place[self.home[chunks]] - place[rank]) % len(self.present)
                chunk = int(chunks[np.argmin(batch[chunks] * len(self.present) + distance)])
                messages.append((rank, int(self.home[chunk]), chunk, True))
                receiving[self.home[chunk]] = True
        for source, _, chunk, _ in messages:
            self.parts[chunk, source] = False
        return messages


def _balanced_homes(parts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A home for each chunk among its holders, so that no rank has many more merges to receive than another."""
    num_chunks, ranks = parts.shape
    weight = np.maximum(0, parts.sum(axis=1) - 2)
    load, count, home = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64), np.zeros(num_chunks, np.int64)
    holders = [np.flatnonzero(row) for row in parts]
    scale = int(num_chunks + 1)
    for chunk in np.lexsort((np.arange(num_chunks), -parts.sum(axis=1))):
        rank = int(holders[chunk][np.argmin(load[holders[chunk]] * scale + count[holders[chunk]])])
        home[chunk] = rank
        load[rank] += weight[chunk]
        count[rank] += 1
    for _ in range(4 * num_chunks):  # greedy may leave the late ranks short: move homes while that lowers the maximum
        burden = load * scale + count
        fullest = int(np.argmax(burden))
        best: tuple[int, int, int] | None = None
        for chunk in np.flatnonzero(home == fullest):
            others = holders[chunk]
            after = burden[others] + weight[chunk] * scale + 1
            good = others[after < burden[fullest]]
            if len(good):
                rank = int(good[np.argmin(burden[good])])
                if best is None or (int(burden[rank]), rank, int(chunk)) < best:
                    best = (int(burden[rank]), rank, int(chunk))
        if best is None:
            break
        _, rank, chunk = best
        home[chunk] = rank
        load[[fullest, rank]] += np.array([-1, 1]) * weight[chunk]
        count[[fullest, rank]] += np.array([-1, 1])
    return home


class _Finish:
    """All-reduce from any state of parts. In each round the ports are taken in this order:

    1. first copies: a rank that still has parts to send, but alone holds a complete chunk, sends that to an idle
    rank; 2. in the first ``tree_rounds`` rounds, parts of a chunk merge pairwise, as in a tree; 3. parts go to
    their homes, chunks of the first batch first, the nearly complete ones before the others; 4. complete chunks
    spread, the rarest first, along a maximum matching of senders and receivers.
    """

    def __init__(self, parts: npt.NDArray[Any], *, tree_rounds: int, first_copies: bool) -> None:
        self.parts = parts.copy()
        self.num_chunks, self.ranks = parts.shape
        self.tree_rounds, self.first_copies = tree_rounds, first_copies
        self.home = _balanced_homes(parts)
        self.merges_left = parts.sum(axis=1) - 1
        self.merges_in_all = self.merges_left.copy()
        self.complete = np.zeros((self.ranks, self.num_chunks), np.bool_)
        done = np.flatnonzero(self.merges_left == 0)
        self.complete[self.home[done], done] = True
        self.position = self._positions()
        is_home = np.zeros_like(parts)
        is_home[np.arange(self.num_chunks), self.home] = True
        self.pending = (parts & ~is_home).T.copy()  # [rank, chunk]: parts a rank still has to send
        self.rounds: Rounds = []
        while not self.complete.all():
            self._round()

    def _positions(self) -> npt.NDArray[Any]:
        """Where each chunk stands in the order: batches with one chunk of every home, homes of late ranks last."""
        raw = self.parts[self.merges_left > 0].sum(axis=0)
        late = raw > raw.max(initial=0) // 2
        of_home = np.lexsort((np.arange(self.ranks), late))
        home_rank = np.empty(self.ranks, np.int64)
        home_rank[of_home] = np.arange(self.ranks)
        batch = np.zeros(self.num_chunks, np.int64)
        seen = np.zeros(self.ranks, np.int64)
        for chunk, home in enumerate(self.home):
            batch[chunk] = seen[home]
            seen[home] += 1
        order = np.lexsort((np.arange(self.num_chunks), home_rank[self.home], batch))
        position = np.empty(self.num_chunks, np.int64)
        position[order] = np.arange(self.num_chunks)
        return position

    def _round(self) -> None:
        self.can_send, self.can_receive = np.ones(self.ranks, np.bool_), np.ones(self.ranks, np.bool_)
        self.messages: list[Message] = []
        self.copies = self.complete.sum(axis=0)
        self.busy = self.pending.any(axis=1)
        if self.first_copies:
            self._send_first_copies()
        merged_by_tree = self._merge_as_trees() if len(self.rounds) < self.tree_rounds else set()
        self._merge_into_homes(merged_by_tree)
        self._spread()
        for _, target, chunk, reduce in self.messages:
            if not reduce:
                self.complete[target, chunk] = True
            else:
                self.merges_left[chunk] -= 1
                if self.merges_left[chunk] == 0:
                    self.complete[self.home[chunk], chunk] = True
        self.rounds.append(self.messages)

    def _send(self, source: int, target: int, chunk: int, *, reduce: bool) -> None:
        self.can_send[source] = self.can_receive[target] = False
        self.messages.append((source, target, chunk, reduce))
        if reduce:
            self.pending[source, chunk] = self.parts[chunk, source] = False

    def _send_first_copies(self) -> None:
        collecting = np.zeros(self.ranks, np.bool_)
        half_merged = (self.merges_left > 0) & (self.merges_left < self.merges_in_all)
        collecting[self.home[half_merged]] = True
        for source in np.flatnonzero(self.busy).tolist():
            only_here = np.flatnonzero((self.copies == 1) & self.complete[source])
            free = [rank for rank in np.flatnonzero(self.can_receive).tolist() if rank != source]
            if len(only_here) and free:
                target = min(free, key=lambda r: (self.busy[r], collecting[r], (r - source) % self.ranks))
                self._send(source, target, int(only_here[np.argmin(self.position[only_here])]), reduce=False)

    def _merge_as_trees(self) -> set[int]:
        touched: set[int] = set()
        for chunk in np.argsort(self.position).tolist():
            if self.merges_left[chunk] == 0:
                continue
            home, num_pending = int(self.home[chunk]), self.pending.sum(axis=1)
            holders = sorted(np.flatnonzero(self.parts[chunk]).tolist(), key=lambda r: (r != home, num_pending[r], r))
            used: set[int] = set()
            for target in holders:
                if target in used or not self.can_receive[target]:
                    continue
                for source in reversed(holders):
                    if source not in (target, home) and source not in used and self.can_send[source]:
                        used |= {source, target}
                        touched.add(chunk)
                        self._send(source, target, chunk, reduce=True)
                        break
        return touched

    def _merge_into_homes(self, not_these: set[int]) -> None:
        allowed = np.ones(self.num_chunks, np.bool_)
        allowed[list(not_these)] = False
        num_pending = self.pending.sum(axis=1)
        key = (self.position // self.ranks * self.ranks + self.merges_left) * self.num_chunks + self.position
        for source in np.lexsort((np.arange(self.ranks), -num_pending)).tolist():
            if self.can_send[source] and num_pending[source]:
                chunks = np.flatnonzero(self.pending[source] & allowed & self.can_receive[self.home])
                if len(chunks):
                    chunk = int(chunks[np.argmin(key[chunks])])
                    self._send(source, int(self.home[chunk]), chunk, reduce=True)

    def _spread(self) -> None:
        senders, receivers = np.flatnonzero(self.can_send), np.flatnonzero(self.can_receive)
        live = np.flatnonzero((self.copies > 0) & (self.copies < self.ranks))
        if not (len(senders) and len(receivers) and len(live)):
            return
        live = live[np.lexsort((self.position[live], self.copies[live]))]
        useful = self.complete[np.ix_(senders, live)][:, None, :] & ~self.complete[np.ix_(receivers, live)][None, :, :]
        possible = np.asarray(useful.any(axis=2))
        rarest = self.copies[live[useful.argmax(axis=2)]]
        missing = (~self.complete[receivers]).sum(axis=1)
        rows, columns = np.nonzero(possible)
        order = np.lexsort(
            (
                columns,
                rows,
                (senders[rows] + receivers[columns]) % self.ranks,
                -missing[columns],
                rarest[rows, columns],
            )
        )
        matching = _maximum_matching(possible, rows[order].tolist(), columns[order].tolist())
        on_the_way = np.zeros(self.num_chunks, np.int64)
        for row, column in sorted(matching.items()):
            chunks = live[np.flatnonzero(useful[row, column])[:24]]
            chunk = int(chunks[np.argmin(self.copies[chunks] + on_the_way[chunks])])
            on_the_way[chunk] += 1
            self._send(int(senders[row]), int(receivers[column]), chunk, reduce=False)


def _maximum_matching(possible: npt.NDArray[Any], rows: list[int], columns: list[int]) -> dict[int, int]:
    """Greedy in the given order of edges, then enlarged along augmenting paths (Kuhn) until it is maximum."""
    mate_of_row: dict[int, int] = {}
    mate_of_column: dict[int, int] = {}
    most = min(possible.shape)
    for row, column in zip(rows, columns, strict=True):
        if row not in mate_of_row and column not in mate_of_column:
            mate_of_row[row], mate_of_column[column] = column, row
            if len(mate_of_row) == most:
                return mate_of_row
    choices: dict[int, list[int]] = {}
    for row, column in zip(rows, columns, strict=True):
        choices.setdefault(row, []).append(column)

    def augment(start: int) -> None:
        came_from: dict[int, int] = {}
        queue = [start]
        for row in queue:
            for column in choices.get(row, ()):
                if column in came_from:
                    continue
                came_from[column] = row
                if column not in mate_of_column:
                    while True:  # walk back, flipping the edges of the path
                        row = came_from[column]
                        mate_of_column[column], previous = row, mate_of_row.get(row)
                        mate_of_row[row] = column
                        if previous is None:
                            return
                        column = previous
                queue.append(mate_of_column[column])

    for row in range(len(possible)):
        if row not in mate_of_row:
            augment(row)
    return mate_of_row


def _exact_exchange(parts: npt.NDArray[Any], last: int) -> Transfers | None:
    """StragglAR's exchange, if the last rank alone has parts outside the homes and the homes are spread evenly."""
    num_chunks, ranks = parts.shape
    others = [rank for rank in range(ranks) if rank != last]
    if ranks < 3 or num_chunks % (ranks - 1) or not (parts.sum(axis=1) == 2).all() or not parts[:, last].all():
        return None
    pieces = num_chunks // (ranks - 1)
    if not (parts[:, others].sum(axis=0) == pieces).all():
        return None
    label = [*others, last]
    owned = {rank: np.flatnonzero(parts[:, rank]).tolist() for rank in others}
    chunk_of = [owned[label[owner]].pop(0) for owner in stragglar.owners(ranks, pieces).tolist()]
    return stragglar.exchange(ranks, pieces).relabelled(ranks=label, chunks=chunk_of)


def finish(parts: npt.NDArray[Any]) -> Transfers:
    """The shortest of four greedy variants."""
    depth = (int(parts.sum(axis=1).max()) - 1).bit_length() + 1
    variants = [
        _Finish(parts, tree_rounds=tree_rounds, first_copies=first_copies).rounds
        for first_copies in (True, False)
        for tree_rounds in (0, depth)
    ]
    return _as_transfers(min(variants, key=len))


def _as_transfers(rounds: Rounds) -> Transfers:
    rows = [(step, *message) for step, messages in enumerate(rounds) for message in messages]
    if not rows:
        return Transfers.none()
    step, source, target, chunk, reduce = zip(*rows, strict=True)
    return Transfers(step=step, source=source, destination=target, chunk=chunk, reduce=reduce)


def _for_chunks(arrivals: Sequence[int], num_chunks: int) -> tuple[Transfers, Transfers]:
    """What happens before the last arrival, and after."""
    absorb = _Absorb(arrivals, num_chunks)
    after = _exact_exchange(absorb.parts, absorb.last)
    return _as_transfers(absorb.rounds), finish(absorb.parts) if after is None else after


def _without_idle_time(arrivals: Sequence[int], longest_gap: int) -> list[int]:
    """The same order of arrivals, with waits cut down to what there can be to do in them."""
    moments = sorted(set(arrivals))
    shortened = {moments[0]: 0}
    for before, moment in pairwise(moments):
        shortened[moment] = shortened[before] + min(moment - before, longest_gap)
    return [shortened[arrival] for arrival in arrivals]


@algorithm(Kind.ALL_REDUCE, min_ranks=2, max_ranks=256)
def late_ranks(collective: Collective, *, arrivals: Sequence[int] | None = None, pieces: int = 1) -> Draft:
    """Absorb late ranks in the order of their arrival, then finish with the last.

    Any n from 2 to 256, any pattern of ``arrivals`` (for each rank, the round from which it takes part; default: all
    at once); n ``pieces`` or (n - 1) ``pieces`` chunks, whichever ends sooner. Steps: after the last arrival as many
    as StragglAR, K - 1 + ceil(log2 n), when the arrivals are a buffer time apart; close to (n + m - 1)/n K when m ranks
    come together. Bytes: the least possible, 2(n - 1) messages a chunk. Lateness: what can be done without the late
    ranks is done before they come; a wrong guess of the arrivals costs time, never correctness.

    Source: Paceline's own; online arrival estimation: Proficz, "Improving all-reduce collective operations for
    imbalanced process arrival patterns", 2018.
    """
    ranks = collective.num_ranks
    when = [0] * ranks if arrivals is None else list(arrivals)
    if ranks * ranks * pieces > _MOST_WORK or ranks * pieces > _MOST_CHUNKS:
        raise UnsupportedError(
            f"late_ranks builds its schedule greedily, which takes too long for {ranks} ranks and {pieces} pieces "
            f"(ranks^2 pieces may be {_MOST_WORK}, and ranks times pieces {_MOST_CHUNKS})"
        )
    if len(when) != ranks or min(when) < 0:
        raise UsageError(f"arrivals needs one round, zero or more, for each of the {ranks} ranks, not {arrivals!r}")
    when = _without_idle_time(when, longest_gap=4 * pieces * ranks)
    sizes = [pieces * ranks]
    if when.count(max(when)) == 1 and ranks >= 3:
        sizes.append(pieces * (ranks - 1))
    candidates = [(num_chunks, *_for_chunks(when, num_chunks)) for num_chunks in sizes]
    num_chunks, before, after = min(candidates, key=lambda c: c[2].num_steps / c[0])
    return num_chunks, Transfers.sequence([before, after])
