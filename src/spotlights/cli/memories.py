"""Commands about a memory alone: what it holds, whether it is true, which of its labels look wrong."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from spotlights.cli.common import AsJson, MemoryPath, app, optional, plain_errors, print_json, print_result, waiting


@app.command(epilog="Example:  [bold]spotlights info runs/demo/demo.memory[/]")
def info(memory: MemoryPath, as_json: AsJson = False) -> None:
    """Say what a memory holds."""
    with plain_errors():
        import spotlights as sl

        found = sl.open(memory).info
    if as_json:
        print_json(found.as_dict())
    else:
        print_result(found)


@app.command(epilog="Example:  [bold]spotlights verify runs/demo/demo.memory && echo exact[/]")
def verify(memory: MemoryPath, as_json: AsJson = False) -> None:
    """Check that a memory is whole and equals the network it recorded; exit code 1 if not."""
    with plain_errors(), waiting("Reading and adding up every slot"):
        import spotlights as sl

        found = sl.open(memory).verify()
    if as_json:
        layers = {name: {**asdict(check), "exact": check.ok} for name, check in found.items()}
        print_json({"exact": found.ok, "damaged": found.damaged, "layers": layers})
    else:
        print_result(found)
    raise typer.Exit(0 if found.ok else 1)


@app.command(epilog="Example:  [bold]spotlights audit runs/demo/demo.memory --data mnist[/]")
def audit(
    memory: MemoryPath,
    k: Annotated[int, typer.Option("-k", min=1, help="How many suspects.")] = 100,
    data: Annotated[str | None, optional(help="mnist, fashion-mnist or digits: whose pictures to show.")] = None,
    texts: Annotated[
        Path | None,
        optional(help="A file with one example on each line; its id is its line, from 0."),
    ] = None,
    out: Annotated[Path | None, optional(help="The folder; audit/NAME by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rank the training examples that look mislabelled, also while training runs; writes CSV and HTML."""
    with plain_errors(), waiting("Adding up the errors of every visit"):
        from spotlights.report import write_audit

        folder = Path("audit") / memory.resolve().stem if out is None else out
        suspects, page = write_audit(memory, folder, k=k, data=data, texts=texts)
    if as_json:
        print_json({"page": str(page), "suspects": list(suspects.rows())})
    else:
        print_result(suspects)
        typer.echo(page)
