"""``paceline bench allreduce`` and its like: collectives measured beside peers', against the limit of the links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.bench.contenders import PEERS, Contender
from paceline.bench.figures import BESIDE, Operation
from paceline.bench.late import SWEEPS, LateQuestion, late_contender, run_late
from paceline.bench.late_report import draw_late, late_caption, late_table
from paceline.bench.measure import Effort, Question
from paceline.bench.plot import draw_results
from paceline.bench.rank_process.messages import Pause
from paceline.bench.results import Results
from paceline.bench.run import run
from paceline.bench.sizes import ITEM_BYTES, parse_sizes
from paceline.bench.table import caption, results_table
from paceline.cli import arguments, tables
from paceline.draw.canvas import check_picture_path
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster
from paceline.units import parse_duration

LATE_PEERS = ("ring", "messages", *PEERS)
"""With late ranks: our own ring, and Paceline over Gloo's messages, too."""

_DEFAULT_LATE_PEERS = "ring,messages,gloo"
LAB_HELP = (
    "Measure between the lab's hosts, like lan8 or lan2x4, or of a TOML/JSON file (needs root). Default: this host."
)
LATE_HELP = "Measure what remains after the last rank has arrived; several times, or with commas. An allreduce only."
_WIDTH = 150  # a table of figures is worth nothing with its figures cut off


