"""The demo: trains the paper's MNIST network with recording, verifies the memory, explains three answers.

    spotlights demo

If MNIST cannot be downloaded, the demo uses scikit-learn's 8 × 8 digits instead, and says so.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int64
from rich.console import Console
from rich.rule import Rule
from torch import Tensor, nn

import spotlights as sl
from spotlights.errors import MemoryExistsError, MemoryFormatError, SettingError
from spotlights.figures import save
from spotlights_paper import datasets
from spotlights_paper.datasets import DatasetError
from spotlights_paper.experiments.demo_page import explain, plot_explanation, say_goodbye, tables
from spotlights_paper.experiments.images import Images, Prepared, normalised
from spotlights_paper.experiments.training import (
    ImageBatch,
    PaperSettings,
    accuracy,
    answers,
    mlp,
    paper_network,
    recorded_network,
    train_on_images,
)

MEMORY, MARK = "demo.memory", "demo.json"
"""What the demo leaves in its folder: the memory, and the settings it was made with."""

RECORDING = 1.4
"""How many times longer a step takes with recording; measured, for the estimate that is printed first."""
SECONDS_PER_GB = 8
"""Of verifying a memory and asking the questions; measured on two cores."""


@dataclass(frozen=True, kw_only=True)
class DemoSettings(PaperSettings):
    """The paper's network, on half of its steps, so that the memory takes 1.4 GB."""

    out: Path = Path("runs/demo")
    """Where the memory and the figures go. An earlier demo there is replaced, anything else is not."""
    data: str = "mnist"
    """What to train on; "digits" if it cannot be downloaded."""
    steps: int = 1500
    """3.2 epochs. Every epoch takes each example once, in a new order."""
    dtype: str = "float16"
    """Half the size of float32, and approximate."""
    explained: tuple[int, ...] = (6, 3)
    """Digits to explain: the first of each that the network gets right; then the first that it gets wrong."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise SettingError(f"steps={self.steps}, batch={self.batch}: both must be at least 1.")


@dataclass(frozen=True)
class ExplainedAnswer:
    """A test image that was explained."""

    example: int
    truth: int
    said: int
    figure: Path


@dataclass(frozen=True)
class DemoOutcome:
    """The results of a demo."""

    data: str
    steps: int
    seconds: float
    """Of training with recording."""
    accuracy: float
    """The share of test images that the network gets right."""
    exact: bool
    """Whether the memory equals the network, within the rounding of its storage type."""
    stored_as: str
    relative_errors: dict[str, float]
    memory: Path
    answers: list[ExplainedAnswer]


def run(settings: DemoSettings, console: Console) -> DemoOutcome:
    """Trains, verifies, explains."""
    console.print(Rule("Spotlights: which training examples is an answer made of?"))
    images = load_images(settings.data, console)
    settings = replace(settings, data=images.train.source)
    _claim(settings)
    _announce(images.train, settings, console)

    path, data = settings.out / MEMORY, {settings.data: images}
    model, optimizer = paper_network(settings, data, settings.seed)
    source = batches(images.train, settings)
    started = time.perf_counter()
    trained = train_on_images(model, optimizer, settings, data=data, batches=source, path=path)
    seconds = time.perf_counter() - started
    memory, network, test = trained.memory, trained.model, images.test
    if memory.steps < settings.steps:
        raise MemoryFormatError(
            f"Recording to {path} stopped after {memory.steps:,} of {settings.steps:,} steps. "
            "The warning above says why."
        )
    share = accuracy(network, test)
    console.print(f"Trained and recorded in {seconds:.0f} s: {share:.1%} of {len(test):,} test images are right.\n")
    console.print(memory.info)
    with console.status("Adding up every slot of the memory, to compare it with the network"):
        verification = memory.verify(network)
    console.print(verification)

    said = answers(network, test)
    positions = choose(said, test.labels, settings.explained)
    explained = []
    for number, position in enumerate(positions.tolist(), start=1):
        example, truth, pixels = int(test.ids[position]), int(test.labels[position]), test.pixels[position]
        explanation = explain(memory, network, test.inputs[position : position + 1])
        title = f"test example {example} of {settings.data}"
        page = plot_explanation(explanation, pixels, images.train.pixels_of, truth=truth, title=title)
        figure = save(page, settings.out / f"answer-{number}.png")
        explained.append(ExplainedAnswer(example, truth, explanation.answer, figure))
        verdict = "[green]right[/]" if truth == explanation.answer else f"[red]wrong[/], it is {truth}"
        console.print(Rule(f"{title}: the network says {explanation.answer} ({verdict})", align="left"))
        for table in tables(explanation, pixels):
            console.print(table, highlight=False)
    say_goodbye(console, settings.out, path, [answer.figure for answer in explained])
    return DemoOutcome(
        settings.data,
        settings.steps,
        round(seconds, 1),
        share,
        verification.ok,
        settings.dtype,
        {name: check.relative_error for name, check in verification.items()},
        path,
        explained,
    )


def reopen(out: str | Path = DemoSettings.out) -> tuple[sl.Memory, nn.Module, Prepared]:
    """An earlier demo: its memory, its network (rebuilt from the memory) and its images."""
    mark = _read_mark(Path(out))
    if mark is None:
        raise MemoryFormatError(f"There is no demo in {out}. Make one: spotlights demo --out {out}.")
    memory = sl.open(Path(out) / MEMORY)
    return memory, recorded_network(memory), load_images(mark["data"], Console(stderr=True))


# -- what it takes ----------------------------------------------------------------------------


def expected_bytes(sizes: tuple[int, ...], examples: int, settings: DemoSettings) -> int:
    """The size of the memory: a key and an error for each layer and slot. Equal keys, the images, are stored once.

    Checkpoints of the weights add at most a twenty-fourth, columns and the step log hardly anything.
    """
    slots = settings.steps * settings.batch
    numbers = min(slots, examples) * sizes[0] + slots * (sum(sizes[1:-1]) + sum(sizes[1:]))
    return numbers * torch.finfo(getattr(torch, settings.dtype)).bits // 8 * 25 // 24


def _announce(train: Images, settings: DemoSettings, console: Console) -> None:
    """Says what the demo will take, and refuses where the disk is too full."""
    sizes = (train.inputs.shape[1], *settings.hidden, len(train.classes))
    size, free = expected_bytes(sizes, len(train), settings), shutil.disk_usage(settings.out).free
    free += sum(path.stat().st_size for path in (settings.out / MEMORY).rglob("*") if path.is_file())  # replaced
    trial, seconds = mlp(sizes), []
    for _ in range(6):
        started = time.perf_counter()
        F.cross_entropy(trial(train.inputs[: settings.batch]), train.labels[: settings.batch]).backward()
        seconds.append(time.perf_counter() - started)
    minutes = (settings.steps * min(seconds) * RECORDING + size / 1e9 * SECONDS_PER_GB) / 60
    approximate = ": approximate" if settings.dtype == "float16" else ""
    console.print(
        f"This will take about {max(0.1, minutes):.1f} minutes and {size / 1e9:.2g} GB of disk in {settings.out} "
        f"({free / 1e9:,.1f} GB are free): {settings.steps:,} steps of {settings.batch} images, "
        f"stored as {settings.dtype}{approximate}.\n",
        highlight=False,
    )
    if size > 0.95 * free:
        raise SettingError(
            f"{settings.out} has {free / 1e9:.1f} GB left, and the memory takes {size / 1e9:.1f} GB. "
            "Choose another folder with --out, or fewer --steps."
        )


# -- data and folder --------------------------------------------------------------------------


def load_images(name: str, console: Console) -> Prepared:
    """The data set, or scikit-learn's digits if it cannot be downloaded."""
    try:
        dataset = datasets.load(name)
    except DatasetError as error:
        console.print(str(error), style="yellow", markup=False, highlight=False)
        console.print(f"[yellow bold]So this demo uses scikit-learn's 8 × 8 digits instead of {name}.[/]\n")
        dataset = datasets.load("digits")
    return normalised(dataset)


