"""What the commands share: the application, arguments that several take, and how they talk.

Torch and all that needs it are imported inside the commands, so that `spotlights --help` answers at once.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from spotlights.errors import SpotlightsError

app = typer.Typer(
    name="spotlights",
    help="Which training examples is an answer made of?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def optional(*names: str, help: str, **limits: Any) -> Any:
    """An option that need not be given: its help says what happens then, where a default would say None."""
    return typer.Option(*names, help=help, show_default=False, **limits)


MemoryPath = Annotated[Path, typer.Argument(metavar="MEMORY", help="The folder that sl.record wrote.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a demo or of a run, or its memory.")]
QueryName = Annotated[
    str,
    typer.Argument(metavar="INPUT", help="The id of a test input; or train:ID, or text:PROMPT where the run has them."),
]
Layer = Annotated[str | None, optional(help="The layer; the last one by default.")]
MeasureName = Annotated[
    str,
    typer.Option(help="contribution, influence (an estimate, over all layers), score or absolute (the score's size)."),
]
Target = Annotated[int | None, optional(min=0, help="The output; what the network says by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables for people.")]


@contextmanager
def plain_errors() -> Iterator[None]:
    """What Spotlights raises on purpose becomes one red sentence and exit code 2."""
    try:
        yield
    except SpotlightsError as error:
        from rich.console import Console

        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@contextmanager
def waiting(what: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def print_result(result: Any) -> None:
    from rich.console import Console

    Console().print(result)


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, default=str))
