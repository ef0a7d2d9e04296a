"""The tables of a replay, and what a reader needs to judge them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from paceline.bench.figures import Ratio
from paceline.bench.results import Machine
from paceline.bench.table import machine_words
from paceline.bench.training.results import Row, Setting, SweepResults, TrainingResults
from paceline.bench.training.strategies import TUNED
from paceline.units import format_duration, format_size


def training_table(results: TrainingResults) -> Table:
    """One line a strategy, the computation alone last."""
    bounded = results.setting.bounds is not None
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("strategy", no_wrap=True)
    names = ["iteration", "25%", "75%", "n", "exposed", "hidden", "x ddp-gloo (rounds)", "x ddp (rounds)"]
    for name in [*names, *(["/ DeAR's bound", "/ layers' bound", "/ wait-free bound"] if bounded else []), "#wrong"]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in results.rows:
        time = row.time
        cells = [row.strategy, *map(format_duration, (time.median_s, time.lower_quartile_s, time.upper_quartile_s))]
        cells += [str(time.count), *_communication(row), _words(row.ddp_gloo_over), _words(row.ddp_over)]
        if bounded:
            cells += [f"{one:.3f}" for one in (row.over_dear_bound, row.over_layered_bound, row.over_wait_free_bound)]
        table.add_row(*cells, str(row.wrong))
    return table


def sweep_table(results: SweepResults) -> Table:
    """One line a bucket size, the one found by search last."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("bucket", "of the true model", "iteration", "25%", "75%", "n", "/ best of grid", "#wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    best_s = results.best.time.median_s
    for point in [*results.grid, results.best, results.tuned]:
        time, size = point.time, point.bucket_bytes
        sizes = [format_size(size), format_size(size / results.setting.size_factor)] if size else ["tuned", ""]
        times = map(format_duration, (time.median_s, time.lower_quartile_s, time.upper_quartile_s))
        table.add_row(*sizes, *times, str(time.count), f"{time.median_s / best_s:.3f}", str(point.wrong))
    return table


def _communication(row: Row) -> list[str]:
    return [format_duration(row.exposed_s), "-" if row.hidden_s is None else format_duration(row.hidden_s)]


def _words(ratio: Ratio | None) -> str:
    return f"{ratio.of_medians:.3f} ({ratio.least:.3f}-{ratio.most:.3f})" if ratio else "-"


def training_legend(results: TrainingResults) -> str:
    """What the columns of a comparison mean."""
    names_of: dict[int, list[str]] = {}
    for name, size in results.setting.bucket_bytes.items():
        if not name.endswith(TUNED):
            names_of.setdefault(size, []).append(name)
    buckets = "; ".join(f"{', '.join(names)}: buckets of {format_size(size)}" for size, names in names_of.items())
    return (
        f"{buckets}; {results.rounds} interleaved rounds; "
        "exposed: what an iteration is longer than alone; hidden: the rest of the all-reduce at the limit; "
        "x: a peer's time over this one's"
    )


def sweep_legend(results: SweepResults) -> str:
    """What the search has reached."""
    return (
        f"{results.strategy}, one bucket size after another; then the best of them in turns with tuned, which has "
        f"searched for {results.tuning_iterations} iterations: {_words(results.tuned_over_best)} of the best"
    )


def caption(setting: Setting, machine: Machine) -> Iterable[str]:
    """What was replayed, at which scale, against which bounds, where and by which command."""
    yield (
        f"{setting.model}: {setting.num_elements:,} elements in {setting.num_tensors} tensors; "
        f"sizes x {setting.size_factor:.4g} ({format_size(setting.gradient_bytes)}), "
        f"times x {setting.time_factor:.4g}; {setting.num_ranks} ranks on {setting.place}"
    )
    yield f"times: {setting.source}"
    yield f"communication to computation as with {setting.network}; its start-ups are not replayed, the lab's are real"
    computed = f"forward {format_duration(setting.forward_s)}, backward {format_duration(setting.backward_s)}"
    if setting.bounds is None or setting.layered_s is None:
        yield f"{computed}; on one host links have no limit, so there are no bounds"
    else:
        bounds = setting.bounds
        yield (
            f"{computed}; at the limit of the links reduce-scatter {format_duration(bounds.reduce_scatter_s)}, "
            f"all-gather {format_duration(bounds.all_gather_s)}; DeAR's bound {format_duration(bounds.dear_s)}, "
            f"wait-free {format_duration(bounds.wait_free_s)}: ideal ratio {bounds.ideal_ratio:.3f}"
        )
        yield (
            f"DeAR's bound with the gradients and times of these layers, in buckets of any size: "
            f"{format_duration(setting.layered_s)}, {setting.layered_s / bounds.dear_s:.3f} of it"
        )
    yield "iteration: median of n, each as long as on its slowest rank"
    yield from machine_words(machine)
    yield f"{machine.date}: {machine.command}"
