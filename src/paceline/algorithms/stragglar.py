"""StragglAR: an all-reduce that works while one rank is late, round-optimal for any n >= 3.

While rank S is late, the other n - 1 ranks reduce-scatter among themselves. The buffer is cut into K = (n - 1) pieces
chunks; each early rank ends with the partial sums of the chunks it *owns*. S has to send its part of each of the K
chunks, alone or added to something, one a round. The chunk it comes to last leaves it in round K at the earliest;
two ranks know of it then, and that number at most doubles in a round: K - 1 + ceil(log2 n) rounds is the least
possible after the arrival. The exchange below needs just that many:

    in round r < K, S receives the partial of chunk r + 1 from its owner, adds it, and sends the complete chunk r to
    its *partner* (in round 0 it sends its own part of chunk 0 to that chunk's owner, which adds); all other ranks
    spread the chunks completed before.

The spreading is arranged by *classes*. A complete chunk is *open* until every rank has it. Think of n = 2^q: each
early rank is a node, and a node of class j has, in round r, all closed chunks and one open one, chunk r - j (if
that is negative, none yet). Class j has 2^(j-1) nodes, j = 1 .. q. S's partner in a round is of class q; it gets
chunk r and is of class 1 from then on. The rest of class q, the *old*, pair with all the *young* (classes below q):
the young one gets chunk r - q, which closes it, the old one gets the young one's chunk r - j, and both are of class
j + 1. A node that will soon be S's partner pairs with the oldest of the young, so that it is back in class q in
time (earliest deadline first).

For other n, q = floor(log2 n), and n - 2^q of the nodes are *pairs* of ranks: one of them holds the node's open chunk
and sends for the node; its twin receives for the node, and passes on the one chunk that the other lacks. A last round
makes the twins equal.

Source: the idea, and the case n = 2^q with pieces = 1: Devraj et al., "Accelerating AllReduce with a persistent
straggler", 2025 (arXiv 2505.23523; v2: "Efficient AllReduce with stragglers"). The construction for any n and pieces is
Paceline's own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.algorithms.registry import Draft, algorithm
from paceline.errors import UnsupportedError, UsageError
from paceline.ir.collective import Collective, IntArray, Kind
from paceline.ir.transfers import Transfers

_NEVER = 1 << 30
_MOST_CHUNKS = 1 << 16


def num_rounds(num_ranks: int, pieces: int) -> int:
    """Rounds of the exchange after the late rank's arrival: K - 1 + ceil(log2 n), which is the lower bound."""
    return pieces * (num_ranks - 1) - 1 + (num_ranks - 1).bit_length()


