"""The demo: trains the paper's MNIST network with recording, verifies the memory, explains three answers.

    spotlights demo

Without MNIST in reach it takes scikit-learn's 8 × 8 digits instead, and says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table
from torch import Tensor, nn

import spotlights as sl
from spotlights import datasets, figures
from spotlights.attention.results import Top
from spotlights.attention.tables import build, shown
from spotlights.datasets import Dataset
from spotlights.errors import DatasetError, MemoryExistsError, MemoryFormatError, SettingError
from spotlights.experiments.network import mlp
from spotlights.experiments.training import recorded_network

MEMORY, MARK = "demo.memory", "demo.json"
"""What the demo leaves in its folder: the memory, and the settings it was made with."""


@dataclass(frozen=True)
class Settings:
    """The paper's, where it has them."""

    out: Path = Path("runs/demo")
    """Where the memory and the figures go. An earlier demo there is replaced, anything else is not."""
    data: str = "mnist"
    """What to train on; "digits" if it cannot be reached."""
    steps: int = 3000
    """6.4 epochs: enough for 96.5 % of the test images."""
    batch: int = 128
    """Examples in a step. Every epoch takes each of them once, in a new order."""
    lr: float = 3e-3
    momentum: float = 0.9
    """The paper's text says plain SGD, its authors' code has momentum and clipping."""
    clip: float = 1.0
    """The largest norm of the gradient."""
    hidden: tuple[int, ...] = (800, 800)
    """Two hidden layers."""
    dtype: str = "float32"
    """How the memory stores keys and errors: as the network computed them, 5 GB in all."""
    explained: tuple[int, ...] = (6, 3)
    """Digits to explain: the first of each that the network gets right; then the first that it gets wrong."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise SettingError(f"steps={self.steps}, batch={self.batch}: both must be at least 1.")


@dataclass(frozen=True, eq=False)
class Images:
    """A data set, and its images as the network sees them."""

    dataset: Dataset
    train: Float[Tensor, "train height width"]
    test: Float[Tensor, "test height width"]
    """Normalised by the mean and the standard deviation of the training images."""

    def of_training(self, example: int) -> Shaped[np.ndarray, "height width"]:
        """The pixels of a training example."""
        split = self.dataset.train
        return split.images[split.positions(torch.tensor([example]))[0]].numpy()


@dataclass(frozen=True)
class Answer:
    """A test image that was explained."""

    example: int
    truth: int
    said: int
    figure: Path


@dataclass(frozen=True)
class Outcome:
    """What a run of the demo found."""

    data: str
    steps: int
    seconds: float
    """Of training with recording."""
    accuracy: float
    """The share of test images that the network gets right."""
    exact: bool
    """Whether the memory equals the network."""
    relative_errors: dict[str, float]
    memory: Path
    answers: list[Answer]


def run(settings: Settings, console: Console) -> Outcome:
    """Trains, verifies, explains."""
    console.print(Rule("Spotlights: which training examples is an answer made of?"))
    images = load_images(settings.data, console)
    settings = replace(settings, data=images.dataset.name)
    _claim(settings)

    torch.manual_seed(settings.seed)
    train, test = images.dataset.train, images.dataset.test
    network = mlp((train.images[0].numel(), *settings.hidden, len(images.dataset.classes)))
    optimizer = torch.optim.SGD(network.parameters(), lr=settings.lr, momentum=settings.momentum)
    path = settings.out / MEMORY
    started = time.perf_counter()
    with (
        sl.record(network, optimizer, path, dtype=settings.dtype, overwrite=True) as recorder,
        _bar(console) as bar,
    ):
        task = bar.add_task("training", total=settings.steps, loss="")
        for step, rows in enumerate(batches(len(train), settings)):
            recorder.batch(example=train.ids[rows], label=train.labels[rows], source=settings.data)
            loss = F.cross_entropy(network(images.train[rows]), train.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), settings.clip)
            optimizer.step()
            if step % 10 == 0 or step + 1 == settings.steps:
                bar.update(task, completed=step + 1, loss=f"loss {loss.item():.3f}")
    seconds = time.perf_counter() - started

    with torch.no_grad():
        said = network(images.test).argmax(dim=1)
    accuracy = float((said == test.labels).double().mean())
    console.print(f"Trained and recorded in {seconds:.0f} s: {accuracy:.1%} of {len(test):,} test images are right.\n")

    memory = sl.open(path)
    if memory.steps < settings.steps:
        raise MemoryFormatError(
            f"Recording to {path} stopped after {memory.steps:,} of {settings.steps:,} steps. "
            "The warning above says why."
        )
    console.print(memory.info)
    with console.status("Adding up every slot of the memory, to compare it with the network"):
        verification = memory.verify(network)
    console.print(verification)

    chosen = choose(said, test.labels, settings.explained)
    with console.status("Shining the spotlights on three test images"):
        spotlights = memory.attend(network, images.test[chosen])
        explanation = figures.explain(spotlights)
        last = list(spotlights)[-1]
        contributions = spotlights[last].contributions(said[chosen])
        speaks_for, speaks_against = contributions.top(3, by="example"), contributions.bottom(3, by="example")
    answers = []
    for query, position in enumerate(chosen.tolist()):
        example, truth = int(test.ids[position]), int(test.labels[position])
        title = f"test example {example} of {settings.data}"
        page = figures.plot_explanation(
            explanation,
            query,
            test.images[position].numpy(),
            images.of_training,
            truth=truth,
            title=title,
        )
        figure = figures.save(page, settings.out / f"answer-{query + 1}.png")
        answers.append(Answer(example, truth, int(said[position]), figure))
        verdict = "[green]right[/]" if truth == said[position] else f"[red]wrong[/], it is {truth}"
        console.print(Rule(f"{title}: the network says {said[position]} ({verdict})", align="left"))
        console.print(_side_by_side(_picture(test.images[position]), _examples_table(explanation, query)))
        console.print(_classes_table(explanation, query))
        console.print(_side_by_side(*(_signed_table(top, query) for top in (speaks_for, speaks_against))))

    _say_goodbye(console, settings, answers)
    return Outcome(
        settings.data,
        settings.steps,
        round(seconds, 1),
        accuracy,
        verification.ok,
        {name: check.relative_error for name, check in verification.items()},
        path,
        answers,
    )


def reopen(out: str | Path = Settings.out) -> tuple[sl.Memory, nn.Module, Images]:
    """An earlier demo: its memory, its network (which the memory is) and its images."""
    mark = _read_mark(Path(out))
    if mark is None:
        raise MemoryFormatError(f"There is no demo in {out}. Make one: spotlights demo --out {out}.")
    memory = sl.open(Path(out) / MEMORY)
    return memory, recorded_network(memory), load_images(mark["data"], Console(stderr=True))


# -- data -------------------------------------------------------------------------------------


def load_images(name: str, console: Console) -> Images:
    """The data set, or scikit-learn's digits if no source has it."""
    try:
        dataset = datasets.load(name)
    except DatasetError as error:
        console.print(f"[yellow]{error}[/]", highlight=False)
        console.print(f"[yellow bold]So this demo uses scikit-learn's 8 × 8 digits instead of {name}.[/]\n")
        dataset = datasets.load("digits")
    train, test = dataset.train.images.float(), dataset.test.images.float()
    mean, deviation = train.mean(), train.std()
    return Images(dataset, (train - mean) / deviation, (test - mean) / deviation)


