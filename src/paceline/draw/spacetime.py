"""The space-time diagram of a plan: ranks across, time down, transfers as arrows, waiting shaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.draw.canvas import check_picture_path, new_figure, save_figure
from paceline.errors import UsageError
from paceline.policy.planning import Plan
from paceline.units import format_duration, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_ARROWS = 20_000
_LATE, _WAITING, _REDUCE, _COPY = "#d9483b", "#f3d9a4", "#1f5fa8", "#2a8c5a"


def draw_spacetime(plan: Plan, path: Path) -> None:
    """Draw the plan to a PNG, SVG or PDF file."""
    check_picture_path(path)
    table = plan.schedule.transfers
    if len(table.destination) > MOST_ARROWS:
        raise UsageError(f"{len(table.destination)} arrows make no picture (at most {MOST_ARROWS}); draw fewer ranks")
    ranks = plan.schedule.num_ranks
    width = min(24.0, max(6.5, 1.6 + 0.85 * ranks))
    figure = new_figure(width, float(np.clip(3.5 + 0.33 * table.num_steps, 6.0, 16.0)))
    axes: Axes = figure.add_subplot()
    unit_s, unit = _time_unit(plan.cost.total_s)
    _draw_lifelines(axes, plan, unit_s)
    _draw_arrows(axes, plan, unit_s)
    _label(axes, plan, unit_s, unit)
    save_figure(figure, path)


def _time_unit(longest_s: float) -> tuple[float, str]:
    for unit_s, unit in ((1.0, "s"), (1e-3, "ms")):
        if longest_s >= unit_s:
            return unit_s, unit
    return 1e-6, "us"


def _busy_until(plan: Plan) -> list[list[tuple[float, float]]]:
    """For each rank, when it sends or receives: disjoint intervals in order of time."""
    table, cost = plan.schedule.transfers, plan.cost
    row = np.repeat(np.arange(len(table)), table.fanout)
    rank = np.concatenate((table.source, table.destination))
    start = np.concatenate((cost.start_s, cost.start_s[row]))
    end = np.concatenate((cost.end_s, cost.end_s[row]))
    busy: list[list[tuple[float, float]]] = [[] for _ in range(plan.schedule.num_ranks)]
    for index in np.lexsort((end, start)).tolist():
        spans, begin, until = busy[int(rank[index])], float(start[index]), float(end[index])
        if spans and begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], until))
        else:
            spans.append((begin, until))
    return busy


def _draw_lifelines(axes: Axes, plan: Plan, unit_s: float) -> None:
    """A line for each rank; before its arrival it is absent, between its transfers it waits."""
    total, late = plan.cost.total_s, plan.cluster.late_s
    for rank, busy in enumerate(_busy_until(plan)):
        axes.plot([rank, rank], [late[rank] / unit_s, total / unit_s], color="#777777", lw=0.8, zorder=1)
        if late[rank] > 0:
            absent = axes.fill_betweenx([0, late[rank] / unit_s], rank - 0.13, rank + 0.13, facecolor="white", lw=0)
            absent.set(edgecolor=_LATE, hatch="////")
        moment = late[rank]
        for begin, until in busy:
            if begin - moment > 1e-9 * total:
                axes.fill_betweenx([moment / unit_s, begin / unit_s], rank - 0.13, rank + 0.13, color=_WAITING, lw=0)
            moment = until


def _draw_arrows(axes: Axes, plan: Plan, unit_s: float) -> None:
    from matplotlib.collections import LineCollection

    table, cost = plan.schedule.transfers, plan.cost
    row = np.repeat(np.arange(len(table)), table.fanout)
    begin = np.stack((table.source[row], cost.start_s[row] / unit_s), axis=1)
    end = np.stack((table.destination, cost.end_s[row] / unit_s), axis=1)
    reduce = table.reduce[row]
    width = float(np.clip(60 / np.sqrt(len(row) + 1), 0.4, 1.6))
    for chosen, colour in ((reduce, _REDUCE), (~reduce, _COPY)):
        segments = list(np.stack((begin[chosen], end[chosen]), axis=1))
        axes.add_collection(LineCollection(segments, colors=colour, linewidths=width, alpha=0.8, zorder=2))
        axes.scatter(end[chosen, 0], end[chosen, 1], s=8 * width, color=colour, marker="v", lw=0, zorder=3)
    if len(row) <= 150:
        for transfer in range(len(table)):
            for arrow in range(table.first[transfer], table.first[transfer + 1]):
                x = (1.4 * begin[arrow, 0] + end[arrow, 0]) / 2.4
                y = (1.4 * begin[arrow, 1] + end[arrow, 1]) / 2.4
                axes.text(
                    x,
                    y,
                    str(table.chunk[transfer]),
                    fontsize=6,
                    ha="center",
                    va="center",
                    zorder=4,
                    bbox={"boxstyle": "round,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.75},
                )


def _label(axes: Axes, plan: Plan, unit_s: float, unit: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    cost, last = plan.cost, plan.cluster.last_arrival_s
    key: list[Any] = [
        Line2D([], [], color=_REDUCE, marker="v", ms=4, label="sent and added"),
        Line2D([], [], color=_COPY, marker="v", ms=4, label="sent and copied"),
        Patch(color=_WAITING, label="waiting"),
    ]
    if last > 0:
        axes.axhline(last / unit_s, color=_LATE, lw=1, ls="--", zorder=0)
        key.append(Patch(facecolor="white", edgecolor=_LATE, hatch="////", label="not there yet"))
    if cost.bound_s > 0:
        axes.axhline((last + cost.bound_s) / unit_s, color="black", lw=1, ls=":", zorder=0)
        key.append(Line2D([], [], color="black", ls=":", label="limit: nobody can end sooner"))
    axes.legend(handles=key, loc="upper center", bbox_to_anchor=(0.5, -0.015), ncol=3, frameon=False, fontsize=8)
    axes.set_xlim(-0.6, plan.schedule.num_ranks - 0.4)
    axes.set_ylim(max(cost.total_s, last + cost.bound_s) / unit_s * 1.02, 0)
    axes.xaxis.tick_top()
    ranks = plan.schedule.num_ranks
    axes.set_xticks(range(0, ranks, max(1, ranks // 32)))
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("rank")
    axes.set_ylabel(f"time [{unit}]")
    for side in ("right", "bottom", "top"):
        axes.spines[side].set_visible(False)
    after = " after the last arrival" if last > 0 else ""
    ratio = f", {cost.ratio:.2f} times the limit" if cost.bound_s > 0 else ""
    axes.set_title(
        f"{plan.algorithm}: {plan.schedule.collective}, {format_size(plan.size_bytes)} on {plan.cluster.name}\n"
        f"{format_duration(cost.exposed_s)}{after}{ratio}",
        fontsize=11,
        parse_math=False,
    )
