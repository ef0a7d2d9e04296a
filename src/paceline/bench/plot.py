"""The picture of a run: time and bus bandwidth against size, for all contenders."""

from __future__ import annotations

from pathlib import Path

from paceline.bench.results import Results, Row
from paceline.draw.canvas import new_figure, save_figure


def draw_results(results: Results, path: Path) -> None:
    """Draw medians with their quartiles, and the limit where there is one."""
    figure = new_figure(13, 5)
    times, rates = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    factor = 1.0
    for name in dict.fromkeys(row.contender for row in results.rows):
        rows = [row for row in results.rows if row.contender == name]
        sizes = [max(row.size_bytes, 1) for row in rows]
        (line,) = times.plot(sizes, [row.time.median_s for row in rows], marker="o", ms=4, label=name)
        low, high = [row.time.lower_quartile_s for row in rows], [row.time.upper_quartile_s for row in rows]
        times.fill_between(sizes, low, high, color=line.get_color(), alpha=0.2, lw=0)
        rates.plot(sizes, [row.busbw_bytes_per_s / 1e9 for row in rows], marker="o", ms=4, label=name)
        factor = rows[-1].busbw_bytes_per_s / rows[-1].algbw_bytes_per_s if rows[-1].algbw_bytes_per_s else 1.0
    limited = [row for row in results.rows if row.contender == results.subject and row.limit_s]
    if limited:
        sizes = [row.size_bytes for row in limited]
        times.plot(sizes, [row.limit_s or 0.0 for row in limited], ":", color="black", label="limit")
        rates.plot(sizes, [_limit_rate(row, factor) for row in limited], ":", color="black", label="limit")
    for axes, what in ((times, "time [s], with quartiles"), (rates, "bus bandwidth [GB/s]")):
        axes.set_xscale("log")
        axes.set_xlabel("bytes")
        axes.set_ylabel(what)
        axes.grid(which="major", alpha=0.3)
    times.set_yscale("log")
    times.legend(fontsize=9, frameon=False)
    title = f"{results.operation}, {results.ranks} on {results.place}, {results.machine.date}"
    figure.suptitle(title, fontsize=11, parse_math=False)
    save_figure(figure, path)


def _limit_rate(row: Row, factor: float) -> float:
    return row.size_bytes / (row.limit_s or float("inf")) * factor / 1e9