def bench(
    context: typer.Context,
    sizes: Annotated[
        str, typer.Option(help="FIRST:LAST in factors of 4, FIRST:LAST:xFACTOR, or a list with commas.")
    ] = "4KB:64MB",
    ranks: Annotated[int | None, typer.Option(help="Number of ranks. Default: 2, or those of the lab.")] = None,
    lab: Annotated[str | None, typer.Option("--lab", "--cluster", help=LAB_HELP)] = None,
    backend: Annotated[str, typer.Option(help="The subject: a torch.distributed backend.")] = "paceline",
    peers: Annotated[
        str | None, typer.Option(help="gloo, openmpi, mpich, with commas; or none. Default: gloo.", metavar="NAMES")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="The subject's algorithm, like ring; several with commas are contenders.", metavar="NAMES"),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(ITEM_BYTES)}.")] = "float32",
    seconds: Annotated[float, typer.Option(help="Time for a contender at a size, warm-up not counted.")] = 2.0,
    iterations: Annotated[int | None, typer.Option(help="Exactly so many, instead of --seconds.")] = None,
    rounds: Annotated[int, typer.Option(help="How often the contenders take turns.")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without an answer after which a rank hangs.")] = 120.0,
    memory: Annotated[
        str, typer.Option(help="torch's tensors: as torch allocates them, or in huge pages (torch, huge).")
    ] = "torch",
    sleep: Annotated[
        str | None, typer.Option(help="All ranks sleep so long before each call, like 20ms.", metavar="DURATION")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="All ranks compute so long before each call.", metavar="DURATION")
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(help="Run this collective, too, at the same time on a group of its own.", metavar="NAME"),
    ] = None,
    loss: Annotated[str, typer.Option(help="Share of packets lost on the way to a host of the lab, like 1%.")] = "0",
    late: Annotated[list[str] | None, typer.Option(help=LATE_HELP, metavar="RANK:DURATION")] = None,
    late_sweep: Annotated[
        str | None, typer.Option(help=f"Vary one of {', '.join(SWEEPS)}; the last rank is late unless --late says.")
    ] = None,
    no_install: Annotated[bool, typer.Option("--no-install", help="Do not install an MPI that is missing.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Save all figures.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot time against size, or what is swept (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Measure this collective: nccl-tests' table, beside peers in one interleaved run.

    \b
    Examples:
      paceline bench allreduce --sizes 4KB:64MB --ranks 4 --peers gloo,openmpi,mpich
      paceline bench allgather --sizes 64MB --lab lan8 --json allgather.json
      paceline bench allgather --sizes 64MB --lab uplink8 --algorithm ring,multicast --loss 1%
      paceline bench allgather --sizes 64MB --lab uplink8 --beside reducescatter
      paceline bench allreduce --sizes 4KB --ranks 4 --sleep 20ms
      paceline bench allreduce --sizes 64MB --lab lan8 --late 3:1500ms --peers ring,messages,gloo
      paceline bench allreduce --sizes 64MB --lab lan8 --late-sweep delay --plot delay.png
    """
    if plot is not None:
        check_picture_path(plot)
    if json is not None and not json.absolute().parent.is_dir():
        raise UsageError(f"cannot write {json}: there is no folder {json.absolute().parent}")
    subject, *others = _contenders(backend, algorithm)
    lost = arguments.read_share(loss, "--loss")
    if lost and lab is None:
        raise UsageError("--loss is of packets between the lab's hosts: give --lab, too")
    if (late or late_sweep) and (others or lost or beside):
        raise UsageError("--late and --late-sweep take one --algorithm, and neither --loss nor --beside")
    question = Question(
        operation=Operation(context.command.name),
        sizes=parse_sizes(sizes),
        num_ranks=_num_ranks(ranks, lab, late_sweep),
        subject=subject,
        peers=[*others, *_peers(peers, backend)] if not (late or late_sweep) else [],
        dtype=dtype,
        effort=Effort(seconds, iterations, rounds),
        timeout_s=timeout,
        memory=memory,
        pause=_pause(sleep, compute),
        beside=_beside(beside),
    )
    if late or late_sweep:
        if question.pause is not None:
            raise UsageError("--late and --late-sweep measure ranks that do not pause: leave --sleep and --compute out")
        results = run_late(_late_question(question, late, late_sweep, peers, algorithm), lab, install=not no_install)
        _report(results, late_table(results), late_caption(results), json, plot, draw_late)
    else:
        results = run(question, lab, loss=lost, install=not no_install)
        _report(results, results_table(results), caption(results), json, plot, draw_results)


def _report(
    results: Results,
    table: Table,
    words: Iterable[str],
    json: Path | None,
    plot: Path | None,
    draw: Callable[[Results, Path], None],
) -> None:
    """Print the table, save and draw what is asked for, and exit with 1 if the subject was wrong."""
    out = tables.console()
    Console(highlight=False, width=max(out.width, _WIDTH)).print(table)
    out.print()
    for line in words:
        out.print(escape(line), style="dim", soft_wrap=True)
    if json is not None:
        results.save(json)
        out.print(f"saved {escape(str(json))}")
    if plot is not None:
        draw(results, plot)
        out.print(f"drew {escape(str(plot))}")
    if any(row.wrong for row in results.rows if row.over_subject is None):
        raise typer.Exit(1)


def _late_question(
    question: Question, late: list[str] | None, sweep: str | None, peers: str | None, algorithm: str | None
) -> LateQuestion:
    """The question with its late ranks, and the contenders that make sense with those."""
    lateness: dict[int, float] = {}
    for entry in ",".join(late or []).split(",") if late else [f"{question.num_ranks - 1}:1s"]:
        if sweep == "delay" and entry.strip().isdecimal():
            entry = f"{entry}:1s"  # only the proportions count
        lateness.update(_one_late(entry, lateness))
    if sweep in SWEEPS and sweep != "delay" and not late:
        raise UsageError(f"--late-sweep {sweep} needs --late, like --late {question.num_ranks - 1}:500ms")
    names = _DEFAULT_LATE_PEERS if peers is None else peers
    chosen = [name.strip() for name in names.split(",") if name.strip() not in ("", "none", question.subject.name)]
    unknown = [name for name in chosen if name not in LATE_PEERS]
    if unknown:
        raise UsageError(f"there is no peer {unknown[0]!r} to measure against; there are {', '.join(LATE_PEERS)}")
    subject = late_contender(question.subject.name, lateness, algorithm)
    others = [late_contender(name, lateness) for name in chosen]
    return LateQuestion(replace(question, subject=subject, peers=others), lateness, sweep)


def _one_late(entry: str, before: Mapping[int, float]) -> dict[int, float]:
    rank, colon, duration = entry.strip().partition(":")
    if not rank.isdecimal() or not colon:
        raise UsageError(f"--late takes RANK:DURATION, like 3:500ms, not {entry!r}")
    if int(rank) in before:
        raise UsageError(f"--late names rank {rank} twice")
    return {int(rank): parse_duration(duration)}


def _contenders(backend: str, algorithms: str | None) -> list[Contender]:
    """The subject, and with it each further algorithm of the same backend. Several are called by their algorithms."""
    names = [name.strip() for name in (algorithms or "").split(",") if name.strip()]
    if len(names) < 2:
        return [Contender(backend, {"PACELINE_ALGORITHM": name} if names else {}) for name in names or [""]]
    return [Contender(name, {"PACELINE_ALGORITHM": name}, backend=backend) for name in names]


def _beside(name: str | None) -> Operation | None:
    known = {operation.value: operation for operation in BESIDE}
    if name is not None and name not in known:
        raise UsageError(f"--beside is one of {', '.join(sorted(known))}, not {name!r}")
    return None if name is None else known[name]


def _pause(sleep: str | None, compute: str | None) -> Pause | None:
    if sleep and compute:
        raise UsageError("ranks either --sleep or --compute before a call: give one of the two")
    duration = sleep or compute
    return Pause("sleep" if sleep else "compute", parse_duration(duration)) if duration else None


def _num_ranks(ranks: int | None, lab: str | None, late_sweep: str | None) -> int:
    if lab is None:
        return (4 if late_sweep else 2) if ranks is None else ranks
    cluster = Cluster.named(lab)
    if ranks not in (None, cluster.num_ranks):
        raise UsageError(
            f"{lab} has {cluster.num_ranks} ranks on {len(cluster.hosts)} hosts, not {ranks}; leave --ranks out"
        )
    return cluster.num_ranks


def _peers(names: str | None, backend: str) -> list[Contender]:
    if names is None:
        names = "none" if backend == "gloo" else "gloo"
    peers = [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise UsageError(f"there is no peer {unknown[0]!r} to measure against; there are {', '.join(PEERS)}")
    return [Contender(name) for name in peers]
