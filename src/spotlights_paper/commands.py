"""The commands of the paper's experiments: demo, run, reproduce, report, retrain-check and evaluate."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from spotlights.cli.options import AsJson, Memory, Subject, app, optional, print_json, print_result
from spotlights.errors import SettingError


@app.command(epilog="Example:  [bold]spotlights demo --steps 500 --out /tmp/demo[/]")
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Steps of training; a thousand take 0.9 GB of disk.")] = 1500,
    out: Annotated[Path, typer.Option(help="Where the memory and the figures go.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Train on MNIST with recording, verify the memory, explain three test images: two minutes, 1.4 GB of disk."""
    from rich.console import Console

    from spotlights_paper.experiments import demo as experiment

    settings = experiment.DemoSettings(out=out, steps=steps)
    outcome = experiment.run(settings, Console(stderr=as_json))
    if as_json:
        print_json(asdict(outcome))
    raise typer.Exit(0 if outcome.exact else 1)


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
        optional(
            help="paper (the default of the image experiments; for the language models hours to a day on a CPU; "
            "bfloat16 takes a third of it); laptop (theirs: a quarter of an hour at most); quick (seconds); table1, "
            "text, long, reversed or sgd, where the experiment has them."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of the examples.")] = 0,
    steps: Annotated[int | None, optional(min=1, help="Another number of steps.")] = None,
    text: Annotated[Path | None, optional(help="The text file of char-lm and word-lm, in UTF-8.")] = None,
    out: Annotated[Path | None, optional(help="The folder; runs/NAME-PRESET-SEED by default.")] = None,
    source: Annotated[
        Path | None,
        optional("--from", help="Repeat the run that this run.json describes."),
    ] = None,
    discard: Annotated[
        bool, typer.Option("--discard-memory", help="Throw the memory away once it is analysed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run one of the paper's experiments, or train on your own text: with recording, then verify and analyse."""
    from spotlights_paper.experiments import running

    if (name is None) == (source is None):
        raise SettingError("Give the name of an experiment, or --from run.json, and not both.")
    if source is not None:
        folder = running.repeat(source, out=out, keep=not discard)
    else:
        assert name is not None
        folder = running.run_experiment(
            name, preset=preset, seed=seed, steps=steps, text=text, out=out, keep=not discard
        )
    finished = running.load_run(folder)
    if as_json:
        print_json({"folder": str(folder), **asdict(finished)})
    else:
        print_result(running.summary(finished, folder))
    raise typer.Exit(0 if finished.exact else 1)


@app.command(epilog="Example:  [bold]spotlights reproduce --seeds 1 --out runs/reproduction[/]")
def reproduce(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 5,
    out: Annotated[Path, typer.Option(help="The folder of the runs and of the report.")] = Path("runs/reproduction"),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the memories of seed 0 (23 GB).")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few hundred images, to see that it works.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run all of the paper's experiments, check its statements, and write one report about them.

    Image experiments run over several seeds, language models ("laptop" presets) once. Goes on where it was interrupted.
    On two cores the first seed takes an hour and each further one 15 minutes; 17 GB of disk at most at a time.
    """
    from spotlights_paper import statements
    from spotlights_paper.experiments.running import run_plan
    from spotlights_paper.report import write_report

    folders = run_plan(seeds=seeds, out=out, keep=keep, quick=quick)
    page = write_report(folders, out / "report")
    judged = statements.judge(statements.Findings.of(folders))
    if as_json:
        print_json({"page": str(page), "statements": [statement.as_dict() for statement in judged]})
    else:
        print_result(statements.table(judged))
        typer.echo(page)


@app.command(epilog="Example:  [bold]spotlights report runs/mnist-single-paper-* --out reports/mnist-single[/]")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders that spotlights run made.")],
    out: Annotated[Path | None, optional(help="The folder; RUN/report by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about some runs, and its figures as PNG and PDF."""
    from spotlights_paper.report import write_report

    page = write_report(runs, runs[0] / "report" if out is None else out)
    print_json({"page": str(page)}) if as_json else typer.echo(page)


@app.command(
    "retrain-check", epilog="Example:  [bold]spotlights retrain-check runs/mnist-single-paper-0 --without label=3[/]"
)
def retrain_check(
    memory: Memory,
    without: Annotated[
        str | None,
        optional("--without", help='What to leave out, such as label=3, example=17,42 or "source=mnist label=3,5".'),
    ] = None,
    decisions: Annotated[
        Path | None, optional("--decisions", help="Instead: the file that the explorer's audit exported.")
    ] = None,
    subject: Subject = None,
    as_json: AsJson = False,
) -> None:
    """Really retrain without a group; put the estimate, the mask and the truth side by side.

    The subject says how to train again: sl.Subject(…, retrain=function).
    """
    from spotlights import Decisions
    from spotlights.cli.subjects import find_subject
    from spotlights_paper.experiments import retrain_check as check

    if (without is None) == (decisions is None):
        raise SettingError("Give --without with a selection, or --decisions with the file of an audit.")
    asked = Decisions.read(decisions) if without is None and decisions is not None else without or ""
    result = check.retrain_check(find_subject(memory, subject), asked)
    print_json(asdict(result)) if as_json else print_result(result)


evaluations = typer.Typer(help="Measure how good the answers are.", no_args_is_help=True)
app.add_typer(evaluations, name="evaluate")


@evaluations.command(epilog="Example:  [bold]spotlights evaluate truth mnist-mlp --retrains 100[/]")
def truth(
    setting: Annotated[
        str, typer.Argument(help="mnist-mlp, fashion-mlp, mnist-cnn, digits-mlp, diabetes, letter-gpt …")
    ] = "mnist-mlp",
    retrains: Annotated[int, typer.Option(min=4, help="Networks retrained on random halves, with fresh seeds.")] = 100,
    again: Annotated[int, typer.Option(min=0, help="How many of them again: what noise allows at best.")] = 0,
    same: Annotated[int, typer.Option(min=0, help="Networks retrained with the same initial weights and order.")] = 0,
    removals: Annotated[int, typer.Option(min=0, help="Test images whose top examples are dropped.")] = 0,
    method: Annotated[
        list[str] | None,
        typer.Option(help="influence, contribution, score or same label; all by default. Give it several times."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder; goes on with what lies there.")] = Path("runs/truth"),
    margins: Annotated[
        Path | None, typer.Option(help="A file of margins, as in docs/truth: no halves are retrained.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few hundred images, to see that it works.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare what the memory estimates with networks that were really trained without some examples."""
    from spotlights_paper.experiments.truth.harness import evaluate
    from spotlights_paper.experiments.truth.recorded import METHODS

    result = evaluate(
        setting,
        out=out,
        retrains=retrains,
        again=again,
        same=same,
        removals=removals,
        methods=method or tuple(METHODS),
        margins=margins,
        quick=quick,
    )
    print_json(result.as_dict()) if as_json else print_result(result)


@evaluations.command(epilog="Example:  [bold]spotlights evaluate scores mine.npz --margins docs/truth/diabetes.npz[/]")
def scores(
    files: Annotated[
        list[Path], typer.Argument(help='NumPy files with an array "scores": test inputs × training examples.')
    ],
    margins: Annotated[Path, typer.Option(help="The setting's margins, as in docs/truth.")],
    as_json: AsJson = False,
) -> None:
    """Score a method of your own against networks that were retrained before: in seconds, nothing is trained."""
    from spotlights_paper.experiments.truth.margins import score_files

    result = score_files(files, margins)
    print_json(asdict(result)) if as_json else print_result(result)
