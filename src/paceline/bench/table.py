"""The table of a run: nccl-tests' columns, then the shares and ratios."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.table import Table

from paceline.bench.results import Machine, Results, Row
from paceline.units import format_duration, format_size

_BUSY = 0.5  # load average a core from which others disturb


def results_table(results: Results) -> Table:
    """One line for each size and contender, the subject first."""
    limited = any(row.limit_s for row in results.rows)
    compared = any(row.over_subject for row in results.rows)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("size", "count"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("type", "redop", "contender"):
        table.add_column(name, no_wrap=True)
    for name in ("time", "25%", "75%", "mean", "n", "algbw", "busbw", "#wrong"):
        table.add_column(name, justify="right", no_wrap=True)
    if results.pause:
        table.add_column("apart", justify="right", no_wrap=True)
    counted = any(row.sent_bytes for row in results.rows)
    if counted:
        for name in ("sent", "received", "all ports"):
            table.add_column(name, justify="right", no_wrap=True)
    if limited:
        table.add_column("of limit", justify="right", no_wrap=True)
    if compared:
        table.add_column(f"/ {results.subject} (rounds)", justify="right", no_wrap=True)
    for row in results.rows:
        first = row.contender == results.subject
        cells = [str(row.size_bytes), str(row.count), results.dtype, results.redop] if first else [""] * 4
        cells += [row.contender, *_times(row), *_bandwidths(row), str(row.wrong)]
        if results.pause:
            cells.append(format_duration(row.arrival_s or 0.0))
        if counted:
            cells += _traffic(row)
        if limited:
            cells.append(f"{row.share_of_limit:.3f}" if row.share_of_limit else "-")
        if compared:
            cells.append(ratio_words(row))
        table.add_row(*cells, style="bold" if first and compared else "")
    return table


def _times(row: Row) -> list[str]:
    time = row.time
    figures = (time.median_s, time.lower_quartile_s, time.upper_quartile_s, time.loop_mean_s)
    return [*map(format_duration, figures), str(time.count)]


def _bandwidths(row: Row) -> list[str]:
    if not row.size_bytes:
        return ["-", "-"]
    return [f"{rate / 1e9:.3g}" for rate in (row.algbw_bytes_per_s, row.busbw_bytes_per_s)]


def _traffic(row: Row) -> list[str]:
    """The most that a host sent and received in a call, and what crossed all ports both ways."""
    if not row.sent_bytes:
        return ["-"] * 3
    most = (max(row.sent_bytes), max(row.received_bytes), sum(row.sent_bytes) + sum(row.received_bytes))
    return [format_size(num_bytes) for num_bytes in most]


def ratio_words(row: Row) -> str:
    """``2.31x (2.2-2.44)``: the contender's time over the subject's, and the span of the rounds."""
    ratio = row.over_subject
    return f"{ratio.of_medians:.3g}x ({ratio.least:.3g}-{ratio.most:.3g})" if ratio else ""


def caption(results: Results) -> Iterable[str]:
    """What a reader needs to judge the figures: where, with what, when, by which command."""
    machine = results.machine
    memory = ", torch's tensors in huge pages" if results.memory == "huge" else ""
    beside = f" beside {results.beside} on a group of its own" if results.beside else ""
    loss = f", {results.loss:.3g} of the packets to a host lost" if results.loss else ""
    yield f"{results.operation}{beside}, {results.ranks} on {results.place}{loss}{memory}"
    yield from machine_words(machine)
    yield from versions_words(results.versions, results.environment)
    yield f"{machine.date}: {machine.command}"
    how = "each as long as on its slowest rank; mean: a loop's time over its iterations"
    if results.pause:
        does = {"sleep": "sleeps", "compute": "computes"}[results.pause.kind]
        how = (
            f"each from the last rank's call to the last rank's end, after each rank {does} for "
            f"{format_duration(results.pause.seconds)}; apart: median time from the first call to the last"
        )
    yield (
        f"time: median of n iterations, {how}; {results.rounds} interleaved rounds; "
        "algbw and busbw in GB/s, of the median"
    )
    if results.beside:
        both = f"{results.operation} and {results.beside}"
        yield f"an iteration ends when {both} are both done; algbw and busbw are of the first"
    if any(row.sent_bytes for row in results.rows):
        yield (
            "sent, received: the most that crossed a host's port in a call, with all headers, warm-ups and barriers "
            "included; all ports: both of all hosts together"
        )


def machine_words(machine: Machine) -> Iterable[str]:
    """The machine, and whether it had other work."""
    yield (
        f"{machine.cores} cores ({machine.processor}), Linux {machine.kernel}, Python {machine.python}; "
        f"load average {machine.load_average:.2f} before"
    )
    if machine.load_average > _BUSY * machine.cores:
        yield "the machine was busy with something else: repeat this when it is idle"


def versions_words(
    versions: Mapping[str, Mapping[str, str]], environment: Mapping[str, Mapping[str, str]]
) -> Iterable[str]:
    """Each contender's versions and variables."""
    for contender, found in versions.items():
        variables = "".join(f", {name}={value}" for name, value in environment.get(contender, {}).items())
        yield f"{contender}: {', '.join(f'{name} {version}' for name, version in found.items())}{variables}"
