"""Timelines of trainings: a panel a training, a row a rank, time to the right; what each rank did, and what flew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from paceline.draw.canvas import new_figure, save_figure

_HEIGHT, _THIN, _GAP = 0.46, 0.2, 0.04


class Activity(Enum):
    """What a bar is about, and its name in the legend."""

    LOADING = "late: loading data"
    COMPUTING = "computing"
    WAITING = "waiting"
    COMMUNICATING = "communication under way"


_COLOUR = {
    Activity.LOADING: "#e8853d",
    Activity.COMPUTING: "#3b6fb6",
    Activity.WAITING: "#d9d9d9",
    Activity.COMMUNICATING: "#4f9d5b",
}


@dataclass(frozen=True)
class Bar:
    """What went on from one moment to another, in seconds."""

    activity: Activity
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Panel:
    """One training: the bars of each rank, and marks where iterations begin."""

    title: str
    bars: Sequence[Sequence[Bar]]
    marks_s: Sequence[float] = ()


def draw_timelines(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw the panels below each other, on one scale, to a PNG, SVG or PDF file."""
    from matplotlib.patches import Patch

    figure = new_figure(11, 0.9 + sum(0.7 + 0.42 * len(panel.bars) for panel in panels))
    end_s = max((bar.end_s for panel in panels for row in panel.bars for bar in row), default=1.0)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(len(panels), 1, index + 1)
        for rank, row in enumerate(panel.bars):
            for activity in Activity:
                spans = [
                    (bar.begin_s * 1e3, (bar.end_s - bar.begin_s) * 1e3) for bar in row if bar.activity is activity
                ]
                thin = activity is Activity.COMMUNICATING
                place = (rank + _HEIGHT / 2 + _GAP, _THIN) if thin else (rank - _HEIGHT / 2, _HEIGHT)
                axes.broken_barh(spans, place, facecolors=_COLOUR[activity], linewidth=0)
        for mark_s in panel.marks_s:
            axes.axvline(mark_s * 1e3, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(panel.bars)), labels=[f"rank {rank}" for rank in range(len(panel.bars))])
        axes.set_ylim(len(panel.bars) - 0.5, -0.5)
        axes.set_xlim(0, end_s * 1e3)
        axes.set_title(panel.title, fontsize=10, loc="left", parse_math=False)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("time [ms]; dotted: the late rank begins an iteration")
    handles = [Patch(color=_COLOUR[activity], label=activity.value) for activity in Activity]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, parse_math=False)
    save_figure(figure, path)
