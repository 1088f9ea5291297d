"""One answer on one page: the test image, then each layer's scores, totals, contributions and images."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, SubplotSpec

from spotlights.attention.results import Label, Totals
from spotlights.attention.tables import shown
from spotlights.figures.attention import Texts, draw_top, draw_totals
from spotlights.figures.canvas import new_figure, say
from spotlights.figures.explanation import Explanation, LayerExplanation
from spotlights.figures.images import Captioned, ImageOf, draw_image, draw_images
from spotlights.figures.palette import AGAINST, FOR, INK, QUIET, colours, style

_HEADER, _ROW = 1.9, 2.15
"""Heights in inches."""


def plot_explanation(
    explanation: Explanation,
    query: int,
    image: Shaped[np.ndarray, "height width"],
    image_of: ImageOf,
    *,
    truth: int | None = None,
    names: Texts | None = None,
    title: str = "",
) -> Figure:
    """Draws all that is known about one answer.

    Args:
        explanation: what `explain` gave.
        query: which of its queries.
        image: the test image.
        image_of: gives the pixels of a training example, by its id.
        truth: the true class, if it is known.
        names: what to call the classes, such as `{0: "T-shirt"}`.
        title: what to call the test image.
    """
    layers = explanation.layers
    widths = {"scores": 3.1, "totals": 2.0}
    if any(layer.contributions is not None for layer in layers):
        widths["contributions"] = 2.0
    if any(layer.examples is not None for layer in layers):
        widths["examples"] = 2.2
    marks = _marks(explanation.answers[query], truth)
    with style():
        figure = new_figure(1.65 * sum(widths.values()), _HEADER + _ROW * len(layers))
        heights = [_HEADER] + [_ROW] * len(layers)
        grid = GridSpec(
            len(layers) + 1,
            len(widths),
            figure,
            width_ratios=list(widths.values()),
            height_ratios=heights,
        )
        page = _Page(figure, grid, explanation, query, names or {}, marks)
        page.header(image, truth, title)
        for row, layer in enumerate(layers, start=1):
            page.layer(row, layer, list(widths), image_of)
        notes = dict.fromkeys(layer.top.note for layer in layers if layer.top.note)
        say(figure, "; ".join(notes))
    return figure


def _marks(answer: int, truth: int | None) -> Texts:
    if truth is None or truth == answer:
        return {answer: "said"}
    return {answer: "said", truth: "true"}


class _Page:
    """A page that is being drawn."""

    def __init__(
        self, figure: Figure, grid: GridSpec, explanation: Explanation, query: int, names: Texts, marks: Texts
    ) -> None:
        self._figure = figure
        self._grid = grid
        self._explanation = explanation
        self._query = query
        self._names = names
        self._marks = marks

    def _name(self, label: object) -> str:
        return self._names.get(label, str(label))  # type: ignore[arg-type]

    # -- the answer ----------------------------------------------------------------------------

    def header(self, image: np.ndarray, truth: int | None, title: str) -> None:
        answer = self._explanation.answers[self._query]
        place = self._grid[0, 0].subgridspec(1, 2, width_ratios=(1, 1.35))
        frame = colours(self._explanation.per, [answer])[0]
        draw_image(self._figure.add_subplot(place[0]), image, frame=frame)
        words = self._figure.add_subplot(place[1])
        words.axis("off")
        words.text(0, 0.80, f"The network says {self._name(answer)}", fontsize=13, weight="bold", va="center")
        if truth is not None:
            right = truth == answer
            verdict = f"right: it is {self._name(truth)}" if right else f"wrong: it is {self._name(truth)}"
            words.text(0, 0.52, verdict, fontsize=11, va="center", color=FOR if right else AGAINST)
        words.text(0, 0.27, title, fontsize=8.5, va="center", color=QUIET)
        self._logits(self._figure.add_subplot(self._grid[0, 1]))
        if self._grid.ncols > 2:
            self._how_to_read(self._grid[0, 2:])

    def _logits(self, axes: Axes) -> None:
        logits = self._explanation.output[self._query]
        groups: list[Label] = list(range(len(logits)))
        values, counts = logits[None], torch.ones(len(groups), dtype=torch.int64)
        totals = Totals("", "logit", self._explanation.per, values, counts, groups)
        draw_totals(axes, totals, names=self._names, marks=self._marks)
        axes.set(xlabel="", ylabel="")
        axes.set_title("the answer: logits")

    def _how_to_read(self, place: SubplotSpec) -> None:
        axes = self._figure.add_subplot(place)
        axes.axis("off")
        lines = [("score", "how similar a training input was to this one, as the layer saw both (key · query)")]
        if any(layer.contributions is not None for layer in self._explanation.layers):
            target = self._name(self._explanation.targets[self._query])
            lines += [
                (
                    "contribution",
                    f"what training on an example added to the logit of {target}: for (+) or against (−)",
                ),
                ("exact", "all contributions and the initial weights add up to the logit"),
                ("first order", "a hidden layer's share, through the gradient of the logit"),
            ]
        lines.append(("slot", "one visit of a training example"))
        for index, (word, meaning) in enumerate(lines):
            height = 0.93 - 0.19 * index
            axes.text(0.0, height, word, fontsize=8.5, weight="bold", va="center")
            axes.text(0.155, height, meaning, fontsize=8.5, va="center", color=QUIET)

    # -- its layers ----------------------------------------------------------------------------

    def layer(self, row: int, layer: LayerExplanation, panels: list[str], image_of: ImageOf) -> None:
        cells = {panel: self._grid[row, column] for column, panel in enumerate(panels)}
        first, last = row == 1, row == len(self._explanation.layers)
        per = self._explanation.per
        common = {"names": self._names, "marks": self._marks}

        scores = self._figure.add_subplot(cells["scores"])
        draw_top(scores, layer.top, self._query, **common)
        scores.set_ylabel(f"{layer.name}\n{layer.shape[0]} → {layer.shape[1]}", weight="bold", color=INK)
        totals = self._figure.add_subplot(cells["totals"])
        draw_totals(totals, layer.totals, self._query, **common)
        totals.set_ylabel("")
        for axes in (scores, totals):
            axes.set_xlabel(per if last else "")
        if first:
            scores.set_title(f"scores of the top {layer.top.values.shape[2]} slots of each {per}")
            totals.set_title(f"{layer.totals.name} by {per}")
        if layer.contributions is not None:
            self._contributions(self._figure.add_subplot(cells["contributions"]), layer, first)
        if layer.examples is not None:
            self._examples(self._figure.add_subplot(cells["examples"]), layer, first, image_of)

    def _contributions(self, axes: Axes, layer: LayerExplanation, first: bool) -> None:
        assert layer.contributions is not None
        assert layer.initial is not None
        draw_totals(axes, layer.contributions, self._query, names=self._names, marks=self._marks)
        axes.set_ylabel("")
        training = float(layer.contributions.values[self._query].sum())
        initial = float(layer.initial[self._query])
        if layer.exact:
            sign, size = ("+", initial) if initial >= 0 else ("−", -initial)
            total = f"exact: {training:.2f} training {sign} {size:.2f} initial = logit {training + initial:.2f}"
        else:
            total = f"first order: {training:.2f} training in all"
        weight = "bold" if layer.exact else "normal"
        axes.set_xlabel(total.replace("-", "−"), color=INK, weight=weight, fontsize=8)
        if first:
            target = self._name(self._explanation.targets[self._query])
            axes.set_title(f"contributions to logit {target}, by {self._explanation.per}")

    def _examples(self, axes: Axes, layer: LayerExplanation, first: bool, image_of: ImageOf) -> None:
        assert layer.examples is not None
        captioned = []
        for row in layer.examples.rows(self._query):
            label, example = row.get(self._explanation.per), int(row["example"])
            above = "" if label is None else self._name(label)
            below = f"score {shown(row['score'])}\nexample {example}"
            frame = colours(self._explanation.per, [label])[0]
            captioned.append(Captioned(image_of(example), above, below, frame))
        draw_images(axes, captioned)
        if first:
            axes.set_title("training images with most score")
