"""One answer on one page: the test image, then the scores, totals, contributions and top images of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from torch import Tensor

import spotlights as sl
from spotlights.figures import TotalsPanel, add_note, draw_top, draw_totals, new_figure
from spotlights.figures.palette import AGAINST, FOR, INK, QUIET, colours, style
from spotlights.results import TitledTable, Top, Totals, build, shown
from spotlights_paper.pictures import Captioned, ImageOf, draw_image, draw_images

_HEADER, _ROW = 1.9, 2.15
"""Heights in inches."""
_WIDTHS = (3.1, 2.0, 2.0, 2.2)
"""Of the columns: scores, totals, contributions, examples."""
_EXAMPLES = 3
"""Training images shown for each layer."""


@dataclass(frozen=True)
class LayerExplanation:
    """One layer's part of the answers."""

    name: str
    shape: tuple[int, int]
    """Features in and out."""
    top: Top
    """The largest scores of each class."""
    totals: Totals
    """The scores summed over each class."""
    examples: Top
    """The examples with the largest scores, summed over visits."""
    contributions: Totals
    """What each class adds to the logit of the answer, signed."""
    initial: Float[Tensor, "queries"]
    """What the initial weights add to it."""
    exact: bool
    """Whether the contributions and the initial part add up to the logit itself, up to the rounding of the memory."""


@dataclass(frozen=True)
class Explanation:
    """What some answers are made of."""

    layers: tuple[LayerExplanation, ...]
    output: Float[Tensor, "queries classes"]
    """The model's logits."""
    answers: tuple[int, ...]
    """The class that the model gave each query: the contributions are about its logit."""
    note: str | None
    """How far the numbers can be trusted."""
    approximate: bool
    """Keys and errors were rounded as they were stored, so that sums are approximate too."""

    @property
    def kind(self) -> str:
        """What the sums of the last layer's contributions are."""
        return "approximate" if self.approximate else "exact"


def explain(memory: sl.Memory, spotlights: sl.Spotlights, *, k: int = 500) -> Explanation:
    """Asks all that `plot_explanation` shows, for all queries at once.

    Args:
        memory: of a classifier, with errors and the columns "label" and "example".
        spotlights: what `memory.attend(model, images)` gave.
        k: how many of the largest scores of each class.
    """
    answers = spotlights.output.argmax(dim=1)
    scores = spotlights.ask(sl.AskTop(k, "label"), sl.AskTotals("label"))
    layers = []
    for name, attention in spotlights.items():
        info, contributions = memory.layers[name], attention.contributions(answers)
        top, totals = scores[name]
        layers.append(
            LayerExplanation(
                name,
                (info.in_features, info.out_features),
                top,
                totals,
                attention.top(_EXAMPLES, by="example"),
                contributions.totals("label"),
                contributions.initial,
                contributions.exact,
            )
        )
    notes = dict.fromkeys(layer.top.note for layer in layers if layer.top.note)
    return Explanation(
        tuple(layers),
        spotlights.output.detach().cpu(),
        tuple(answers.tolist()),
        "; ".join(notes) or None,
        approximate=any(memory.layers[layer.name].storage in ("float16", "int8") for layer in layers),
    )