def batches(examples: int, settings: Settings) -> Iterator[Int64[Tensor, "batch"]]:
    """Positions of the examples of each step: every epoch has each example once."""
    generator = torch.Generator().manual_seed(settings.seed)
    step = 0
    while True:
        for rows in torch.randperm(examples, generator=generator).split(settings.batch):
            if step == settings.steps:
                return
            yield rows
            step += 1


def choose(
    said: Int64[Tensor, "test"], truth: Int64[Tensor, "test"], digits: tuple[int, ...]
) -> Int64[Tensor, "chosen"]:
    """Positions of the first right answer for each digit, and of the first wrong one."""
    right = said == truth
    wanted = [right & (truth == digit) for digit in digits] + [~right]
    found = [int(each.nonzero()[0]) for each in wanted if each.any()]
    return torch.tensor(found or [0])


# -- the folder -------------------------------------------------------------------------------


def _claim(settings: Settings) -> None:
    """Takes the folder, unless it holds something that is not a demo's."""
    out = settings.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and _read_mark(out) is None:
        raise MemoryExistsError(f"{out} holds something else than a demo. Choose another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    mark = {"experiment": "demo", **asdict(settings), "out": str(out)}
    (out / MARK).write_text(json.dumps(mark, indent=2) + "\n")


def _read_mark(out: Path) -> dict[str, str] | None:
    try:
        mark = json.loads((out / MARK).read_text())
    except (OSError, ValueError):
        return None
    return mark if isinstance(mark, dict) and mark.get("experiment") == "demo" else None


# -- the terminal -----------------------------------------------------------------------------


def _bar(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    return Progress(*columns, TimeRemainingColumn(), console=console)


def _picture(image: Shaped[Tensor, "height width"]) -> str:
    """An image in letters: two rows of pixels in each line."""
    ink = image > 96
    if len(ink) % 2:
        ink = torch.cat([ink, torch.zeros_like(ink[:1])])
    letters = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
    return "\n".join("".join(letters[pair] for pair in zip(*pixels.tolist(), strict=True)) for pixels in ink.split(2))


def _side_by_side(*parts: object) -> Table:
    grid = Table.grid(padding=(0, 4))
    grid.add_row(*parts)  # type: ignore[arg-type]
    return grid


def _examples_table(explanation: figures.Explanation, query: int) -> Table:
    rows = []
    for layer in explanation.layers:
        assert layer.examples is not None  # the demo says who is in each batch
        for row in layer.examples.rows(query):
            name = layer.name if row["rank"] == 1 else ""
            rows.append([name, row["rank"], row["example"], row["label"], row["score"]])
    title = "training examples with the largest scores"
    return build(title, ["layer", "rank", "example", "label", "score"], rows, "summed over all visits")


def _classes_table(explanation: figures.Explanation, query: int) -> Table:
    layers, target = explanation.layers, explanation.targets[query]
    names = ["label", *(f"score\n{layer.name}" for layer in layers)]
    names += [f"for {target}\n{layer.name}" for layer in layers]
    rows = []
    for group, label in enumerate(layers[0].totals.groups):
        scores = [_short(float(layer.totals.values[query, group])) for layer in layers]
        signed = [layer.contributions for layer in layers if layer.contributions is not None]
        rows.append([label, *scores, *(f"{float(part.values[query, group]):+.3f}" for part in signed)])
    last = layers[-1]
    assert last.contributions is not None  # recorded with SGD and errors
    assert last.initial is not None
    training, initial = float(last.contributions.values[query].sum()), float(last.initial[query])
    note = (
        f"for (+) or against (−) the logit of {target}: exact in {last.name}, first order in the others.\n"
        f"{last.name}: training {training:+.3f}, initial weights {initial:+.3f}, together the logit "
        f"{shown(float(explanation.output[query, target]))}."
    )
    return build("totals by class", names, rows, note)


def _short(value: float) -> str:
    return f"{value / 1e6:.2f} M" if abs(value) >= 1e6 else f"{value:,.0f}"


def _signed_table(top: Top, query: int) -> Table:
    rows = list(top.rows(query))
    side = "against" if rows and rows[0]["contribution"] < 0 else "for"
    body = [[row["example"], row["label"], f"{row['contribution']:+.4f}"] for row in rows]
    return build(f"{side} it, in {top.layer}: exact", ["example", "label", "contribution"], body, None)


def _say_goodbye(console: Console, settings: Settings, answers: list[Answer]) -> None:
    console.print(Rule("Where everything is", align="left"))
    console.print(f"memory   {settings.out / MEMORY}", highlight=False)
    for answer in answers:
        console.print(f"figure   {answer.figure}", highlight=False)
    console.print("\nTo look around in it:\n")
    console.print(f"    spotlights explore {settings.out}", style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print("\nTo go on, in Python:\n")
    for line in (
        "from spotlights.experiments import demo",
        f'memory, network, images = demo.reopen("{settings.out}")',
        'print(memory.attend(network, images.test[:1])["layers.2"].top(10, by="example"))',
    ):
        console.print(f"    {line}", style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print()