def batches(train: Images, settings: DemoSettings) -> Iterator[ImageBatch]:
    """Batches without end: every epoch has each example once."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        for rows in torch.randperm(len(train), generator=generator).split(settings.batch):
            yield ImageBatch(train.inputs[rows], train.labels[rows], train.ids[rows], {"source": settings.data})


def choose(
    said: Int64[Tensor, "test"], truth: Int64[Tensor, "test"], digits: tuple[int, ...]
) -> Int64[Tensor, "chosen"]:
    """Positions of the first right answer for each digit, and of the first wrong one."""
    right = said == truth
    kinds = [right & (truth == digit) for digit in digits] + [~right]
    return torch.tensor([int(kind.nonzero()[0]) for kind in kinds if kind.any()] or [0])


def _claim(settings: DemoSettings) -> None:
    """Takes the folder, unless it holds something that is not a demo's."""
    out = settings.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and _read_mark(out) is None:
        raise MemoryExistsError(f"{out} holds something other than a demo. Choose another folder with --out.")
    out.mkdir(parents=True, exist_ok=True)
    mark = {"experiment": "demo", **asdict(settings), "out": str(out)}
    (out / MARK).write_text(json.dumps(mark, indent=2) + "\n")


def _read_mark(out: Path) -> dict[str, Any] | None:
    try:
        mark = json.loads((out / MARK).read_text())
    except (OSError, ValueError):
        return None
    return mark if isinstance(mark, dict) and mark.get("experiment") == "demo" else None
