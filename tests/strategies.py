"""Hypothesis strategies: an algorithm with a collective and parameters, and mutations of a schedule."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from paceline.algorithms import ALGORITHMS, Algorithm
from paceline.ir.collective import ROOTED, Collective, Kind
from paceline.ir.schedule import Schedule
from paceline.ir.transfers import Transfer, Transfers


@st.composite
def requests(
    draw: st.DrawFn, *, most_ranks: int, names: tuple[str, ...] | None = None
) -> tuple[Algorithm, Collective, dict[str, Any]]:
    """Any algorithm, any collective and number of ranks it serves, any parameters."""
    entry = ALGORITHMS[draw(st.sampled_from(names or tuple(ALGORITHMS)))]
    kind = draw(st.sampled_from(sorted(entry.kinds)))
    n = draw(st.integers(entry.min_ranks, most_ranks))
    root = draw(st.integers(0, n - 1)) if kind in ROOTED else 0
    parameters: dict[str, Any] = {}
    if "pieces" in entry.parameters:
        parameters["pieces"] = draw(st.integers(1, max(1, min(8, 600 // n))))
    if "late" in entry.parameters:
        parameters["late"] = draw(st.integers(0, n - 1))
    if "chains" in entry.parameters:
        parameters["chains"] = draw(st.integers(1, n))
    if "hosts" in entry.parameters:
        parameters["hosts"] = draw(st.lists(st.integers(0, 6), min_size=n, max_size=n).map(tuple))
    if "arrivals" in entry.parameters:
        # the greedy construction is slow for many ranks: keep the number of chunks small there
        parameters["pieces"] = draw(st.integers(1, max(1, min(4, 48 // n))))
        moments = draw(st.lists(st.integers(0, 3 * n), min_size=1, max_size=4))
        parameters["arrivals"] = draw(st.lists(st.sampled_from([0, 0, *moments]), min_size=n, max_size=n).map(tuple))
    return entry, Collective(Kind(kind), n, root), parameters


MUTATIONS = ("drop", "duplicate", "redirect source", "redirect destination", "redirect chunk", "swap", "flip")


@st.composite
def mutants(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """The schedule with one or two of its transfers dropped, doubled, redirected, exchanged or flipped."""
    rows = list(schedule.transfers)
    n = schedule.num_ranks
    for _ in range(draw(st.integers(1, 2))):
        if not rows:
            break
        at = draw(st.integers(0, len(rows) - 1))
        row, how = rows[at], draw(st.sampled_from(MUTATIONS))
        if how == "drop":
            del rows[at]
        elif how == "duplicate":
            later = draw(st.integers(at, len(rows) - 1))
            rows.insert(later + 1, row._replace(step=rows[later].step))
        elif how == "redirect source":
            others = [rank for rank in range(n) if rank not in row.destinations]
            rows[at] = row._replace(source=draw(st.sampled_from(others)))
        elif how == "redirect destination":
            others = [rank for rank in range(n) if rank != row.source and rank not in row.destinations[1:]]
            rows[at] = row._replace(destinations=(draw(st.sampled_from(others)), *row.destinations[1:]))
        elif how == "redirect chunk":
            rows[at] = row._replace(chunk=draw(st.integers(0, schedule.num_chunks - row.count)))
        elif how == "swap":
            other = draw(st.integers(0, len(rows) - 1))
            rows[at], rows[other] = rows[other]._replace(step=row.step), row._replace(step=rows[other].step)
        else:
            rows[at] = row._replace(reduce=not row.reduce)
    return Schedule(schedule.collective, schedule.num_chunks, Transfers.from_rows(rows), "mutant")


def row(step: int, source: int, destination: int, chunk: int, *, reduce: bool = False) -> Transfer:
    """A unicast transfer of one chunk."""
    return Transfer(step, source, (destination,), chunk, 1, reduce)
