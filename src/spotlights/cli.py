"""The `spotlights` command. Thin: each command calls what a Python user would call.

Torch and all that needs it are imported inside the commands, so that `spotlights --help` answers at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from spotlights._version import __version__
from spotlights.errors import SettingError, SpotlightsError

app = typer.Typer(
    name="spotlights",
    help="Which training examples is an answer made of?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

MemoryPath = Annotated[Path, typer.Argument(metavar="MEMORY", help="The folder that sl.record wrote.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a demo or of a run, or its memory.")]
QueryName = Annotated[
    str,
    typer.Argument(metavar="INPUT", help="The id of a test input; or train:ID, or text:PROMPT where the run has them."),
]
Layer = Annotated[str | None, typer.Option(help="The layer; the last one by default.", show_default=False)]
MeasureName = Annotated[
    str,
    typer.Option(help="contribution, influence (an estimate, over all layers), score or absolute (the score's size)."),
]
Target = Annotated[
    int | None, typer.Option(min=0, help="The output; what the network says by default.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables for people.")]


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


@app.command(epilog="Example:  [bold]spotlights demo --steps 500 --out /tmp/demo[/]")
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training.")] = 3000,
    out: Annotated[Path, typer.Option(help="Where the memory and the figures go.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Train on MNIST with recording, verify the memory, explain three test images: about two minutes."""
    with _plain_errors():
        from rich.console import Console

        from spotlights.experiments import demo as experiment

        settings = experiment.Settings(out=out, steps=steps)
        outcome = experiment.run(settings, Console(stderr=as_json))
    if as_json:
        _print_json(asdict(outcome))
    raise typer.Exit(0 if outcome.exact else 1)


@app.command(epilog="Example:  [bold]spotlights info runs/demo/demo.memory[/]")
def info(memory: MemoryPath, as_json: AsJson = False) -> None:
    """Say what a memory holds."""
    with _plain_errors():
        import spotlights as sl

        found = sl.open(memory).info
    if as_json:
        _print_json(found.as_dict())
    else:
        _print(found)


@app.command(epilog="Example:  [bold]spotlights verify runs/demo/demo.memory && echo exact[/]")
def verify(memory: MemoryPath, as_json: AsJson = False) -> None:
    """Check that a memory is whole and equals the network it recorded; exit code 1 if not."""
    with _plain_errors(), _waiting("Reading and adding up every slot"):
        import spotlights as sl

        found = sl.open(memory).verify()
    if as_json:
        layers = {name: {**asdict(check), "exact": check.ok} for name, check in found.items()}
        _print_json({"exact": found.ok, "damaged": found.damaged, "layers": layers})
    else:
        _print(found)
    raise typer.Exit(0 if found.ok else 1)


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
    with _plain_errors():
        from spotlights.web.asking import ask

        measured = ask(run, query).measure(layer, measure, target)
        if against and not hasattr(measured, "bottom"):
            raise SettingError(f"Nothing speaks against an output by its {measure}. Give --measure contribution.")
        if slots and measure == "influence":
            raise SettingError("Influence is estimated for whole examples, not for slots. Leave --slots out.")
        question = measured.bottom if against else measured.top  # type: ignore[attr-defined]
        found = question(k) if slots else question(k, by="example")
    _print_json(list(found.rows(0))) if as_json else _print(found)


@app.command(epilog="Example:  [bold]spotlights totals runs/demo 60000 --by step --bins 10[/]")
def totals(
    run: RunPath,
    query: QueryName,
    by: Annotated[str, typer.Option(help="The column: label, source, step, or another of the memory.")] = "label",
    bins: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="That many ranges of the column.", show_default=False)
    ] = None,
    layer: Layer = None,
    measure: MeasureName = "contribution",
    target: Target = None,
    as_json: AsJson = False,
) -> None:
    """Add up what the training examples of each group add to an answer."""
    with _plain_errors():
        from spotlights.web.asking import ask

        found = ask(run, query).measure(layer, measure, target).totals(by, bins=bins)
    _print_json(list(found.rows(0))) if as_json else _print(found)


