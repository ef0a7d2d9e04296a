"""What a schedule costs on a cluster: the alpha-beta critical path with ports and late ranks.

A transfer starts when its source holds the data, its destination may write (see :mod:`paceline.ir.transfers`),
both ranks have arrived, and both of its ports are done with the steps before. A port serves the steps in
order; messages of one step that share a port share its time, so each takes as long as all of them together.
Reductions are free, chunks are forwarded whole, and wires are never lost: a model, not a simulator.

A multicast is one message: it starts when all its destinations may receive, and goes at the pace of the slowest. It
takes its sender's port once, and the port of each receiving host once, however many ranks there want it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError
from paceline.ir.bound import exposed_bound
from paceline.ir.cluster import Cluster, FloatArray
from paceline.ir.places import Places
from paceline.ir.schedule import Schedule


@dataclass(frozen=True, eq=False)
class Cost:
    """Times in seconds, counted from the arrival of the first rank.

    ``start_s`` and ``end_s`` are per transfer (first start and last end of its destinations); ``exposed_s`` is what
    remains after the last rank's arrival, ``bound_s`` the least that could remain here whatever the schedule.
    """

    total_s: float
    exposed_s: float
    bound_s: float
    start_s: FloatArray = field(repr=False)
    end_s: FloatArray = field(repr=False)
    rank_done_s: FloatArray = field(repr=False)

    @property
    def ratio(self) -> float:
        """Exposed time over the bound: 1.0 is perfect."""
        return self.exposed_s / self.bound_s if self.bound_s > 0 else float("nan")


def cost(schedule: Schedule, cluster: Cluster, size_bytes: float) -> Cost:
    """Price the schedule for a buffer of so many bytes (see :meth:`Collective.chunk_bytes`)."""
    if schedule.num_ranks != cluster.num_ranks:
        raise UsageError(f"the schedule has {schedule.num_ranks} ranks and the cluster {cluster.num_ranks}")
    if not (np.isfinite(size_bytes) and size_bytes >= 0):
        raise UsageError(f"a buffer has zero or more bytes, not {size_bytes}")
    table = schedule.transfers
    start, end, done = _play(schedule, cluster, _durations(schedule, cluster, size_bytes))
    total = max(float(done.max()), cluster.last_arrival_s)
    multicast = cluster.multicast or not table.unicast
    return Cost(
        total_s=total,
        exposed_s=total - cluster.last_arrival_s,
        bound_s=exposed_bound(schedule.collective, cluster, size_bytes, multicast=multicast),
        start_s=np.minimum.reduceat(start, table.first[:-1]) if len(table) else start,
        end_s=np.maximum.reduceat(end, table.first[:-1]) if len(table) else end,
        rank_done_s=done,
    )


def _durations(schedule: Schedule, cluster: Cluster, size_bytes: float) -> FloatArray:
    """How long each transfer takes at each destination once it may start, its ports' other work included."""
    table, facts = schedule.transfers, cluster.arrays
    row = np.repeat(np.arange(len(table)), table.fanout)
    source, target, step = table.source[row], table.destination, table.step[row]
    inside = facts.host[source] == facts.host[target]
    payload = table.count[row] * schedule.collective.chunk_bytes(size_bytes, schedule.num_chunks)
    latency = np.where(
        inside,
        np.maximum(facts.local_latency[source], facts.local_latency[target]),
        np.maximum(facts.latency[source], facts.latency[target]),
    )
    latency = latency * table.opens_message()[row]
    sending = latency + payload / np.where(inside, facts.local_rate[source], facts.up[source])
    receiving = latency + payload / np.where(inside, facts.local_rate[target], facts.down[target])

    first_of_row = np.zeros(len(row), np.bool_)
    first_of_row[table.first[:-1]] = True
    leaving = sending if table.unicast else _slowest_of_each(sending, table.first)
    longest: FloatArray = np.maximum(
        _shared(step, source, cluster.num_ranks, leaving, first_of_row),
        _shared(step, target, cluster.num_ranks, receiving),
    )
    if len(cluster.hosts) < cluster.num_ranks:
        hosts, out = len(cluster.hosts), ~inside
        up = _shared(step, facts.host[source], hosts, sending, _first_of_each(row, out))
        entry = row * hosts + facts.host[target]  # a multicast enters a host once, for all its ranks
        down = _shared(step, facts.host[target], hosts, receiving, _first_of_each(entry, out))
        longest = np.where(out, np.maximum(longest, np.maximum(up, down)), longest)
    return longest if table.unicast else _slowest_of_each(longest, table.first)


