"""The `spotlights` command. Thin: each command calls what a Python user would call."""

from importlib.metadata import entry_points
from typing import Annotated

import typer

from spotlights._version import __version__
from spotlights.cli import commands, views
from spotlights.cli.options import app

__all__ = ["app", "commands", "views"]


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


# Further commands join by an entry point: importing the module that it names registers them on `app`.
for _commands in entry_points(group="spotlights.commands"):
    _commands.load()
