"""``paceline lab``: a command for every rank of an emulated cluster."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from paceline.cli import arguments
from paceline.errors import UsageError
from paceline.lab import Lab
from paceline.lab.lateness import parse_late
from paceline.units import parse_duration

SCENARIO_HELP = (
    "The hosts by name: lan8, lan4, uplink8, lan4x2, lan2x4; or a TOML/JSON file. "
    "Instead of --hosts, --ranks-per-host, --up and --down."
)
RANKS_HELP = "Ranks on each host, which share its memory and its link. Default: 1."
LATE_HELP = "RANK:DURATION, like 3:500ms; several times, or with commas. For programs that ask paceline.lab.late_s."


def lab(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run for each rank, after --.")],
    scenario: Annotated[str | None, typer.Option("--scenario", "--cluster", help=SCENARIO_HELP)] = None,
    hosts: Annotated[int | None, typer.Option(help="Number of hosts. Default: 8.")] = None,
    ranks_per_host: Annotated[int | None, typer.Option(help=RANKS_HELP, metavar="NUMBER")] = None,
    up: Annotated[str | None, typer.Option(help="Rate of a host's uplink, like 100mbit. Default: 500mbit.")] = None,
    down: Annotated[str | None, typer.Option(help="Rate of a host's downlink. Default: 500mbit.")] = None,
    loss: Annotated[str, typer.Option(help="Share of packets lost on the way to a host, like 1% or 0.01.")] = "0",
    late: Annotated[list[str] | None, typer.Option(help=LATE_HELP)] = None,
    timeout: Annotated[str | None, typer.Option(help="End all after this time, like 90s; exit code 124.")] = None,
    grace: Annotated[str, typer.Option(help="How long the others may go on after a rank has failed.")] = "3s",
) -> None:
    """Run a command for each rank of a cluster that exists on this machine only, as torchrun would start it.

    Hosts are network namespaces on links with real rates, with one rank each unless you ask for more. Needs root. The
    exit code is the worst of the ranks'; when one fails, the others are ended and its error is repeated last.

    \b
    Examples:
      paceline lab --scenario lan8 -- python train.py
      paceline lab --hosts 4 --up 100mbit --down 1gbit --late 3:500ms -- python train.py
      paceline lab --hosts 4 --ranks-per-host 2 -- python train.py
      paceline lab --hosts 2 --loss 1% --timeout 60s -- sh -c 'ip address; env | grep RANK'
    """
    lost = arguments.read_share(loss, "--loss")
    where = _lab(scenario, hosts, ranks_per_host, up, down, lost, parse_late(",".join(late or [])))
    timeout_s, grace_s = parse_duration(timeout) if timeout else None, parse_duration(grace)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    with where:
        code = where.run(command, timeout_s, grace_s=grace_s)
    raise typer.Exit(code)


def _lab(
    scenario: str | None,
    hosts: int | None,
    ranks_per_host: int | None,
    up: str | None,
    down: str | None,
    loss: float,
    late: dict[int, float],
) -> Lab:
    if scenario is not None:
        if (hosts, ranks_per_host, up, down) != (None, None, None, None):
            raise UsageError(
                f"--scenario {scenario} says how many hosts and ranks there are and their rates; leave the others out"
            )
        return Lab(cluster=arguments.read_cluster(scenario, None), loss=loss, late=late)
    return Lab(
        8 if hosts is None else hosts,
        up or "500mbit",
        down or "500mbit",
        ranks_per_host=1 if ranks_per_host is None else ranks_per_host,
        loss=loss,
        late=late,
    )


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave by the way that cleans up."""
    del frame
    sys.exit(128 + number)
