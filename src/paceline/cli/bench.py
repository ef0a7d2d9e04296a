"""``paceline bench``: a backend's collectives measured beside its peers', against the limit of the links."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from paceline.bench.contenders import PEERS, Contender
from paceline.bench.figures import Operation
from paceline.bench.measure import Effort, Question
from paceline.bench.run import run
from paceline.bench.sizes import ITEM_BYTES, parse_sizes
from paceline.bench.table import caption, results_table
from paceline.cli import tables
from paceline.draw.canvas import check_picture_path
from paceline.errors import UsageError
from paceline.ir.cluster import Cluster

_WIDTH = 150  # a table of figures is worth nothing with its figures cut off


def bench(
    operation: Annotated[
        str, typer.Argument(help=f"{', '.join(map(str, Operation))}.", metavar="COLLECTIVE")
    ] = "allreduce",
    sizes: Annotated[
        str, typer.Option(help="FIRST:LAST in factors of 4, FIRST:LAST:xFACTOR, or a list with commas.")
    ] = "4KB:64MB",
    ranks: Annotated[
        int | None, typer.Option(help="Number of ranks. Default: 2, or one on each host of the lab.")
    ] = None,
    lab: Annotated[
        str | None, typer.Option(help="Measure between the lab's hosts, like lan8 (needs root). Default: this host.")
    ] = None,
    backend: Annotated[str, typer.Option(help="The subject: a torch.distributed backend.")] = "paceline",
    peers: Annotated[
        str | None, typer.Option(help="gloo, openmpi, mpich, with commas; or none. Default: gloo.", metavar="NAMES")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="The subject's algorithm, like ring or allreduce:ring.", metavar="NAME")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(ITEM_BYTES)}.")] = "float32",
    seconds: Annotated[float, typer.Option(help="Time for a contender at a size, warm-up not counted.")] = 2.0,
    iterations: Annotated[int | None, typer.Option(help="Exactly so many, instead of --seconds.")] = None,
    rounds: Annotated[int, typer.Option(help="How often the contenders take turns.")] = 5,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without an answer after which a rank hangs.")] = 120.0,
    no_install: Annotated[bool, typer.Option("--no-install", help="Do not install an MPI that is missing.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Save all figures.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot time and bandwidth against size (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Measure a collective: nccl-tests' table, beside peers in one interleaved run.

    \b
    Examples:
      paceline bench allreduce --sizes 4KB:64MB --ranks 4 --peers gloo,openmpi,mpich
      paceline bench allgather --sizes 64MB --lab lan8 --json allgather.json
      paceline bench training --help
    """
    if plot is not None:
        check_picture_path(plot)
    if json is not None and not json.absolute().parent.is_dir():
        raise UsageError(f"cannot write {json}: there is no folder {json.absolute().parent}")
    question = Question(
        operation=Operation.parse(operation),
        sizes=parse_sizes(sizes),
        num_ranks=_num_ranks(ranks, lab),
        subject=Contender(backend, {"PACELINE_ALGORITHM": algorithm} if algorithm else {}),
        peers=_peers(peers, backend),
        dtype=dtype,
        effort=Effort(seconds, iterations, rounds),
        timeout_s=timeout,
    )
    results = run(question, lab, install=not no_install)
    out = tables.console()
    Console(highlight=False, width=max(out.width, _WIDTH)).print(results_table(results))
    out.print()
    for line in caption(results):
        out.print(escape(line), style="dim", soft_wrap=True)
    if json is not None:
        results.save(json)
        out.print(f"saved {escape(str(json))}")
    if plot is not None:
        from paceline.bench.plot import draw_results

        draw_results(results, plot)
        out.print(f"drew {escape(str(plot))}")
    if any(row.wrong for row in results.rows if row.contender == backend):
        raise typer.Exit(1)


def _num_ranks(ranks: int | None, lab: str | None) -> int:
    if lab is None:
        return 2 if ranks is None else ranks
    hosts = Cluster.preset(lab).num_ranks
    if ranks not in (None, hosts):
        raise UsageError(f"{lab} has {hosts} hosts with a rank each, not {ranks}; leave --ranks out")
    return hosts


def _peers(names: str | None, backend: str) -> list[Contender]:
    if names is None:
        names = "none" if backend == "gloo" else "gloo"
    peers = [name.strip() for name in names.split(",") if name.strip() not in ("", "none")]
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise UsageError(f"there is no peer {unknown[0]!r} to measure against; there are {', '.join(PEERS)}")
    return [Contender(name) for name in peers]
