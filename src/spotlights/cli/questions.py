"""Commands about one answer of a run: what it is made of, what it would be without some of it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from spotlights.cli.common import (
    AsJson,
    Layer,
    MeasureName,
    QueryName,
    RunPath,
    Target,
    app,
    optional,
    plain_errors,
    print_json,
    print_result,
    waiting,
)
from spotlights.errors import SettingError


@app.command(epilog="Example:  [bold]spotlights top runs/demo 60000 --measure score -k 5[/]")
def top(
    run: RunPath,
    query: QueryName,
    layer: Layer = None,
    measure: MeasureName = "contribution",
    target: Target = None,
    k: Annotated[int, typer.Option("-k", min=1, max=10_000, help="How many.")] = 10,
    slots: Annotated[bool, typer.Option("--slots", help="Each visit on its own, instead of added up.")] = False,
    against: Annotated[bool, typer.Option("--against", help="Those that speak most against the output.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the training examples that an answer is made of."""
    with plain_errors():
        from spotlights.web.asking import ask

        measured = ask(run, query).measure(layer, measure, target)
        if against and not hasattr(measured, "bottom"):
            raise SettingError(f"Nothing speaks against an output by its {measure}. Give --measure contribution.")
        if slots and measure == "influence":
            raise SettingError("Influence is estimated for whole examples, not for slots. Leave --slots out.")
        question = measured.bottom if against else measured.top  # type: ignore[attr-defined]
        found = question(k) if slots else question(k, by="example")
    print_json(list(found.rows(0))) if as_json else print_result(found)


@app.command(epilog="Example:  [bold]spotlights totals runs/demo 60000 --by step --bins 10[/]")
def totals(
    run: RunPath,
    query: QueryName,
    by: Annotated[str, typer.Option(help="The column: label, source, step, or another of the memory.")] = "label",
    bins: Annotated[int | None, optional(min=1, max=10_000, help="That many ranges of the column.")] = None,
    layer: Layer = None,
    measure: MeasureName = "contribution",
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Add up what the training examples of each group add to an answer."""
    with plain_errors():
        from spotlights.web.asking import ask

        found = ask(run, query).measure(layer, measure, target).totals(by, bins=bins)
    print_json(list(found.rows(0))) if as_json else print_result(found)


@app.command(epilog='Example:  [bold]spotlights mask runs/demo 60000 "label:7;steps:0-300"[/]')
def mask(
    run: RunPath,
    query: QueryName,
    left_out: Annotated[
        str, typer.Argument(metavar="MASK", help="What to leave out, such as label:3,5;source:mnist;steps:0-300.")
    ],
    layers: Annotated[str | None, optional(help="Only in these layers, such as layers.1,layers.2.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show an answer with and without some of the training."""
    with plain_errors(), waiting("Adding up the weights that are left"):
        from spotlights.web.asking import ask

        asked = ask(run, query)
        found = asked.answers(asked.mask(left_out, layers))
    if as_json:
        print_json(found)
    else:
        print_result(_compared(found))


@app.command(epilog="Example:  [bold]spotlights passages runs/aesop-char-laptop-0 --prompt 'The Lamb a little d'[/]")
def passages(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a language model's run, or the memory in it.")
    ],
    prompt: Annotated[str | None, optional(help="Text to ask about, at its end.")] = None,
    source: Annotated[
        str | None,
        optional("--query-from", help="Instead of a prompt: test or train, with --at."),
    ] = None,
    at: Annotated[int | None, optional(min=0, help="A position of that text, counted from 0.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Ask about so many tokens at the end, together.")] = 1,
    kernel: Annotated[
        str, typer.Option(help="How keys and queries are compared: dot (what the network does), cosine, cosine-parts.")
    ] = "cosine",
    part: Annotated[
        str | None,
        optional(help="Only by x, the token itself, or h, what was read before it."),
    ] = None,
    measure: Annotated[
        str, typer.Option(help="score, or contribution: what the passages add to the logit of the next token.")
    ] = "score",
    toward: Annotated[
        str | None,
        optional(help="With contribution: the next token; what the network says by default."),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many passages.")] = 10,
    around: Annotated[
        int | None,
        optional(min=0, help="Show at most so many tokens on either side."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the passages of the training text that a prompt attends to."""
    with plain_errors():
        from spotlights.experiments.language import asking, opening

        if measure not in ("score", "contribution"):
            raise SettingError(f'--measure {measure}: there are "score" and "contribution".')
        if toward is not None and measure == "score":
            raise SettingError("--toward is for --measure contribution: scores are toward nothing.")
        if measure == "contribution" and (last > 1 or part is not None):
            raise SettingError(
                "Contributions are those of the last token and of whole keys: leave out --last and --part."
            )
        if (prompt is None) == (source is None) or (source is None) != (at is None):
            raise SettingError("Give --prompt 'some text', or --query-from test --at 1234.")
        with waiting("Reading the keys of every position"):
            trained, settings = opening.open_run(run)
            if prompt is not None:
                tokens = asking.prompt_of(prompt, trained.data.vocabulary)
            else:
                assert source is not None
                assert at is not None
                tokens = asking.before(trained.data, source, at, settings.context)
            if measure == "contribution":
                found = asking.passages_toward(trained, tokens, token=toward, k=k, around=around)
            else:
                asked = range(-min(last, len(tokens)), 0)
                found = asking.passages(trained, tokens, asked=asked, k=k, kernel=kernel, part=part, around=around)
    print_json(found.as_dict()) if as_json else print_result(found)


@app.command(epilog="Example:  [bold]spotlights explore runs/demo[/]")
def explore(
    run: RunPath,
    host: Annotated[str, typer.Option(help="Another address than this machine's own demands a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8733,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    as_json: AsJson = False,
) -> None:
    """Open the explorer: a local web page on a run. Ctrl-C stops it."""
    with plain_errors():
        import gc
        import webbrowser

        from spotlights.web import serve
        from spotlights.web.runs import subject_of

        with waiting("Opening"):
            served = serve(subject_of(run), host=host, port=port)
    gc.freeze()  # torch and its kind stay: walking through them in the middle of an answer takes 150 ms
    print_json({"url": served.url}) if as_json else typer.echo(f"{served}\nCtrl-C stops it.")
    if browser:
        webbrowser.open(served.url)
    served.wait()


def _compared(answers: dict[str, Any]) -> Any:
    """The outputs with and without, as a table."""
    from spotlights.attention.tables import build

    before, after = answers["with"], answers["without"]
    now = {output["number"]: output["logit"] for output in after["outputs"]}
    rows = [
        [o["name"], o["logit"], now[o["number"]], now[o["number"]] - o["logit"]]
        for o in before["outputs"]
        if o["number"] in now
    ]
    title = f"the network says {before['said_name']}; without these: {after['said_name']}"
    return build(title, ["output", "with", "without", "change"], rows, None)
