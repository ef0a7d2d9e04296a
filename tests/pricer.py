"""A slow, obvious pricer: one transfer at a time, dictionaries for everything. Shares no code with paceline.ir.cost."""

from __future__ import annotations

from collections import defaultdict

from paceline.ir.cluster import Cluster
from paceline.ir.schedule import Schedule


def price(schedule: Schedule, cluster: Cluster, size_bytes: float) -> float:
    """When the last rank is done, by the words of paceline.ir.cost's docstring."""
    rows = list(schedule.transfers)
    chunk_bytes = schedule.collective.chunk_bytes(size_bytes, schedule.num_chunks)
    host = cluster.host_of

    def rates(source: int, target: int) -> tuple[float, float, float]:
        a, b = cluster.hosts[host[source]], cluster.hosts[host[target]]
        if host[source] == host[target]:
            return a.local_bytes_per_s, a.local_bytes_per_s, a.local_latency_s
        up, down = a.up_bytes_per_s / cluster.wire_factor, b.down_bytes_per_s / cluster.wire_factor
        return up, down, max(a.latency_s, b.latency_s)

    load: dict[tuple[int, str, int], float] = defaultdict(float)  # (step, port, whose): seconds of work
    work: dict[tuple[int, int], tuple[float, float]] = {}
    for index, row in enumerate(rows):
        before = rows[index - 1] if index else None
        joins = before is not None and before[:3] == row[:3] and len(row.destinations) == 1
        left, entered = False, set()
        leaving = 0.0
        for target in row.destinations:
            up, down, latency = rates(row.source, target)
            latency = 0.0 if joins else latency
            sending, receiving = (latency + row.count * chunk_bytes / rate for rate in (up, down))
            work[index, target] = sending, receiving
            leaving = max(leaving, sending)
            load[row.step, "receive", target] += receiving
            if host[row.source] != host[target]:
                if not left:
                    load[row.step, "up", host[row.source]] += sending
                    left = True
                if host[target] not in entered:
                    load[row.step, "down", host[target]] += receiving
                    entered.add(host[target])
        load[row.step, "send", row.source] += leaving  # a multicast leaves once, for the slowest who wants it

    free: dict[tuple[str, int], float] = defaultdict(float)
    for rank, late in enumerate(cluster.late_s):
        free["send", rank] = free["receive", rank] = late
    written: dict[tuple[int, int], float] = {}
    read: dict[tuple[int, int], float] = {}

    def at(table: dict[tuple[int, int], float], rank: int, chunk: int) -> float:
        return table.get((rank, chunk), cluster.late_s[rank])

    for step in range(schedule.num_steps):
        ends = []
        for index, row in enumerate(rows):
            if row.step != step:
                continue
            starts, lasts, used = [], [], []
            for target in row.destinations:
                ports = [("send", row.source), ("receive", target)]
                if host[row.source] != host[target]:
                    ports += [("up", host[row.source]), ("down", host[target])]
                chunks = range(row.chunk, row.chunk + row.count)
                ready = [at(written, row.source, c) for c in chunks]
                ready += [max(at(written, target, c), at(read, target, c)) for c in chunks]
                starts.append(max(*ready, *(free[port] for port in ports)))
                lasts.append(max(*work[index, target], *(load[step, name, whose] for name, whose in ports)))
                used.append(ports)
            end = max(starts) + max(lasts)  # all destinations get it at the same time
            for target, ports in zip(row.destinations, used, strict=True):
                ends.append((end, row.source, target, range(row.chunk, row.chunk + row.count), ports))
        for end, source, target, chunks, ports in ends:  # a step reads before it writes
            for port in ports:
                free[port] = max(free[port], end)
            for chunk in chunks:
                written[target, chunk] = max(at(written, target, chunk), end)
                read[source, chunk] = max(at(read, source, chunk), end)
    ends = [free[port, rank] for rank in range(schedule.num_ranks) for port in ("send", "receive")]
    return max([cluster.last_arrival_s, *ends])