def plot_explanation(
    explanation: Explanation,
    query: int,
    image: Shaped[np.ndarray, "height width"],
    image_of: ImageOf,
    *,
    truth: int,
    title: str = "",
) -> Figure:
    """Draws all that is known about one answer.

    Args:
        explanation: what `explain` gave.
        query: which of its queries.
        image: the test image.
        image_of: gives the pixels of a training example, by its id.
        truth: the true class.
        title: what to call the test image.
    """
    layers, answer = explanation.layers, explanation.answers[query]
    marks = {truth: "true", answer: "said"}
    with style():
        heights = [_HEADER] + [_ROW] * len(layers)
        figure = new_figure(1.65 * sum(_WIDTHS), sum(heights))
        grid = GridSpec(len(heights), len(_WIDTHS), figure, width_ratios=_WIDTHS, height_ratios=heights)
        place = grid[0, 0].subgridspec(1, 2, width_ratios=(1, 1.35))
        draw_image(figure.add_subplot(place[0]), image, frame=colours([answer])[0])
        _draw_verdict(figure.add_subplot(place[1]), answer, truth, title)
        axes, logits = figure.add_subplot(grid[0, 1]), explanation.output[query].numpy()
        draw_totals(axes, TotalsPanel(logits, range(len(logits)), "", ""), marks=marks)
        axes.set_title("the answer: logits")
        _draw_legend(figure.add_subplot(grid[0, 2:]), explanation, answer)
        for row, layer in enumerate(layers, start=1):
            scores, totals, contributions, examples = (figure.add_subplot(grid[row, column]) for column in range(4))
            draw_top(scores, layer.top.panel(query), marks=marks)
            draw_totals(totals, layer.totals.panel(query), marks=marks)
            draw_totals(contributions, layer.contributions.panel(query), marks=marks)
            scores.set_ylabel(f"{layer.name}\n{layer.shape[0]} → {layer.shape[1]}", weight="bold", color=INK)
            for axes in (scores, totals):
                axes.set_xlabel("label" if layer is layers[-1] else "")
            for axes in (totals, contributions):
                axes.set_ylabel("")
            weight = "bold" if layer.exact else "normal"
            contributions.set_xlabel(_sum(explanation, layer, query), color=INK, weight=weight, fontsize=8)
            draw_images(examples, [_captioned(row, image_of) for row in layer.examples.rows(query)])
            if row == 1:
                scores.set_title(f"scores of the top {layer.top.values.shape[2]} slots of each label")
                totals.set_title(f"{layer.totals.name} by label")
                contributions.set_title(f"contributions to logit {answer}, by label")
                examples.set_title("training images with most score")
        add_note(figure, explanation.note)
    return figure


def _draw_verdict(axes: Axes, answer: int, truth: int, title: str) -> None:
    axes.axis("off")
    right = truth == answer
    verdict = f"{'right' if right else 'wrong'}: it is {truth}"
    axes.text(0, 0.80, f"The network says {answer}", fontsize=13, weight="bold", va="center")
    axes.text(0, 0.52, verdict, fontsize=11, va="center", color=FOR if right else AGAINST)
    axes.text(0, 0.27, title, fontsize=8.5, va="center", color=QUIET)


def _draw_legend(axes: Axes, explanation: Explanation, answer: int) -> None:
    """How to read the page."""
    axes.axis("off")
    rounding = ", up to rounding" if explanation.approximate else ""
    lines = {
        "score": "how similar a training input was to this one, as the layer saw both (key · query)",
        "contribution": f"what training on an example added to the logit of {answer}: for (+) or against (−)",
        explanation.kind: f"all contributions and the initial weights add up to the logit{rounding}",
        "first order": "a hidden layer's share, through the gradient of the logit",
        "slot": "one visit of a training example",
    }
    for index, (word, meaning) in enumerate(lines.items()):
        height = 0.93 - 0.19 * index
        axes.text(0.0, height, word, fontsize=8.5, weight="bold", va="center")
        axes.text(0.155, height, meaning, fontsize=8.5, va="center", color=QUIET)


def _sum(explanation: Explanation, layer: LayerExplanation, query: int) -> str:
    """What the contributions of a layer add up to."""
    training, initial = float(layer.contributions.values[query].sum()), float(layer.initial[query])
    text = f"first order: {training:.2f} training in all"
    if layer.exact:
        sign, size = ("+", initial) if initial >= 0 else ("−", -initial)
        logit = float(explanation.output[query, explanation.answers[query]])
        equals = "≈" if explanation.approximate else "="
        text = f"{explanation.kind}: {training:.2f} training {sign} {size:.2f} initial {equals} logit {logit:.2f}"
    return text.replace("-", "−")


def _captioned(row: dict, image_of: ImageOf) -> Captioned:
    label, example = row["label"], int(row["example"])
    below = f"score {shown(row['score'])}\nexample {example}"
    return Captioned(image_of(example), str(label), below, colours([label])[0])


