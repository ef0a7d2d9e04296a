"""Pictures of a replay: strategies against the bounds, or iteration time against bucket size."""

from __future__ import annotations

from pathlib import Path

from paceline.bench.training.results import SweepResults, TrainingResults
from paceline.bench.training.strategies import ALONE
from paceline.draw.canvas import new_figure, save_figure


def draw_training(results: TrainingResults, path: Path) -> None:
    """A bar a strategy: computation, and what communication adds; quartiles as whiskers; bounds as lines."""
    figure = new_figure(9, 4.5)
    axes = figure.add_subplot()
    alone_s = results.of(ALONE).time.median_s
    names = [row.strategy for row in results.rows]
    medians = [row.time.median_s for row in results.rows]
    whiskers = [
        [row.time.median_s - row.time.lower_quartile_s for row in results.rows],
        [row.time.upper_quartile_s - row.time.median_s for row in results.rows],
    ]
    computed = [min(alone_s, median) for median in medians]
    axes.barh(names, computed, color="tab:gray", label="computation")
    exposed = [median - part for median, part in zip(medians, computed, strict=True)]
    axes.barh(names, exposed, left=computed, xerr=whiskers, color="tab:orange", label="exposed communication")
    if results.setting.bounds is not None:
        axes.axvline(results.setting.bounds.layers_s, color="tab:green", ls="--", label="layers' bound")
        axes.axvline(results.setting.bounds.wait_free_layers_s, color="tab:red", ls=":", label="DDP's layers' bound")
    axes.invert_yaxis()
    axes.set_xlabel("iteration [s]")
    axes.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4)
    setting = results.setting
    figure.suptitle(f"{setting.model}, {setting.network}, {setting.num_ranks} ranks on {setting.place}", fontsize=11)
    save_figure(figure, path)


def draw_sweep(results: SweepResults, path: Path) -> None:
    """Medians with quartiles, and the tuned time as a line."""
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    sizes = [float(point.bucket_bytes or 1) for point in results.grid]
    axes.plot(sizes, [point.time.median_s for point in results.grid], marker="o", ms=4, label="fixed")
    low = [point.time.lower_quartile_s for point in results.grid]
    high = [point.time.upper_quartile_s for point in results.grid]
    axes.fill_between(sizes, low, high, alpha=0.2, lw=0)
    axes.axhline(results.tuned.time.median_s, color="tab:green", ls="--", label="tuned")
    if results.setting.bounds is not None:
        axes.axhline(results.setting.bounds.layers_s, color="black", ls=":", label="layers' bound")
    axes.set_xscale("log")
    axes.set_xlabel("bucket [bytes]")
    axes.set_ylabel("iteration [s], with quartiles")
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize=9, frameon=False)
    figure.suptitle(f"{results.setting.model}, {results.setting.network}, {results.strategy}", fontsize=11)
    save_figure(figure, path)
