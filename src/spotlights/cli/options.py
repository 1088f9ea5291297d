"""What the commands share: the application, how commands fail and print, and the options of several.

Torch and all that needs it are imported inside the commands, so that `spotlights --help` answers at once.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from spotlights.errors import SpotlightsError, SpotlightsWarning
from spotlights.interrupts import watching


class Commands(TyperGroup):
    """An error of Spotlights, in any command, becomes a red message and exit code 2; a warning, a yellow message."""

    def invoke(self, ctx: Any) -> Any:
        with warnings.catch_warnings():
            as_python_does = warnings.showwarning

            def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
                if issubclass(category, SpotlightsWarning):
                    _say(str(message), "yellow")
                else:
                    as_python_does(message, category, *place, **more)

            warnings.showwarning = show
            engine = os.environ.get("SPOTLIGHTS_ENGINE", "")
            try:
                return super().invoke(ctx)
            except BrokenPipeError:  # who reads the output has had enough
                raise
            except (SpotlightsError, OSError) as error:  # an --out that is full, read-only or no folder
                _say(str(error), "red")
                raise typer.Exit(2) from None
            finally:
                os.environ["SPOTLIGHTS_ENGINE"] = engine  # --engine is for one command


def _say(message: str, style: str) -> None:
    from rich.console import Console

    from spotlights.results import printable

    Console(stderr=True).print(
        printable(message), style=style, markup=False, emoji=False, highlight=False, soft_wrap=True
    )


app = typer.Typer(
    name="spotlights",
    cls=Commands,
    help="Which training examples is an answer made of?",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Says what is being waited for; of passes by a Ray cluster, also how many segments are read."""
    from rich.console import Console

    def watch(done: int, total: int) -> None:
        status.update(f"{what}: {done:,} of {total:,} segments")

    with Console(stderr=True).status(what) as status, watching(watch):
        yield


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[float], object]]:
    """A bar on the terminal, a line for each tenth elsewhere; the function is told the share that is done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        said = 0

        def say(share: float) -> None:
            nonlocal said
            if int(10 * share) > said:
                said = int(10 * share)
                typer.echo(f"{what}: {10 * said} %", err=True)

        yield say
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(what, total=1.0)
        yield lambda share: bar.update(task, completed=share)


def print_result(*results: Any) -> None:
    """Prints texts, paths and tables; a note that several tables have is printed below the first."""
    from rich.console import Console

    from spotlights.results import Printable, TitledTable

    said = set()
    for result in results:
        shown = result.table() if isinstance(result, Printable) else result
        shown = str(shown) if isinstance(shown, Path) else shown
        if isinstance(shown, TitledTable) and shown.note is not None:
            shown = replace(shown, note=None) if shown.note in said else shown
            said.add(shown.note)
        Console().print(shown, markup=False, emoji=False, highlight=False, soft_wrap=isinstance(shown, str))


def print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, default=str))


def print_answer(
    plain: Any, *results: Any, as_json: bool, rows: Iterable[Mapping[str, Any]] = (), table: Path | None = None
) -> None:
    """Prints results for people, or the same as JSON; and writes the rows where `--table` says, if it says so."""
    if table is not None:
        from spotlights.results import write_rows

        write_rows(rows, table)
    print_json(plain) if as_json else print_result(*results)


# -- arguments and options --------------------------------------------------------------------


def optional(*names: str, help: str, **limits: Any) -> Any:
    """An option that need not be given: its help says what happens then, where a default would say None."""
    return typer.Option(*names, help=help, show_default=False, **limits)


def _known_table(file: Path | None) -> Path | None:
    """Refused before anything is scanned."""
    if file is None:
        return None
    from spotlights.results import check_table_file

    return check_table_file(file)


def _use_engine(engine: str | None) -> str | None:
    """For every memory that the command opens."""
    if engine is not None:
        os.environ["SPOTLIGHTS_ENGINE"] = engine
    return engine


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables for people.")]
TableFile = Annotated[
    Path | None,
    optional(
        "--table",
        help="Also write the rows to this file: a name that ends with .csv, .arrow or .parquet.",
        callback=_known_table,
    ),
]
Memory = Annotated[
    Path,
    typer.Argument(
        metavar="MEMORY",
        help="The folder or address (s3://…) that sl.record wrote; or a run of spotlights run or demo.",
    ),
]
Subject = Annotated[
    str | None,
    optional(
        "--subject",
        help="The sl.Subject with the network and the inputs: FILE.py:NAME or module:name. By default that of the run, "
        'or subject = "FILE.py:NAME" in ./spotlights.toml.',
    ),
]
NamedSubject = Annotated[
    str | None,
    optional("--subject", help="The sl.Subject with the network and the inputs: FILE.py:NAME or module:name."),
]
Query = Annotated[
    str,
    typer.Argument(metavar="INPUT", help="The id of a test input; or train:ID or text:PROMPT, if the subject can."),
]
Layer = Annotated[str | None, optional(help="The layer; the last one by default.")]
AnswersLayer = Annotated[str | None, optional(help="The layer; the one that answers by default.")]
Measure = Annotated[
    str,
    typer.Option(
        help="contribution, influence (an estimate, over all layers), history (over all layers and all of training: as "
        "long as a training run), score or absolute (the score's size)."
    ),
]
SignedMeasure = Annotated[str, typer.Option(help="contribution, influence, score or absolute.")]
By = Annotated[str | None, optional(help="The column, such as label or step; by default one that has few values.")]
Bins = Annotated[int | None, optional(min=1, max=10_000, help="That many ranges of the column.")]
Target = Annotated[
    str | None,
    optional(help='The output, by its number, or the difference of two, such as "7-9"; the largest one by default.'),
]
Engine = Annotated[
    str | None,
    optional(
        "--engine",
        help='Who scans the memory: "threads" of this machine, "ray" or the address of a Ray cluster. By default what '
        "SPOTLIGHTS_ENGINE says, or threads.",
        callback=_use_engine,
    ),
]
Shard = Annotated[
    str | None,
    optional(help='Only this share of the memory, such as "3/20", as one job of an array; needs --out.'),
]
Out = Annotated[Path | None, optional(help="With --shard: the file for this part; spotlights merge takes all of them.")]
Where = Annotated[str, optional(help='Only these slots, such as "label=3,5 step=0-300".')]
Without = Annotated[str, optional(help='Without these slots, such as "example=12; step=0-300".')]
