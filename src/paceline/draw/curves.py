"""Curves that compare algorithms: exposed time against size, and against the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.draw.canvas import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass
class Curves:
    """One panel: for each algorithm, seconds at each x where it has a schedule; and the limit."""

    x_label: str
    seconds: dict[str, dict[float, float]] = field(default_factory=dict)
    limit_s: dict[float, float] = field(default_factory=dict)

    def add(self, name: str, x: float, seconds: float, limit_s: float) -> None:
        """One point; the limit at one x is the same for all."""
        self.seconds.setdefault(name, {})[x] = seconds
        self.limit_s[x] = limit_s


def draw_curves(panels: Sequence[Curves], title: str, path: Path) -> None:
    """Draw the panels side by side to a PNG, SVG or PDF file."""
    figure = new_figure(6.5 * len(panels), 5)
    names = list(dict.fromkeys(name for panel in panels for name in panel.seconds))
    colour = {name: f"C{index % 10}" for index, name in enumerate(names)}
    for index, panel in enumerate(panels):
        axes: Axes = figure.add_subplot(1, len(panels), index + 1)
        for name, points in panel.seconds.items():
            place = names.index(name)  # later curves are thinner, so that one on top of another shows
            style, width = ("-" if place < 10 else "--"), max(0.8, 4.0 - 0.4 * place)
            axes.plot(*_xy(points), style, color=colour[name], marker="o", ms=3, lw=width, label=name)
        if any(panel.limit_s.values()):
            axes.plot(*_xy(panel.limit_s), ":", color="black", label="limit")
        axes.set_xscale("log", base=10 if index == 0 else 2)
        axes.set_yscale("log")
        if index > 0:
            xs = sorted(panel.limit_s)
            axes.set_xticks(xs, labels=[f"{x:g}" for x in xs])
            axes.minorticks_off()
        axes.set_xlabel(panel.x_label)
        axes.set_ylabel("time after the last arrival [s]")
        axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, fontsize=11, parse_math=False)
    save_figure(figure, path)


def _xy(points: Mapping[float, float]) -> tuple[list[float], list[float]]:
    xs = sorted(x for x in points if points[x] > 0)  # the axes are logarithmic
    return xs, [points[x] for x in xs]
