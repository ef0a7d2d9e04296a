"""Hierarchical: inside the hosts, then across, then inside again, so that each byte crosses a port once."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.algorithms.chain import chain_broadcast
from paceline.algorithms.direct import direct_all_gather
from paceline.algorithms.registry import Draft, algorithm
from paceline.algorithms.ring import ring_all_gather, ring_reduce_scatter
from paceline.errors import UsageError
from paceline.ir.collective import Collective, Kind
from paceline.ir.transfers import Transfer, Transfers


def _members(hosts: Sequence[int] | None, num_ranks: int) -> list[list[int]]:
    """The ranks of each host."""
    host_of = [0] * num_ranks if hosts is None else list(hosts)
    if len(host_of) != num_ranks:
        raise UsageError(f"hosts needs one entry for each of the {num_ranks} ranks, not {len(host_of)}")
    return [[rank for rank in range(num_ranks) if host_of[rank] == host] for host in sorted(set(host_of))]


def _spread_inside(members: list[list[int]], columns: list[list[int]]) -> Transfers:
    """In every host at once, local rank j sends the chunks of columns[j] to the others, one partner at a time."""
    return Transfers.overlay(
        [
            gather.selected(gather.source < len(columns)).relabelled(
                ranks=host, chunks=columns + [[]] * (len(host) - len(columns))
            )
            for host in members
            if len(host) > 1
            for gather in [direct_all_gather(len(host))]
        ]
    )


def _all_reduce(members: list[list[int]], pieces: int) -> Draft:
    """Column j is reduced on the j-th rank of each host, then in a ring across the hosts, and spread inside."""
    num_columns, num_hosts = min(map(len, members)), len(members)
    width = num_hosts * pieces
    columns = [list(range(j * width, (j + 1) * width)) for j in range(num_columns)]
    inside = _spread_inside(members, columns)
    halves = [ring_reduce_scatter(num_hosts, pieces), ring_all_gather(num_hosts, pieces)] if num_hosts > 1 else []
    ring = Transfers.sequence(halves)
    across = [ring.relabelled(ranks=[host[j] for host in members], chunks=columns[j]) for j in range(num_columns)]
    parts = [inside.mirrored(reduce=True), Transfers.overlay(across), inside]
    return num_columns * width, Transfers.sequence(parts)


def _all_gather(members: list[list[int]]) -> Transfers:
    """The shards of a host are dealt to its first ranks, which pass them round the hosts and spread them inside."""
    num_columns, num_hosts = min(map(len, members)), len(members)
    blocks = [[host[j::num_columns] for host in members] for j in range(num_columns)]  # [column][host]
    extra = [(host[i], host[i % num_columns]) for host in members for i in range(num_columns, len(host))]
    deal = Transfers.from_rows(Transfer(0, rank, (column,), rank, 1, False) for rank, column in extra)
    ring = ring_all_gather(num_hosts, 1) if num_hosts > 1 else Transfers.none()
    across = [ring.relabelled(ranks=[host[j] for host in members], chunks=blocks[j]) for j in range(num_columns)]
    spread = _spread_inside(members, [[chunk for block in column for chunk in block] for column in blocks])
    spread = spread.selected(spread.destination != spread.chunk)  # nobody is sent its own shard
    return Transfers.sequence([deal, Transfers.overlay(across), spread])


def _broadcast(members: list[list[int]], root: int, pieces: int) -> Transfers:
    """A pipelined chain through one rank of each host, then a chain inside each host."""
    ordered = sorted(members, key=lambda host: root not in host)
    lines = [sorted(host, key=lambda rank: rank != root) for host in ordered]
    leaders = [line[0] for line in lines]
    across = chain_broadcast(len(leaders), pieces).relabelled(ranks=leaders) if len(leaders) > 1 else Transfers.none()
    inside = [chain_broadcast(len(line), pieces).relabelled(ranks=line) for line in lines if len(line) > 1]
    return Transfers.sequence([across, Transfers.overlay(inside)])


@algorithm(Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.BROADCAST, Kind.REDUCE)
def hierarchical(collective: Collective, *, hosts: Sequence[int] | None = None, pieces: int = 1) -> Draft:
    """Inside the hosts (direct), across them (ring; chain for a broadcast), inside again.

    Any n, any number of ranks on each of H hosts (``hosts``: the host of each rank; default: all on one). Steps: of an
    all-reduce, 2(g - 1) inside hosts of at most g ranks and 2(H - 1) ``pieces`` across; half of that for either half,
    which ignores ``pieces`` and has one more if the hosts differ in ranks. Bytes across a host's port: of an
    all-reduce, 2(H - 1)/H of the buffer, which is optimal, carried by as many ranks as the smallest host has.
    Lateness: a late rank delays its host, and with it all.

    Source: folklore; e.g. Mikami et al., "Massively distributed SGD", 2018 (2D-torus all-reduce).
    """
    members = _members(hosts, collective.num_ranks)
    if collective.kind is Kind.ALL_REDUCE:
        return _all_reduce(members, pieces)
    if collective.kind in (Kind.BROADCAST, Kind.REDUCE):
        spread = _broadcast(members, collective.root, pieces)
        return pieces, spread if collective.kind is Kind.BROADCAST else spread.mirrored(reduce=True)
    gather = _all_gather(members)
    return collective.num_ranks, gather if collective.kind is Kind.ALL_GATHER else gather.mirrored(reduce=True)