# -- what the demo prints -------------------------------------------------------------------


def tables(
    explanation: Explanation, query: int, pixels: Shaped[Tensor, "height width"], strongest: Sequence[Top]
) -> Iterator[Table | TitledTable]:
    """The test image beside the nearest training examples, the classes, and what speaks for the answer and against it.

    Args:
        explanation: of some test images.
        query: which of them.
        pixels: of that test image.
        strongest: the training examples with the largest and the smallest contributions.
    """
    yield _side_by_side(_letters(pixels), _examples(explanation, query))
    yield _classes(explanation, query)
    yield _side_by_side(*(_contributions(top, query, explanation.kind) for top in strongest))


def _side_by_side(*parts: object) -> Table:
    grid = Table.grid(padding=(0, 4))
    grid.add_row(*parts)  # type: ignore[arg-type]
    return grid


def _letters(pixels: Shaped[Tensor, "height width"]) -> str:
    """An image in letters: two rows of pixels in each line."""
    ink = pixels > 96
    if len(ink) % 2:
        ink = torch.cat([ink, torch.zeros_like(ink[:1])])
    letters = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
    return "\n".join("".join(letters[pair] for pair in zip(*lines.tolist(), strict=True)) for lines in ink.split(2))


def _examples(explanation: Explanation, query: int) -> TitledTable:
    rows = []
    for layer in explanation.layers:
        for row in layer.examples.rows(query):
            name = layer.name if row["rank"] == 1 else ""
            rows.append([name, row["rank"], row["example"], row["label"], row["score"]])
    title = "training examples with the largest scores"
    return build(title, ["layer", "rank", "example", "label", "score"], rows, "summed over all visits")


def _classes(explanation: Explanation, query: int) -> TitledTable:
    layers, target = explanation.layers, explanation.answers[query]
    names = ["label", *(f"score\n{layer.name}" for layer in layers)]
    names += [f"for {target}\n{layer.name}" for layer in layers]
    rows = []
    for group, label in enumerate(layers[0].totals.groups):
        scores = [_short(float(layer.totals.values[query, group])) for layer in layers]
        signed = [f"{float(layer.contributions.values[query, group]):+.3f}" for layer in layers]
        rows.append([label, *scores, *signed])
    last = layers[-1]
    training, initial = float(last.contributions.values[query].sum()), float(last.initial[query])
    note = (
        f"for (+) or against (−) the logit of {target}: {explanation.kind} in {last.name}, first order in the others."
        f"\n{last.name}: training {training:+.3f} and initial weights {initial:+.3f} are {training + initial:.3f}; "
        f"the logit is {float(explanation.output[query, target]):.3f}."
    )
    return build("totals by class", names, rows, note)


def _short(value: float) -> str:
    return f"{value / 1e6:.2f} M" if abs(value) >= 1e6 else f"{value:,.0f}"


def _contributions(top: Top, query: int, kind: str) -> TitledTable:
    rows = list(top.rows(query))
    side = "against" if rows and rows[0]["contribution"] < 0 else "for"
    body = [[row["example"], row["label"], f"{row['contribution']:+.4f}"] for row in rows]
    return build(f"{side} it, in {top.layer}: {kind}", ["example", "label", "contribution"], body, None)


def say_goodbye(console: Console, out: Path, memory: Path, figures: Sequence[Path]) -> None:
    """Where everything is, and how to go on."""
    console.print(Rule("Where everything is", align="left"))
    for what, path in (("memory", memory), *(("figure", figure) for figure in figures)):
        console.print(f"{what}   {path}", highlight=False, markup=False)
    python = (
        "from spotlights_paper.experiments import demo",
        f"memory, network, images = demo.reopen({str(out)!r})",
        'print(memory.attend(network, images.test.inputs[:1])["layers.2"].top(10, by="example"))',
    )
    for title, lines in (("explore it", [f"spotlights explore {out}"]), ("go on, in Python", python)):
        console.print(f"\nTo {title}:\n")
        for line in lines:
            console.print(f"    {line}", style="bold", highlight=False, markup=False, soft_wrap=True)
    console.print()