@app.command(epilog='Example:  [bold]spotlights mask runs/demo 60000 "label:7;steps:0-300"[/]')
def mask(
    run: RunPath,
    query: QueryName,
    left_out: Annotated[
        str, typer.Argument(metavar="MASK", help="What to leave out, such as label:3,5;source:mnist;steps:0-300.")
    ],
    layers: Annotated[
        str | None, typer.Option(help="Only in these layers, such as layers.1,layers.2.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show an answer with and without some of the training."""
    with _plain_errors(), _waiting("Adding up the weights that are left"):
        from spotlights.web.asking import ask

        asked = ask(run, query)
        found = asked.answers(asked.mask(left_out, layers))
    if as_json:
        _print_json(found)
    else:
        _print(_compared(found))


@app.command(epilog="Example:  [bold]spotlights explore runs/demo[/]")
def explore(
    run: RunPath,
    host: Annotated[str, typer.Option(help="Another address than this machine's own demands a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8733,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    as_json: AsJson = False,
) -> None:
    """Open the explorer: a local web page on a run. Ctrl-C stops it."""
    with _plain_errors():
        import webbrowser

        from spotlights.web import serve
        from spotlights.web.runs import subject_of

        with _waiting("Opening"):
            served = serve(subject_of(run), host=host, port=port)
    _print_json({"url": served.url}) if as_json else typer.echo(f"{served}\nCtrl-C stops it.")
    if browser:
        webbrowser.open(served.url)
    served.wait()


@app.command(epilog="Example:  [bold]spotlights run mnist-single && spotlights report runs/mnist-single-paper-0[/]")
def run(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="mnist-single, mnist-joint, mnist-continual, mnist-cnn, aesop-char, aesop-gpt, wikitext2-word, "
            "char-lm or word-lm.",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="paper (the default; laptop for char-lm and word-lm); quick (seconds); table1, text, long, laptop (a "
            "quarter of an hour) or sgd, where the experiment has them.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of the examples.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Another number of steps.", show_default=False)] = None,
    text: Annotated[
        Path | None, typer.Option(help="The text file of char-lm and word-lm, in UTF-8.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder; runs/NAME-PRESET-SEED by default.", show_default=False)
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Repeat the run that this run.json describes.", show_default=False),
    ] = None,
    discard: Annotated[
        bool, typer.Option("--discard-memory", help="Throw the memory away once it is analysed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run one of the paper's experiments, or train on your own text: with recording, then verify and analyse."""
    with _plain_errors():
        from spotlights.experiments import running

        if (name is None) == (source is None):
            raise SettingError("Give the name of an experiment, or --from run.json, and not both.")
        if source is not None:
            folder = running.repeat(source, out=out, keep=not discard)
        else:
            assert name is not None
            folder = running.run_experiment(
                name, preset=preset, seed=seed, steps=steps, text=text, out=out, keep=not discard
            )
        found = running.load_run(folder)
    if as_json:
        _print_json({"folder": str(folder), **asdict(found)})
    else:
        _print(running.summary(found, folder))
    raise typer.Exit(0 if found.exact else 1)


@app.command(epilog="Example:  [bold]spotlights passages runs/aesop-char-laptop-0 --prompt 'The Lamb a little d'[/]")
def passages(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a language model's run, or the memory in it.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to ask about, at its end.", show_default=False)] = None,
    source: Annotated[
        str | None,
        typer.Option("--query-from", help="Instead of a prompt: test or train, with --at.", show_default=False),
    ] = None,
    at: Annotated[
        int | None, typer.Option(min=0, help="A position of that text, counted from 0.", show_default=False)
    ] = None,
    last: Annotated[int, typer.Option(min=1, help="Ask about so many tokens at the end, together.")] = 1,
    kernel: Annotated[
        str, typer.Option(help="How keys and queries are compared: dot (what the network does), cosine, cosine-parts.")
    ] = "cosine",
    part: Annotated[
        str | None,
        typer.Option(help="Only by x, the token itself, or h, what was read before it.", show_default=False),
    ] = None,
    measure: Annotated[
        str, typer.Option(help="score, or contribution: what the passages add to the logit of the next token.")
    ] = "score",
    toward: Annotated[
        str | None,
        typer.Option(help="With contribution: the next token; what the network says by default.", show_default=False),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many passages.")] = 10,
    around: Annotated[
        int | None,
        typer.Option(min=0, help="Show at most so many tokens on either side.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the passages of the training text that a prompt attends to."""
    with _plain_errors():
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
        with _waiting("Reading the keys of every position"):
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
    _print_json(found.as_dict()) if as_json else _print(found)


@app.command(epilog="Example:  [bold]spotlights report runs/mnist-single-paper-* --out reports/mnist-single[/]")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that spotlights run made.")],
    out: Annotated[Path | None, typer.Option(help="The folder; RUN/report by default.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about some runs, and its figures as PNG and PDF."""
    with _plain_errors():
        from spotlights.report import write_report

        page = write_report(runs, runs[0] / "report" if out is None else out)
    _print_json({"page": str(page)}) if as_json else typer.echo(page)


@app.command(epilog="Example:  [bold]spotlights reproduce --seeds 1 --out runs/reproduction[/]")
def reproduce(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 5,
    out: Annotated[Path, typer.Option(help="The folder of the runs and of the report.")] = Path("runs/reproduction"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the memories of seed 0 (23 GB).")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few hundred images, to see that it works.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run all of the paper's image experiments over several seeds, and write one report about them.

    Goes on where it was interrupted. Takes about 20 minutes for each seed on two cores, and 17 GB of disk.
    """
    with _plain_errors():
        from spotlights.experiments.reproduce import run_plan
        from spotlights.report import write_report

        folders = run_plan(seeds=seeds, out=out, keep=keep, quick=quick)
        page = write_report(folders, out / "report")
    _print_json({"page": str(page)}) if as_json else typer.echo(page)


@app.command(epilog="Example:  [bold]spotlights audit runs/demo/demo.memory --data mnist[/]")
def audit(
    memory: MemoryPath,
    k: Annotated[int, typer.Option("-k", min=1, help="How many suspects.")] = 100,
    data: Annotated[
        str | None, typer.Option(help="mnist, fashion-mnist or digits: whose pictures to show.", show_default=False)
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help="A file with one example on each line; its id is its line, from 0.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder; audit/NAME by default.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Rank the training examples that look mislabelled, also while training runs; writes CSV and HTML."""
    with _plain_errors(), _waiting("Adding up the errors of every visit"):
        from spotlights.report import write_audit

        folder = Path("audit") / memory.resolve().stem if out is None else out
        suspects, page = write_audit(memory, folder, k=k, data=data, texts=texts)
    if as_json:
        _print_json({"page": str(page), "suspects": list(suspects.rows())})
    else:
        _print(suspects)
        typer.echo(page)


@app.command(
    "retrain-check", epilog="Example:  [bold]spotlights retrain-check runs/mnist-single-paper-0 --without label=3[/]"
)
def retrain_check(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder that spotlights run made, with its memory.")],
    without: Annotated[
        list[str],
        typer.Option(help="What to leave out: label=3, source=mnist, example=17,42. Several must all be met."),
    ],
    as_json: AsJson = False,
) -> None:
    """Really retrain without a group; put the estimate, the mask and the truth side by side."""
    with _plain_errors():
        from spotlights.experiments import retrain_check as check

        found = check.retrain_check(run, **check.parse_group(without))
    _print_json(asdict(found)) if as_json else _print(found)


evaluations = typer.Typer(help="Measure how good the answers are.", no_args_is_help=True)
app.add_typer(evaluations, name="evaluate")


@evaluations.command(epilog="Example:  [bold]spotlights evaluate truth mnist-mlp --retrains 100[/]")
def truth(
    setting: Annotated[str, typer.Argument(help="mnist-mlp, fashion-mlp or mnist-cnn.")] = "mnist-mlp",
    retrains: Annotated[int, typer.Option(min=4, help="Networks retrained on random halves, with fresh seeds.")] = 100,
    again: Annotated[int, typer.Option(min=0, help="How many of them again: what noise allows at best.")] = 0,
    same: Annotated[int, typer.Option(min=0, help="Networks retrained with the same initial weights and order.")] = 0,
    removals: Annotated[int, typer.Option(min=0, help="Test images whose top examples are dropped.")] = 0,
    out: Annotated[Path, typer.Option(help="The folder; goes on with what lies there.")] = Path("runs/truth"),
    quick: Annotated[bool, typer.Option("--quick", help="A few hundred images, to see that it works.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare what the memory estimates with networks that were really trained without some examples."""
    with _plain_errors():
        from spotlights.experiments.truth.harness import evaluate

        found = evaluate(setting, out=out, retrains=retrains, again=again, same=same, removals=removals, quick=quick)
    _print_json(found.as_dict()) if as_json else _print(found)


# -- talking ----------------------------------------------------------------------------------


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What Spotlights raises on purpose becomes one red sentence and exit code 2."""
    try:
        yield
    except SpotlightsError as error:
        from rich.console import Console

        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


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


def _print(result: Any) -> None:
    from rich.console import Console

    Console().print(result)


def _print_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, default=str))
