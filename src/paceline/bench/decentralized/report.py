"""The tables and the picture of a run, and what a reader needs to judge them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.table import Table

from paceline.bench.decentralized.results import DecentralizedResults, Spread, Training, of_own
from paceline.bench.table import machine_words
from paceline.draw.canvas import new_figure, save_figure
from paceline.units import format_duration, format_rate, format_size

BUSY = 0.7
"""Share of all cores from which ranks wait for processors rather than for what is emulated."""


def scenario_table(results: DecentralizedResults, scenario: str) -> Table:
    """Return a line for each scheme: medians over seeds, with the least and the most where they matter."""
    best = results.best_ddp(scenario)
    slow = any(factor != 1.0 for factor in results.slow[scenario])
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0), title=_title(scenario))
    table.title_justify = "left"
    table.add_column("scheme", no_wrap=True)
    names = ["to target (seeds)", f"{best or 'best ddp'} / it (seeds)", "own weights", "ratio", "samples", "steps/s"]
    names += ["slow's"] if slow else []
    names += ["outside", "waits", "consensus", "sent", "groups", "loss", "accuracy", "busy"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for scheme in results.schemes:
        runs = results.of(scheme, scenario)
        if not runs:
            table.add_row(scheme, "failed", *[""] * (len(names) - 1))
            continue
        cells = [_target(runs, results.time_s(scheme, scenario)), _ratio(results.ratio(best, scheme, scenario))]
        cells.append(_target(runs, results.time_s(scheme, scenario, of_own), brief=True))
        own = results.ratio(best, scheme, scenario, of_own)
        cells.append("-" if own is None else f"{own.median:.2f}x")
        cells.append(_number(_median(runs, lambda one: one.samples), ",.0f"))
        cells.append(_rate(results.rate(scheme, scenario, fast=True)))
        cells += [_rate(results.rate(scheme, scenario, fast=False))] if slow else []
        cells.append(_share(runs, lambda one: one.outside_s))
        cells.append(_share(runs, lambda one: one.wait_s))
        cells.append(_number(_median(runs, lambda one: one.consensus_share), ".3f"))
        cells.append(_sent(runs))
        cells.append(group_words(runs))
        cells.append(_number(_median(runs, lambda one: one.loss), ".3f"))
        cells.append(_number(_median(runs, lambda one: one.accuracy), ".1%"))
        cells.append(_number(_median(runs, lambda one: one.busy), ".0%"))
        table.add_row(scheme, *cells, style="bold" if scheme == best else "")
    return table


def _title(scenario: str) -> str:
    return "all workers alike" if scenario == "none" else f"slow: {scenario}"


def _median(runs: list[Training], figure: Callable[[Training], float | None]) -> float | None:
    known = [value for one in runs if (value := figure(one)) is not None]
    return statistics.median(known) if known else None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _target(runs: list[Training], spread: Spread | None, *, brief: bool = False) -> str:
    if spread is None or math.isinf(spread.median):
        return f"> {format_duration(max(one.elapsed_s for one in runs))}"
    most = "not" if math.isinf(spread.most) else f"{spread.most:.3g}"
    span = f" ({spread.least:.3g}-{most})" if len(runs) > 1 and not brief else ""
    return f"{format_duration(spread.median)}{span}"


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.2f}x ({spread.least:.2f}-{spread.most:.2f})"


def _rate(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.2f}"


def _share(runs: list[Training], seconds: Callable[[Training], list[float]]) -> str:
    """Return a share of the time of training, the mean of all workers."""
    shares = [statistics.fmean(seconds(one)) / one.elapsed_s for one in runs if seconds(one)]
    return f"{statistics.median(shares):.0%}" if shares else "-"


def _sent(runs: list[Training]) -> str:
    """Return what a worker sends in a second."""
    rates = [statistics.fmean(one.sent_bytes) / one.elapsed_s for one in runs if one.sent_bytes]
    return f"{format_size(statistics.median(rates))}/s" if rates else "-"


def group_words(runs: list[Training]) -> str:
    """Return the sizes of groups and their shares, as ``2: 75% 4: 25%``; failed ones behind an exclamation mark."""
    counts: dict[int, int] = {}
    for one in runs:
        for size, number in one.groups.items():
            counts[size] = counts.get(size, 0) + number
    total, failed = sum(counts.values()), sum(one.failed_groups for one in runs)
    words = " ".join(f"{size}: {number / total:.0%}" for size, number in sorted(counts.items()) if number)
    return (words or "-") + (f" !{failed}" if failed else "")


def legend(results: DecentralizedResults) -> Iterator[str]:
    """Say what was trained, what the columns mean, and what casts doubt on the figures."""
    one = results.setting
    yield (
        f"{one.num_workers} workers on {one.place}; {one.parameters:,} parameters ({format_size(one.vector_bytes)}); "
        f"a step computes {format_duration(one.compute_s)}, give or take {one.jitter:.0%}; an all-reduce takes "
        + (format_duration(one.all_reduce_s) if one.all_reduce_s else "no set time on one host")
        + (f", links have {format_rate(one.up_bytes_per_s)}" if one.up_bytes_per_s else "")
        + (f"; all of that stretched {one.stretch:g} times" if one.stretch != 1 else "")
    )
    until = f"{one.steps} steps a worker" if one.steps else f"loss {one.target:g}"
    yield (
        f"batches of {one.batch}; SGD, learning rate {one.learning_rate:g}, reached in {one.lr_warmup} steps, momentum "
        f"{one.momentum:g}; until {until} or {format_duration(one.give_up_s)}; {one.seeds} seeds: medians, in brackets "
        "the least and the most"
    )
    yield (
        f"to target: when the mean of all workers' weights first has a loss of {one.target:g} or less on held-out "
        f"samples, above the least possible; own weights: when the mean loss of the last {one.window} batches of all "
        "workers is there, each batch before its step; samples: of all workers until the first"
    )
    yield (
        "steps/s: of a worker, the mean of those that are not slow; outside: share of time outside computation; waits: "
        "share that a scheme counts as waiting; consensus: workers' distance from their mean over its norm, before the "
        "last average; sent: by a worker; loss and accuracy: of the final average, held-out samples (alone: worker 0)"
    )
    for name, times in results.probes.items():
        tried = "; ".join(f"{of} {format_duration(took)}" for of, took in times.items())
        yield f"{name} tried buckets: {tried}; took {min(times, key=lambda of: times[of])}"
    yield from warnings(results)
    yield from machine_words(results.machine)
    yield f"{results.machine.date}: {results.machine.command}"


def warnings(results: DecentralizedResults) -> Iterator[str]:
    """Name trainings that failed, differing final weights, and busy cores."""
    for one in results.trainings:
        if one.failed:
            yield f"failed: {one.failed}"
        if one.weights_differ:
            yield f"{one.scheme}, {one.scenario}, seed {one.seed}: the workers' final weights differ"
    busiest = max((one for one in results.trainings), key=lambda one: one.busy, default=None)
    if busiest is not None:
        words = f"cores busy: up to {busiest.busy:.0%} ({busiest.scheme}, {busiest.scenario})"
        if busiest.busy > BUSY:
            words += (
                f"; above {BUSY:.0%} workers wait for processors: repeat with --stretch {results.setting.stretch * 2:g}"
            )
        yield words


def draw(results: DecentralizedResults, path: Path) -> None:
    """Draw the loss against time: a panel a scenario, a colour a scheme, a line a seed."""
    columns = min(3, len(results.scenarios))
    rows = -(-len(results.scenarios) // columns)
    figure = new_figure(6 * columns, 4.2 * rows)
    for place, scenario in enumerate(results.scenarios):
        axes = figure.add_subplot(rows, columns, place + 1)
        for number, scheme in enumerate(results.schemes):
            for index, one in enumerate(results.of(scheme, scenario)):
                times, losses = [time for time, _ in one.mean_curve], [loss for _, loss in one.mean_curve]
                style = "-" if number < 10 else "--"
                label = scheme if index == 0 else None
                axes.plot(times, losses, style, color=f"C{number % 10}", lw=1.5, alpha=0.8, label=label)
        axes.axhline(results.setting.target, color="black", ls=":", lw=1)
        shown = [spread.most for name in results.schemes if (spread := results.time_s(name, scenario))]
        reached = [time for time in shown if math.isfinite(time)]
        if reached:
            axes.set_xlim(0, 1.1 * max(reached))
        axes.set_ylim(0.8 * results.setting.target, None)
        axes.set_yscale("log")
        axes.set_title(_title(scenario), fontsize=10)
        axes.set_xlabel("time [s]")
        axes.set_ylabel("loss of the mean of all weights, above the least possible")
        axes.grid(which="both", alpha=0.3)
        if place == 0:
            axes.legend(fontsize=8, frameon=False)
    setting = results.setting
    figure.suptitle(f"{setting.num_workers} workers on {setting.place}, {results.machine.date}", fontsize=11)
    save_figure(figure, path)