def owners(num_ranks: int, pieces: int) -> IntArray:
    """The early rank (0 .. n - 2) that must own each chunk when the exchange begins."""
    early, nodes = num_ranks - 1, (1 << (num_ranks.bit_length() - 1)) - 1
    pairs = early - nodes
    slot = np.full(early, -1, np.int32)
    for pair in range(pairs):  # the ranks of a pair take turns half a cycle apart
        slot[pair], slot[pair + early // 2] = 2 * pair, 2 * pair + 1
    slot[slot < 0] = np.arange(2 * pairs, early)
    return slot[(np.arange(pieces * early) - 1) % early]


def exchange(num_ranks: int, pieces: int) -> Transfers:
    """The rounds after the arrival of the last rank, n - 1, when :func:`owners` hold the partial sums of the rest."""
    return _Exchange(num_ranks, pieces).build()


class _Exchange:
    """State of the construction. A node x is one early rank or a pair of them: ``first[x]`` and ``second[x]``."""

    def __init__(self, num_ranks: int, pieces: int) -> None:
        early = num_ranks - 1
        self.late = early
        self.num_chunks = pieces * early
        self.num_classes = num_ranks.bit_length() - 1
        num_nodes = (1 << self.num_classes) - 1
        self.num_pairs = early - num_nodes
        node = np.arange(num_nodes)
        self.first = np.where(node < self.num_pairs, 2 * node, node + self.num_pairs)
        self.second = np.where(node < self.num_pairs, 2 * node + 1, node + self.num_pairs)
        self.node_of = np.empty(early, np.int64)
        self.node_of[self.first] = self.node_of[self.second] = node
        self.owner = owners(num_ranks, pieces)

        # In round r the late rank pulls from owner[r + 1] and feeds that rank's node (round 0: the owner of chunk 0).
        self.partner = self.node_of[np.roll(self.owner, -1)]
        self.partner[0] = self.node_of[self.owner[0]]
        self.next_turn = self._next_turns()

        # The first to be partners start in the oldest class, and so on.
        by_turn = np.argsort(self._first_turns(num_nodes), kind="stable")
        size = 1 << np.arange(self.num_classes)[::-1]
        self.classes: list[npt.NDArray[Any]] = [by_turn[:0], *np.split(by_turn, np.cumsum(size)[:-1])[::-1]]
        self.holder = self.first.copy()  # the rank of each node that holds its open chunk
        self.owed = np.full(early, -1, np.int64)  # the chunk each rank of a pair still has to pass to its twin
        self.columns: list[tuple[int, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]] = []

    def _next_turns(self) -> npt.NDArray[Any]:
        """For each round, when its partner is partner again."""
        following = np.full(self.num_chunks, _NEVER)
        seen: dict[int, int] = {}
        for turn in range(self.num_chunks - 1, -1, -1):
            following[turn] = seen.get(int(self.partner[turn]), _NEVER)
            seen[int(self.partner[turn])] = turn
        return following

    def _first_turns(self, num_nodes: int) -> npt.NDArray[Any]:
        turns = np.full(num_nodes, _NEVER)
        np.minimum.at(turns, self.partner, np.arange(self.num_chunks))
        return turns

    def build(self) -> Transfers:
        """All rounds."""
        self.deadline = self._first_turns(len(self.first))
        for turn in range(self.num_chunks + self.num_classes - 1):
            self._round(turn)
        if self.num_pairs:
            rank = np.flatnonzero(self.owed[: 2 * self.num_pairs] >= 0)
            self._emit(self.num_chunks + self.num_classes - 1, rank, rank ^ 1, self.owed[rank])
        steps, sources, targets, chunks, reduces = zip(*self.columns, strict=True)
        return Transfers(
            step=np.repeat(steps, [len(column) for column in sources]),
            source=np.concatenate(sources),
            destination=np.concatenate(targets),
            chunk=np.concatenate(chunks),
            reduce=np.concatenate(reduces),
        )

    def _emit(
        self, turn: int, source: npt.ArrayLike, target: npt.ArrayLike, chunk: npt.ArrayLike, *, reduce: bool = False
    ) -> None:
        sources, targets, chunks = (np.atleast_1d(np.asarray(column, np.int32)) for column in (source, target, chunk))
        self.columns.append((turn, sources, targets, chunks, np.full(len(sources), reduce)))

    def _round(self, turn: int) -> None:
        oldest, feeding = self.num_classes, turn < self.num_chunks
        partner = int(self.partner[turn]) if feeding else -1
        old = self.classes[oldest]
        if feeding:
            self.deadline[partner] = self.next_turn[turn]
            old = old[old != partner]
        old = old[np.lexsort((old, self.deadline[old]))]

        sending, receiving = self.holder, self.first + self.second - self.holder
        if feeding:
            sending, receiving = self._roles_of_partner(turn, partner, sending.copy(), receiving.copy())
        got = np.full(len(self.first), -1)  # the chunk each node gets from outside in this round
        self._pair_up(turn, old, sending, receiving, got)
        if feeding:
            self._feed(turn, partner, receiving, got)

        # Inside a pair, the rank that receives for the node passes on what its twin lacks.
        passing, lacking = receiving[: self.num_pairs], sending[: self.num_pairs]
        owes = self.owed[passing] >= 0
        self._emit(turn, passing[owes], lacking[owes], self.owed[passing][owes])
        self.owed[passing] = got[: self.num_pairs]
        fresh = np.append(old, partner) if feeding else old
        self.holder[fresh] = receiving[fresh]

    def _roles_of_partner(
        self, turn: int, partner: int, sending: npt.NDArray[Any], receiving: npt.NDArray[Any]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The partner sends by the owner of the next chunk and receives by its twin (round 0: the other way)."""
        owner = int(self.owner[0 if turn == 0 else (turn + 1) % self.num_chunks])
        twin = int(self.first[partner] + self.second[partner]) - owner
        sending[partner], receiving[partner] = (twin, owner) if turn == 0 else (owner, twin)
        return sending, receiving

    def _pair_up(
        self,
        turn: int,
        old: npt.NDArray[Any],
        sending: npt.NDArray[Any],
        receiving: npt.NDArray[Any],
        got: npt.NDArray[Any],
    ) -> None:
        """The old pair with the young, oldest young first; both move up to the class above the young one's."""
        moved: list[npt.NDArray[Any]] = [old[:0]] * (self.num_classes + 1)
        late_class = turn - self.num_chunks + 1  # of the late rank itself, once it has nothing left to complete
        used = 0
        for j in range(self.num_classes - 1, 0, -1):
            young = self.classes[j]
            mates = old[used : used + len(young)]
            used += len(young)
            if turn - j >= 0:
                self._emit(turn, sending[young], receiving[mates], turn - j + 0 * young)
                got[mates] = turn - j
            if turn - self.num_classes >= 0:
                self._emit(turn, sending[mates], receiving[young], turn - self.num_classes + 0 * young)
                got[young] = turn - self.num_classes
            moved[j + 1] = np.concatenate((young, mates))
            if j == late_class:
                mate = old[used : used + 1]
                used += 1
                self._emit(turn, self.late, receiving[mate], self.num_chunks - 1)
                got[mate] = self.num_chunks - 1
                moved[j + 1] = np.concatenate((moved[j + 1], mate))
        self.classes = moved
        if turn < self.num_chunks:
            self.classes[1] = self.partner[turn : turn + 1]

    def _feed(self, turn: int, partner: int, receiving: npt.NDArray[Any], got: npt.NDArray[Any]) -> None:
        """The late rank feeds its partner a chunk, and gets the next one to complete (at last: chunk 0, complete)."""
        coming = (turn + 1) % self.num_chunks
        self._emit(turn, self.late, receiving[partner], turn, reduce=turn == 0)
        self._emit(turn, self.owner[coming], self.late, coming, reduce=coming != 0)
        got[partner] = turn


def reduce_scatter_to(owner: IntArray, num_early: int) -> Transfers:
    """Ring reduce-scatter among ranks 0 .. num_early - 1, after which rank owner[c] has the sum of chunk c.

    One batch of ``num_early`` chunks after the other, so that the first batches are ready first.
    """
    hop, chunk = np.ogrid[: num_early - 1, : len(owner)]
    return Transfers(
        step=chunk // num_early * (num_early - 1) + hop,
        source=(owner[chunk] + 1 + hop) % num_early,
        destination=(owner[chunk] + 2 + hop) % num_early,
        chunk=chunk + 0 * hop,
        reduce=True,
    )


def check(num_ranks: int, late: int, pieces: int) -> None:
    """Refuse a late rank that is not there, and more chunks than anybody needs."""
    if not 0 <= late < num_ranks:
        raise UsageError(f"rank {late} cannot be late: the ranks are 0 to {num_ranks - 1}")
    if pieces * (num_ranks - 1) > _MOST_CHUNKS:
        raise UnsupportedError(f"stragglar cuts the buffer into at most {_MOST_CHUNKS} chunks: take fewer pieces")


@algorithm(Kind.ALL_REDUCE, min_ranks=3)
def stragglar(collective: Collective, *, late: int = 0, pieces: int = 1) -> Draft:
    """Reduce-scatter without the late rank, then a round-optimal exchange with it.

    Any n >= 3, any late rank, K = (n - 1) ``pieces`` chunks. Steps: (n - 2) ``pieces`` before the late rank is
    needed, then K - 1 + ceil(log2 n), the fewest possible. Bytes: after the arrival every rank receives one buffer
    and sends one, or up to (ceil(log2 n) - 1)/K more or less; an early rank moves (n - 2)/(n - 1) of one before.
    Lateness: if the late rank comes (n - 2)/(n - 1) of a buffer time after the others or later, 1 + (ceil(log2 n) -
    1)/K of a buffer time remains after its arrival; if it comes earlier the reduce-scatter goes on, without
    restart, and the exchange follows.

    Source: Devraj et al., 2025, for n = 2^q and pieces = 1; Paceline's own for the rest.
    """
    ranks = collective.num_ranks
    check(ranks, late, pieces)
    parts = [reduce_scatter_to(owners(ranks, pieces), ranks - 1), exchange(ranks, pieces)]
    label = [rank for rank in range(ranks) if rank != late] + [late]
    return pieces * (ranks - 1), Transfers.sequence(parts).relabelled(ranks=label)
