"""The tables of a replay, and what a reader needs to judge them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from paceline.bench.figures import Ratio
from paceline.bench.results import Machine
from paceline.bench.table import machine_words
from paceline.bench.training.results import Setting, SweepResults, TrainingResults
from paceline.bench.training.strategies import DEAR, Buckets
from paceline.units import format_duration, format_size

_PEERS = (("ddp-gloo", "ddp_gloo_over"), ("ddp", "ddp_over"))
_BOUNDS = (
    ("/ bound", "over_bound"),
    ("/ layers' bound", "over_layers_bound"),
    ("/ DDP's layers' bound", "over_wait_free_layers_bound"),
)
"""Headers of columns, and the fields of a row they show."""


def training_table(results: TrainingResults) -> Table:
    """One line a strategy, the computation alone last; columns of what was not measured are left out."""
    measured = {row.strategy for row in results.rows}
    peers = [("x best ddp (rounds)", "best_ddp_over")] if results.best_ddp else []
    peers += [(f"x {name} (rounds)", field) for name, field in _PEERS if name in measured]
    bounds = _BOUNDS if results.setting.bounds else ()
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("strategy", no_wrap=True)
    names = ["iteration", "25%", "75%", "n", "exposed", *(name for name, _ in (*peers, *bounds)), "#wrong"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in results.rows:
        time = row.time
        cells = [row.strategy, *map(format_duration, (time.median_s, time.lower_quartile_s, time.upper_quartile_s))]
        cells += [str(time.count), format_duration(row.exposed_s)]
        cells += [_words(getattr(row, field)) for _, field in peers]
        cells += [f"{getattr(row, field):.3f}" for _, field in bounds]
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


def _words(ratio: Ratio | None) -> str:
    return f"{ratio.of_medians:.3f} ({ratio.least:.3f}-{ratio.most:.3f})" if ratio else "-"


def training_legend(results: TrainingResults) -> Iterator[str]:
    """What the columns of a comparison mean, what each strategy fuses, and what the bounds leave to be gained."""
    factor = results.setting.size_factor
    names_of: dict[Buckets, list[str]] = {}
    for name, buckets in results.setting.buckets.items():
        names_of.setdefault(buckets, []).append(name)
    fused = "; ".join(f"{', '.join(names)}: {_fused(buckets, factor)}" for buckets, names in names_of.items())
    yield f"buckets, in bytes of the true model: {fused}"
    for name, trials in results.tuning.items():
        tried = [f"{_fused(trial.buckets, factor)}: {format_duration(trial.time.median_s)}" for trial in trials]
        yield f"{name} tried {'; '.join(tried)}; took {_fused(results.setting.buckets[name], factor)}"
    yield (
        f"{results.rounds} interleaved rounds; exposed: what an iteration is longer than alone; "
        "x: a peer's time over this one's; best ddp: the fastest ddp of this run"
    )
    yield from goals(results)


def _fused(buckets: Buckets, size_factor: float) -> str:
    """``26 MB``, or ``26 MB (first 1 MB)``."""
    size = format_size(buckets.size / size_factor)
    return f"{size} (first {format_size(buckets.first / size_factor)})" if buckets.first else size


def goals(results: TrainingResults) -> Iterator[str]:
    """For each DataParallel, what it has gained over the best DDP, and what the bounds allow."""
    bounds, best = results.setting.bounds, results.best_ddp
    for row in results.rows:
        if best is None or not row.strategy.startswith(DEAR):
            continue
        words = f"{best} (the best DDP) / {row.strategy}: {_words(row.best_ddp_over)}"
        if bounds is not None:
            most = results.of(best).time.median_s / bounds.layers_s
            words += (
                f"; the bounds allow {bounds.ideal_ratio:.3f} over a DDP that is at its bound, "
                f"{most:.3f} over {best} as measured"
            )
        yield words


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
    yield f"communication to computation: {setting.network}; start-ups are not replayed, the lab's are real"
    computed = f"forward {format_duration(setting.forward_s)}, backward {format_duration(setting.backward_s)}"
    if setting.clip:
        yield "gradients are clipped before each step"
    if setting.scaler:
        yield "a GradScaler scales the loss and makes each step"
    if setting.bounds is None:
        yield f"{computed}; on one host links have no limit, so there are no bounds"
    else:
        bounds = setting.bounds
        yield (
            f"{computed}; at the limit of the links reduce-scatter {format_duration(bounds.reduce_scatter_s)}, "
            f"all-gather {format_duration(bounds.all_gather_s)}"
        )
        yield (
            f"no schedule takes less than {format_duration(bounds.any_schedule_s)} (bound), with these layers "
            f"{format_duration(bounds.layers_s)}; no DDP less than {format_duration(bounds.wait_free_s)}, with these "
            f"layers {format_duration(bounds.wait_free_layers_s)}; ideal ratio of the layers' bounds "
            f"{bounds.ideal_ratio:.3f}; DeAR without early gathers {format_duration(bounds.dear_s)}"
        )
    yield "iteration: median of n, each as long as on its slowest rank"
    yield from machine_words(machine)
    yield f"{machine.date}: {machine.command}"
