"""The `spotlights` command. Thin: each command calls what a Python user would call."""

from typing import Annotated

import typer

from spotlights._version import __version__
from spotlights.cli import experiments, memories, questions
from spotlights.cli.common import app

__all__ = ["app", "experiments", "memories", "questions"]


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Only the options that stand before a command."""
