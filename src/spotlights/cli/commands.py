"""The commands: about a whole memory, and about one answer of its network."""

import gc
import webbrowser
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import spotlights as sl
from spotlights.cli import options
from spotlights.cli.options import AsJson, TableFile, app, optional, print_answer, print_json, progress_bar, waiting
from spotlights.cli.subjects import find_subject, known_subject, load_subject, memory_path, other_subject
from spotlights.errors import SettingError
from spotlights.explorer import Served
from spotlights.selections import id_range, read_selections, where_any

# -- about a whole memory ---------------------------------------------------------------------


@app.command(epilog="Example:  [bold]spotlights info runs/demo/demo.memory[/]")
def info(memory: options.Memory, subject: options.NamedSubject = None, as_json: AsJson = False) -> None:
    """Say what a memory holds; with a subject, also which inputs can be asked about."""
    known = sl.open(memory_path(memory)).info
    inputs = None if subject is None else load_subject(subject).inputs
    more = {} if inputs is None else {"inputs": f"{len(inputs):,} inputs, ids {id_range(inputs.ids)}"}
    about = (f"{subject}: {inputs}" for inputs in more.values())
    print_answer({**known.as_dict(), **more}, known, *about, as_json=as_json)


@app.command(epilog="Example:  [bold]spotlights copy runs/demo/demo.memory s3://bucket/demo.memory[/]")
def copy(
    memory: options.Memory,
    to: Annotated[Path, typer.Argument(metavar="TO", help="A new folder, or an address such as s3://bucket/a.memory.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a memory that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a memory to another folder or bucket, and verify the copy; exit code 1 if it does not verify."""
    with waiting("Copying every file"):
        copied = sl.open(memory_path(memory)).copy(to, overwrite=overwrite)
    with waiting("Reading and adding up every slot of the copy"):
        try:
            checks = copied.verify()
        except sl.UnsupportedError as error:  # its files were checked before this was raised
            typer.echo(error, err=True)
            return
    _end_with(checks, as_json=as_json)


@app.command(epilog="Example:  [bold]spotlights verify runs/demo/demo.memory && echo exact[/]")
def verify(
    memory: options.Memory, subject: options.NamedSubject = None, engine: options.Engine = None, as_json: AsJson = False
) -> None:
    """Check that a memory is whole and equals the network it recorded; exit code 1 if not.

    With --subject, the network is the subject's; otherwise the weights that the recording left.
    """
    with waiting("Reading and adding up every slot"):
        about = None if subject is None else find_subject(memory_path(memory), subject)
        opened = sl.open(memory_path(memory)) if about is None else about.open()
        checks = opened.verify(None if about is None else about.load_model(opened))
    _end_with(checks, as_json=as_json)


def _end_with(checks: Any, *, as_json: bool) -> None:
    layers = {name: {**asdict(check), "exact": check.ok} for name, check in checks.items()}
    print_answer({"exact": checks.ok, "damaged": checks.damaged, "layers": layers}, checks, as_json=as_json)
    raise typer.Exit(0 if checks.ok else 1)


@app.command(epilog="Example:  [bold]spotlights audit runs/demo -k 50[/]")
def audit(
    memory: options.Memory,
    subject: options.Subject = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many suspects.")] = 100,
    where: options.Where = "",
    out: Annotated[Path | None, optional(help="The folder; audit/NAME by default.")] = None,
    engine: options.Engine = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Rank the training examples that look mislabelled, also while training runs; writes CSV and HTML."""
    with waiting("Adding up the errors of every visit"):
        from spotlights.cli.audit_page import write_audit

        path = memory_path(memory)
        opened = sl.open(path)
        suspects = where_any(opened, read_selections(where, opened)).suspects(k)
        folder = Path("audit") / path.resolve().stem if out is None else out
        page = write_audit(opened, suspects, known_subject(memory, subject), folder)
    rows = list(suspects.rows())
    print_answer({"page": str(page), "suspects": rows}, suspects, page, as_json=as_json, rows=rows, table=table)


@app.command(
    epilog="Example:  [bold]spotlights forget run.memory --without example=17,99 --subject my_subject.py:subject[/]"
)
def forget(
    memory: options.Memory,
    without: Annotated[str, typer.Option(help='What to forget, such as "example=17,99" or "label=3 source=mails".')],
    subject: options.Subject = None,
    clip: Annotated[float | None, optional(help="The largest norm of the gradient, if the loop clipped it.")] = None,
    out: Annotated[Path | None, optional(help="The folder; forgotten/NAME by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a network again without some examples, from before it first saw them; writes it with a record of hashes.

    For a recipe, with a subject that has its loss: sl.Subject(…, loss=loss).
    """
    from safetensors.torch import save

    from spotlights.results import write_whole

    with waiting("Looking for the first visit"):
        about = find_subject(memory, subject)
        opened = about.open()
        if not opened.info.as_dict()["recipe"]:
            raise SettingError(
                f"{about.path} is no recipe, so training cannot be run again from here. Let your own loop train on: "
                "memory.rewind(model, optimizer, without=…) puts both back."
            )
        model = about.load_model(opened)
        folder = Path("forgotten") / about.path.resolve().stem if out is None else out
        folder.mkdir(parents=True, exist_ok=True)  # before hours of training
        network, record = folder / "model.safetensors", folder / "record.json"
        if network.exists() and not record.exists():
            raise SettingError(
                f"{network} is there, and {record} is not: it may be another network. Choose another --out."
            )
        rewound = opened.rewind(model, without=without)
    with progress_bar(f"Training {rewound.to_train:,} steps again") as progress:
        rewound.train(clip=clip, progress=progress)
    record.unlink(missing_ok=True)  # that of another network
    write_whole(network, save({name: tensor.clone() for name, tensor in model.state_dict().items()}))
    rewound.save(record)
    print_answer({"record": str(record), **rewound.as_dict()}, rewound, folder, as_json=as_json)


# -- about one answer -------------------------------------------------------------------------


@app.command(epilog="Example:  [bold]spotlights top runs/demo 60000 --measure score -k 5[/]")
def top(
    memory: options.Memory,
    query: options.Query,
    subject: options.Subject = None,
    layer: options.Layer = None,
    measure: options.Measure = "contribution",
    target: options.Target = None,
    k: Annotated[int, typer.Option("-k", min=1, max=10_000, help="How many.")] = 10,
    slots: Annotated[bool, typer.Option("--slots", help="Each visit on its own, instead of added up.")] = False,
    against: Annotated[bool, typer.Option("--against", help="Those that speak most against the output.")] = False,
    where: options.Where = "",
    without: options.Without = "",
    shard: options.Shard = None,
    out: options.Out = None,
    engine: options.Engine = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the training examples that an answer is made of."""
    from spotlights.cli import answers

    question = {"memory": str(memory), "query": query, "where": where, "without": without}
    settings = {"layer": layer, "measure": measure, "target": target, "k": k, "slots": slots, "against": against}
    about = {"command": "top", **question, "settings": settings}
    answers.answer_question(about, subject, shard, out, table=table, as_json=as_json)


@app.command(epilog="Example:  [bold]spotlights totals runs/demo 60000 --by step --bins 10[/]")
def totals(
    memory: options.Memory,
    query: options.Query,
    subject: options.Subject = None,
    by: options.By = None,
    bins: options.Bins = None,
    layer: options.Layer = None,
    measure: options.Measure = "contribution",
    target: options.Target = None,
    where: options.Where = "",
    without: options.Without = "",
    shard: options.Shard = None,
    out: options.Out = None,
    engine: options.Engine = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Add up what the training examples of each group add to an answer."""
    from spotlights.cli import answers

    question = {"memory": str(memory), "query": query, "where": where, "without": without}
    settings = {"layer": layer, "measure": measure, "target": target, "by": by, "bins": bins}
    about = {"command": "totals", **question, "settings": settings}
    answers.answer_question(about, subject, shard, out, table=table, as_json=as_json)


@app.command(epilog="Example:  [bold]spotlights merge part-*[/]")
def merge(
    parts: Annotated[list[Path], typer.Argument(metavar="PARTS", help="What all jobs of --shard have written.")],
    subject: options.Subject = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Put the parts of a top or totals together that the jobs of an array have answered with --shard.

    The parts say what was asked of which memory. No code is taken from them: give --subject as the jobs did.
    """
    from spotlights.cli import answers

    merged = sl.Merged(parts)
    about = merged.about if isinstance(merged.about, dict) else {}
    texts = ("memory", "query", "where", "without")
    if about.get("command") not in answers.ANSWERS or not all(isinstance(about.get(name), str) for name in texts):
        raise SettingError("These are not parts of spotlights top or totals.")
    answers.answer_question(about, subject, table=table, as_json=as_json, engine=merged)


@app.command(epilog="Example:  [bold]spotlights history runs/demo 60000 --target 7-9 --by label --plot history.png[/]")
def history(
    memory: options.Memory,
    query: options.Query,
    subject: options.Subject = None,
    target: options.Target = None,
    by: options.By = None,
    bins: options.Bins = None,
    k: Annotated[int, typer.Option("-k", min=1, max=10_000, help="How many examples for and against.")] = 5,
    plot: Annotated[Path | None, optional(help="Write a picture: the output after every step, by the column.")] = None,
    where: options.Where = "",
    without: options.Without = "",
    engine: options.Engine = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Show how an answer came about in training: an exact sum over all layers and steps. Takes as long as training."""
    from spotlights.cli.answers import ask

    asked = ask(find_subject(memory, subject), query, where=where, without=without)
    account = asked.history(target)
    answers = {"totals": asked.totals(account, by, bins)}
    if "example" in asked.memory.columns:
        answers |= {"for": account.top(k), "against": account.bottom(k)}
    forgotten = account.forgetting()
    if plot is not None:
        from spotlights import figures

        column = answers["totals"].column
        figures.save(account.plot(by=None if column == "step" else column), plot)
    plain = {
        "account": {row["term"]: row[account.names[0]] for row in account.rows(0)},
        "exact": account.exact,
        **{name: float(getattr(account, name)[0]) for name in ("error", "residual", "kappa")},
        **{name: list(answer.rows(0)) for name, answer in answers.items()},
        "forgotten": list(forgotten.rows()),
    }
    shown = asked.title(None), account, *answers.values(), *([forgotten] if len(forgotten) else [])
    print_answer(plain, *shown, as_json=as_json, rows=plain["totals"], table=table)


@app.command(epilog='Example:  [bold]spotlights mask runs/demo 60000 "label=7; step=0-300"[/]')
def mask(
    memory: options.Memory,
    query: options.Query,
    left_out: Annotated[
        str,
        typer.Argument(
            metavar="SELECTION",
            help='What to leave out, such as "label=3,5": also "label=3 step=0-300" for what meets both, and "label=3; '
            'step=0-300" for what meets either.',
        ),
    ],
    subject: options.Subject = None,
    layers: Annotated[
        str | None,
        optional(help='In these layers, such as layers.1,layers.2, or "all"; in the layer that answers by default.'),
    ] = None,
    engine: options.Engine = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Show an answer with and without some of the training."""
    from spotlights.cli.answers import ask, compared

    with waiting("Adding up the weights that are left"):
        answers, masked = ask(find_subject(memory, subject), query).masked(left_out, layers)
    rows, shown = compared(answers, masked)
    print_answer(answers, shown, as_json=as_json, rows=rows, table=table)


@app.command(epilog="Example:  [bold]spotlights passages runs/aesop-char-laptop-0 --prompt 'The Lamb a little d'[/]")
def passages(
    memory: options.Memory,
    subject: options.Subject = None,
    *,
    prompt: Annotated[str, typer.Option(help="Text to ask about, at its end.")],
    last: Annotated[int, typer.Option(min=1, help="Ask about so many tokens at the end, together.")] = 1,
    layer: Annotated[str | None, optional(help="The layer; that of the subject, or the last one, by default.")] = None,
    kernel: Annotated[
        str, typer.Option(help="How keys and queries are compared: dot (what the network does), cosine, cosine-parts.")
    ] = "cosine",
    part: Annotated[
        str | None,
        optional(help="Of a recurrent layer: only x, the token itself, or h, what was read before it."),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="How many passages.")] = 10,
    around: Annotated[int | None, optional(min=0, help="Show at most so many tokens on either side.")] = None,
    engine: options.Engine = None,
    table: TableFile = None,
    as_json: AsJson = False,
) -> None:
    """Show the passages of the training text that a prompt attends to."""
    from spotlights.cli import answers

    with waiting("Reading the keys of every position"):
        about = find_subject(memory, subject)
        answer = answers.passages(about, prompt, last=last, kernel=kernel, part=part, layer=layer, k=k, around=around)
    rows = list(answer.rows())
    print_answer(rows, answer, as_json=as_json, rows=rows, table=table)


@app.command(epilog="Example:  [bold]spotlights explore runs/demo[/]")
def explore(
    memory: options.Memory,
    subject: options.Subject = None,
    host: Annotated[str, typer.Option(help="Another address than this machine's own demands a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8733,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    compare: Annotated[
        Path | None, optional(help="Another memory, to compare answers: of another seed, or after cleaning.")
    ] = None,
    engine: options.Engine = None,
    as_json: AsJson = False,
) -> None:
    """Open the explorer: a local web page. Ctrl-C stops it."""
    with waiting("Opening"):
        first = find_subject(memory, subject)
        other = None if compare is None else other_subject(first, compare, subject)
        served = Served(first, other=other, host=host, port=port)
    gc.freeze()  # torch and its kind stay: walking through them in the middle of an answer takes 150 ms
    print_json({"url": served.url}) if as_json else typer.echo(f"{served}\nCtrl-C stops it.")
    if browser:
        webbrowser.open(served.url)
    served.wait()


@app.command(epilog="Example:  [bold]spotlights export runs/demo 60008 --out answer.html[/]")
def export(
    memory: options.Memory,
    query: options.Query,
    subject: options.Subject = None,
    layer: options.AnswersLayer = None,
    measure: options.SignedMeasure = "contribution",
    target: options.Target = None,
    view: Annotated[str, optional(help="history, map or audit; the answer by default.")] = "",
    out: Annotated[Path, typer.Option(help="The file.")] = Path("answer.html"),
    as_json: AsJson = False,
) -> None:
    """Save the explorer's page of one answer as one HTML file, which opens anywhere without a server."""
    with waiting("Adding up the training by groups"):
        about = find_subject(memory, subject)
        page = about.page(query, view=view, layer=layer, measure=measure, target=target).save(out)
    print_answer({"page": str(page), "bytes": page.stat().st_size}, page, as_json=as_json)
