"""``paceline generator``: the service that forms the groups of a decentralised training."""

from __future__ import annotations

import json as json_text
import logging
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from paceline.config import Config
from paceline.errors import GeneratorError, UsageError
from paceline.policy.groups import Formation, Rules
from paceline.train.decentralized.generator import GeneratorService
from paceline.train.decentralized.generator.secret import read_or_make_secret
from paceline.train.decentralized.generator.wire import parse_address
from paceline.units import parse_duration

SECRET_HELP = "The job's secret, made if the file is not there. Default: PACELINE_SECRET_FILE, or paceline.secret."
_LOOK_S = 0.5
LISTEN_HELP = "Where workers connect; port 0 takes a free one. Another host than 127.0.0.1 is reachable from outside."


def generator(
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help=LISTEN_HELP)] = "127.0.0.1:29600",
    secret_file: Annotated[Path | None, typer.Option(help=SECRET_HELP)] = None,
    group_size: Annotated[str, typer.Option(metavar="N|auto", help="Workers of a group; auto measures.")] = "auto",
    formation: Annotated[str, typer.Option(help="first_come, division or inter_intra.")] = "first_come",
    lease: Annotated[str, typer.Option(help="A worker that says nothing for so long is evicted.")] = "30s",
    patience: Annotated[str, typer.Option(help="A group starts without members that come so late.")] = "10s",
    total_steps: Annotated[int | None, typer.Option(help="Local steps of all workers together that suffice.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: address and secret's file; counts at the end.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log who joins and leaves.")] = False,
) -> None:
    """Form the groups of workers that train decentralised, until Ctrl-C.

    It needs no GPU and carries no weights. Workers need its address and the secret's file. If it dies, workers go on
    alone; started again on the same port with the same secret, it finds them again.

    \b
    Examples:
      paceline generator
      paceline generator --listen 10.0.0.1:29600 --secret-file job.secret --group-size 4 --total-steps 100000
    """
    host, port = parse_address(listen)
    rules = Rules(
        group_size=2 if group_size == "auto" else _read_size(group_size),
        formation=_read_formation(formation),
        lease_s=_read_duration("--lease", lease),
        patience_s=_read_duration("--patience", patience),
        extra_arrivals=1,
    )
    file = secret_file or Config.from_environment().secret_file or Path("paceline.secret")
    secret, is_new = read_or_make_secret(file)
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(asctime)s %(message)s")
    service = GeneratorService(
        host,
        port,
        secret,
        rules,
        total_steps=total_steps,
        adapt_group_size=group_size == "auto",
        link_aware=True,
        settle_s=0.0 if is_new else 3.0,  # nobody can know a new secret: there was no service before
    )
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    service.start()
    try:
        _print_start(service.address, file, is_new, json)
        while not stopped.wait(_LOOK_S):
            if not service.is_running:
                raise GeneratorError("the service has failed; its log says why")
        status = service.status()
    finally:
        service.stop()
    typer.echo(json_text.dumps(status) if json else _summary(status))


def _print_start(address: str, file: Path, is_new: bool, json: bool) -> None:
    if json:
        typer.echo(json_text.dumps({"listening": address, "secret_file": str(file.resolve()), "new_secret": is_new}))
    else:
        if is_new:
            typer.echo(f"made a secret in {file.resolve()}: workers need this file", err=True)
        typer.echo(f"listening on {address}")


def _summary(status: dict[str, object]) -> str:
    return (
        f"{status['steps']} steps, {status['committed']} averages of {status['mean_group_size']:.1f} workers, "
        f"{status['aborted']} aborted"
    )


def _read_size(text: str) -> int:
    if not text.isdecimal() or not text.isascii() or not 2 <= int(text) <= 4096:
        raise UsageError(f"--group-size is auto or a number from 2 to 4096, not {text!r}")
    return int(text)


def _read_duration(option: str, text: str) -> float:
    seconds = parse_duration(text)
    if not 0 < seconds <= 1e6:
        raise UsageError(f"{option} is a duration above zero, like 30s, not {text!r}")
    return seconds


def _read_formation(text: str) -> Formation:
    names = [form.value for form in Formation if form is not Formation.RANDOM]
    if text not in names:
        raise UsageError(f"--formation is one of {', '.join(names)}, not {text!r}")
    return Formation(text)
