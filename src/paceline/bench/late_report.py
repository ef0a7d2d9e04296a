"""The table and the picture of a run with late ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

from rich.table import Table

from paceline.bench.results import Results, Row
from paceline.bench.table import machine_words, versions_words
from paceline.draw.canvas import new_figure, save_figure
from paceline.units import format_duration


def late_table(results: Results) -> Table:
    """One line for each point and contender, the subject first."""
    limited = any(row.limit_s for row in results.rows)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("ranks", "size", "late"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    for name in ("exposed", "25%", "75%", "n", "#wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    if limited:
        table.add_column("of limit", justify="right", no_wrap=True)
    table.add_column("/ first (rounds)", justify="right", no_wrap=True)
    before = None
    for row in results.rows:
        point = (row.num_ranks, row.size_bytes, row.late_s)
        cells = ["", "", ""] if point == before else [str(row.num_ranks), str(row.size_bytes), late_words(row.late_s)]
        before = point
        figures = (row.time.median_s, row.time.lower_quartile_s, row.time.upper_quartile_s)
        cells += [row.contender, *map(format_duration, figures), str(row.time.count), str(row.wrong)]
        if limited:
            cells.append(f"{row.share_of_limit:.3f}" if row.share_of_limit else "-")
        ratio = row.over_subject
        cells.append(f"{ratio.of_medians:.3g}x ({ratio.least:.3g}-{ratio.most:.3g})" if ratio else "")
        table.add_row(*cells, style="" if ratio else "bold")
    return table


def late_words(late_s: Mapping[int, float]) -> str:
    """``3:500 ms``, or ``-`` for nobody."""
    return ",".join(f"{rank}:{format_duration(seconds)}" for rank, seconds in sorted(late_s.items())) or "-"


def late_caption(results: Results) -> Iterable[str]:
    """What a reader needs to judge the figures."""
    yield f"allreduce with late ranks on {results.place}"
    yield from machine_words(results.machine)
    yield from versions_words(results.versions, results.environment)
    yield f"{results.machine.date}: {results.machine.command}"
    yield (
        "exposed: median of n iterations, each from the moment the last rank calls until the last rank is done; "
        f"{results.rounds} interleaved rounds; limit: what any schedule needs after the last arrival, bytes alone"
    )


_LABELS = {
    "delay": "delay of the last rank [s]",
    "size": "bytes",
    "ranks": "ranks",
    "pieces": "pieces of a chunk",
}


def draw_late(results: Results, path: Path) -> None:
    """Exposed time against what was varied (delays, if nothing was), with quartiles, and the limit."""
    sweep = results.sweep or "delay"
    label = _LABELS[sweep]
    figure = new_figure(8, 5)
    axes = figure.add_subplot(1, 1, 1)
    for name, rows in _curves(results, sweep):
        if not _has_x(rows[0], sweep):
            axes.axhline(rows[0].time.median_s, ls="--", lw=1, color="grey")
            axes.annotate(name, (1, rows[0].time.median_s), fontsize=8, va="bottom")
            continue
        xs = [_x(row, sweep) for row in rows]
        (line,) = axes.plot(xs, [row.time.median_s for row in rows], marker="o", ms=4, label=name)
        low, high = [row.time.lower_quartile_s for row in rows], [row.time.upper_quartile_s for row in rows]
        axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.2, lw=0)
    limits = {_x(row, sweep): row.limit_s for row in results.rows if row.limit_s and _has_x(row, sweep)}
    if limits:
        axes.plot(list(limits), list(limits.values()), ":", color="black", label="limit")
    if sweep in ("size", "pieces"):
        axes.set_xscale("log", base=10 if sweep == "size" else 2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(label)
    axes.set_ylabel("time after the last arrival [s], with quartiles")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, frameon=False)
    figure.suptitle(f"allreduce with late ranks on {results.place}, {results.machine.date}", fontsize=11)
    save_figure(figure, path)


def _has_x(row: Row, sweep: str) -> bool:
    """A contender that is not cut in pieces is a level, not a curve."""
    return sweep != "pieces" or row.pieces is not None


def _x(row: Row, sweep: str) -> float:
    return {"delay": row.delay_s, "size": row.size_bytes, "ranks": row.num_ranks, "pieces": row.pieces or 0}[sweep]


def _curves(results: Results, sweep: str) -> Iterable[tuple[str, list[Row]]]:
    """The rows of each curve, by contender; pieces of one contender are one curve, sizes of others a curve each."""

    def name(row: Row) -> str:
        contender = row.contender.partition(" k=")[0] if sweep == "pieces" else row.contender
        several = sweep != "size" and len({one.size_bytes for one in results.rows}) > 1
        return f"{contender}, {row.size_bytes} B" if several else contender

    order = list(dict.fromkeys(map(name, results.rows)))
    ordered = sorted(results.rows, key=lambda row: order.index(name(row)))
    for found, rows in groupby(ordered, key=name):
        yield found, list(rows)