def _slowest_of_each(value: FloatArray, first: npt.NDArray[np.int64]) -> FloatArray:
    """For each destination of a transfer, the greatest value of all its destinations."""
    greatest: FloatArray = np.repeat(np.maximum.reduceat(value, first[:-1]), np.diff(first))
    return greatest


def _first_of_each(group: npt.NDArray[np.int64], among: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Marks the first entry of each group, of those that are among the marked."""
    first = np.zeros(len(group), np.bool_)
    first[np.flatnonzero(among)[np.unique(group[among], return_index=True)[1]]] = True
    return first


def _shared(
    step: npt.NDArray[np.integer],
    port: npt.NDArray[np.integer],
    num_ports: int,
    work: FloatArray,
    counts: npt.NDArray[np.bool_] | None = None,
) -> FloatArray:
    """All the work of one port in one step, for each row that uses it."""
    key = step.astype(np.int64) * num_ports + port
    if len(key) and int(step[-1] + 1) * num_ports > 8 * len(key) + 1024:
        key = np.unique(key, return_inverse=True)[1].reshape(-1)
    total: FloatArray = np.bincount(key, weights=work if counts is None else work * counts).astype(np.float64)
    shared: FloatArray = np.maximum(total[key], work)
    return shared


def _play(schedule: Schedule, cluster: Cluster, duration: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Start and end of each transfer at each destination, and when each rank is done."""
    table, ranks = schedule.transfers, schedule.num_ranks
    facts = cluster.arrays
    row = np.repeat(np.arange(len(table)), table.fanout)
    source, target, host = table.source[row], table.destination, facts.host
    runs = bool((table.count > 1).any())
    moves = table.moves(0, schedule.num_chunks) if runs or not table.unicast else None
    chunk = table.chunk if moves is None else moves.chunk
    read = chunk.astype(np.int64) * ranks + (source if moves is None else moves.source)
    write = chunk.astype(np.int64) * ranks + (target if moves is None else moves.destination)
    places = Places.of(read, write, schedule.num_chunks * ranks)
    read, write, arrival = places.read, places.written, facts.arrival[places.key % ranks]
    length = table.count[row] if runs else None
    first_move = np.concatenate(([0], np.cumsum(table.count[row]))) if runs else np.arange(len(row) + 1)

    written, read_until = arrival.copy(), arrival.copy()
    send_free, receive_free = facts.arrival.copy(), facts.arrival.copy()
    shared_ports = len(cluster.hosts) < cluster.num_ranks
    up_free, down_free = np.zeros(len(cluster.hosts)), np.zeros(len(cluster.hosts))
    start, end = np.empty(len(row)), np.empty(len(row))
    borders = np.searchsorted(table.step[row], np.arange(table.num_steps + 1))
    transfers = np.searchsorted(table.step, np.arange(table.num_steps + 1)).tolist()
    move_borders = first_move[borders].tolist()
    borders = borders.tolist()
    for step in range(table.num_steps):
        rows = slice(borders[step], borders[step + 1])
        places_of = slice(move_borders[step], move_borders[step + 1])
        src, dst, reading, writing = source[rows], target[rows], read[places_of], write[places_of]
        ready = np.maximum(written[reading], np.maximum(written[writing], read_until[writing]))
        if length is not None:
            ready = np.maximum.reduceat(ready, first_move[rows] - places_of.start)
        begin = np.maximum(np.maximum(ready, send_free[src]), receive_free[dst])
        if shared_ports:
            out = np.flatnonzero(host[src] != host[dst])
            ports = np.maximum(up_free[host[src[out]]], down_free[host[dst[out]]])
            begin[out] = np.maximum(begin[out], ports)
        if not table.unicast:
            begin = _slowest_of_each(begin, table.first[transfers[step] : transfers[step + 1] + 1] - borders[step])
        finish = begin + duration[rows]
        start[rows], end[rows] = begin, finish
        np.maximum.at(send_free, src, finish)
        np.maximum.at(receive_free, dst, finish)
        if shared_ports:
            np.maximum.at(up_free, host[src[out]], finish[out])
            np.maximum.at(down_free, host[dst[out]], finish[out])
        per_move = finish if length is None else np.repeat(finish, length[rows])
        np.maximum.at(written, writing, per_move)
        np.maximum.at(read_until, reading, per_move)
    return start, end, np.maximum(send_free, receive_free)
