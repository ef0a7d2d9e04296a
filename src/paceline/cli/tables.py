"""Tables that the verbs print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.ir.cluster import Cluster
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfer
from paceline.ir.verify import Proof
from paceline.policy.planning import Plan
from paceline.units import format_duration, format_rate, format_size

MOST_STEPS = 24
_MOST_TRANSFERS = 16


def console() -> Console:
    """Standard output, highlighting nothing by itself; wide enough for tables, which a narrow terminal then folds."""
    out = Console(highlight=False)
    return Console(highlight=False, width=max(out.width, 120) if out.is_terminal else 120)


def schedule_table(schedule: Schedule, *, all_steps: bool) -> Table:
    """One line a step: who sends which chunk to whom; + marks a reduce. The first and the last steps, or all."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("step", justify="right")
    table.add_column("transfers   (source>destination:chunk, + where it is added)", overflow="fold")
    rows, num_steps = schedule.transfers, schedule.num_steps
    hidden = range(0) if all_steps or num_steps <= MOST_STEPS else range(MOST_STEPS // 2, num_steps - MOST_STEPS // 2)
    border = np.searchsorted(rows.step, np.arange(num_steps + 1)).tolist()
    for step in range(num_steps):
        if step in hidden:
            if step == hidden[0]:
                table.add_row("...", f"{len(hidden)} more steps (--all shows them)")
            continue
        shown = border[step + 1] if all_steps else min(border[step + 1], border[step] + _MOST_TRANSFERS)
        cells = [_cell(rows[index]) for index in range(border[step], shown)]
        table.add_row(str(step), "  ".join(cells) + ("  ..." if shown < border[step + 1] else ""))
    return table


def _cell(row: Transfer) -> str:
    to = str(row.destinations[0]) if len(row.destinations) == 1 else f"({len(row.destinations)} ranks)"
    run = str(row.chunk) if row.count == 1 else f"{row.chunk}-{row.chunk + row.count - 1}"
    return f"{row.source}>{to}:{run}{'+' if row.reduce else ''}"


def proof_lines(proof: Proof, cluster: Cluster | None = None) -> Iterable[str]:
    """What was proven, in words."""
    schedule = proof.schedule
    yield f"[bold green]proven[/]: {_promise(schedule)}, under any timing, without deadlock."
    yield (
        f"  {proof.num_messages} messages in {schedule.num_steps} steps; at most {proof.most_sends_at_once} sends and "
        f"{proof.most_receives_at_once} receives of a rank at once"
        + (f"; {proof.staged_chunks} chunks set aside" if proof.staged_chunks else "")
    )
    if schedule.num_ranks > 1:
        chunks = schedule.num_chunks
        sent, received = _span(proof.chunks_sent, chunks), _span(proof.chunks_received, chunks)
        yield f"  a rank sends {sent} and receives {received} buffers"
        if cluster is not None and 1 < len(cluster.hosts) < cluster.num_ranks:
            up, down = proof.host_traffic(cluster.host_of)
            yield f"  a host's port sends {_span(up, chunks)} and receives {_span(down, chunks)} buffers"


def _promise(schedule: Schedule) -> str:
    several = schedule.collective.contributor(schedule.transfers.chunk[:1], schedule.num_chunks) is None
    what = "the sum of all contributions, each counted once" if several else "its data"
    if schedule.collective.idempotent:
        what = "word of every rank"
    return f"every rank that needs one of the {schedule.num_chunks} chunks ends with {what}"


def _span(chunks: Any, num_chunks: int) -> str:
    low, high = chunks.min() / num_chunks, chunks.max() / num_chunks
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def cluster_line(cluster: Cluster) -> str:
    """The cluster in one line."""
    host = cluster.hosts[0]
    late = late_words(cluster)
    if len(cluster.hosts) == 1:
        ports = f"{format_rate(host.local_bytes_per_s)} a rank, {format_duration(host.local_latency_s)} a message"
    else:
        same = "each" if len(set(cluster.hosts)) == 1 else "on the first"
        ports = (
            f"{len(cluster.hosts)} hosts, {format_rate(host.up_bytes_per_s)} up and "
            f"{format_rate(host.down_bytes_per_s)} down {same}, {format_duration(host.latency_s)} a message"
        )
    return f"{escape(cluster.name)}: {cluster.num_ranks} ranks, {ports}" + (f"; {late}" if late else "")


def late_words(cluster: Cluster) -> str:
    """``rank 3 late by 2 s``, or nothing."""
    return ", ".join(f"rank {r} late by {format_duration(s)}" for r, s in enumerate(cluster.late_s) if s > 0)


def cost_table(plans: list[Plan], *, against: str | None = None) -> Table:
    """One line a plan: parameters, messages, time, ratio to the limit, and to one of them."""
    late = plans[0].cluster.last_arrival_s > 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("algorithm")
    table.add_column("parameters")
    table.add_column("chunks", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("chunk size", justify="right")
    table.add_column("total", justify="right")
    table.add_column("after arrival" if late else "time", justify="right")
    table.add_column("limit", justify="right")
    table.add_column("/ limit", justify="right")
    reference = next((plan.cost.exposed_s for plan in plans if plan.algorithm == against), None)
    if reference is not None:
        table.add_column(f"{against} / it", justify="right")
    for plan in plans:
        chunk = plan.schedule.collective.chunk_bytes(plan.size_bytes, plan.schedule.num_chunks)
        row = [
            plan.algorithm,
            _parameters(plan),
            str(plan.schedule.num_chunks),
            str(plan.schedule.num_steps),
            format_size(chunk),
            format_duration(plan.cost.total_s),
            format_duration(plan.cost.exposed_s),
            format_duration(plan.cost.bound_s),
            f"{plan.cost.ratio:.3f}" if plan.cost.bound_s > 0 else "-",
        ]
        if reference is not None:
            row.append(f"{reference / plan.cost.exposed_s:.2f}x" if plan.cost.exposed_s > 0 else "-")
        table.add_row(*row)
    return table


def _parameters(plan: Plan) -> str:
    shown = {key: value for key, value in plan.parameters.items() if not isinstance(value, tuple)}
    return " ".join(f"{key}={value}" for key, value in sorted(shown.items()))
