"""The ``paceline`` command: verbs, and how its errors look.

Exit codes: 0 done, 1 the answer is no (a refused schedule), 2 the question was wrong, 130 interrupted.
"""

from __future__ import annotations

import sys

import typer

from paceline import __version__
from paceline.cli import bench_verbs, compare, demo, generator, lab, plan, tour, verify
from paceline.errors import PacelineError, ProofError

app = typer.Typer(
    help="Collectives that keep the pace: plan, prove, price and draw collective schedules.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    del version


app.command()(plan.plan)
app.command()(verify.verify)
app.command()(compare.compare)
app.command()(demo.demo)
app.command()(tour.tour)
app.add_typer(bench_verbs.app, name="bench")
app.command()(generator.generator)
app.command(context_settings={"allow_interspersed_args": False})(lab.lab)


def run() -> None:
    """Entry point: what is wrong is said in one sentence on standard error."""
    try:
        app()
    except ProofError as error:
        _fail(f"refused: {error}", 1)
    except PacelineError as error:
        _fail(f"error: {error}", 2)
    except OSError as error:  # standard output is full or broken
        _fail(f"error: cannot write the output: {error.strerror}", 2)


def _fail(sentence: str, code: int) -> None:
    typer.echo(f"paceline: {sentence}", err=True)
    sys.exit(code)
