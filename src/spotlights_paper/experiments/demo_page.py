"""What the demo shows of one answer: the library's own tables, and a picture of the training images behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float, Shaped
from matplotlib.figure import Figure
from rich.console import Console
from rich.rule import Rule
from torch import Tensor, nn

import spotlights as sl
from spotlights.figures import TotalsPanel, add_note, draw_totals, new_figure
from spotlights.figures.palette import AGAINST, FOR, colours, style
from spotlights.results import Top, Totals, shown
from spotlights_paper.pictures import Captioned, ImageOf, draw_image, draw_images

_EXAMPLES = 3


@dataclass(frozen=True)
class Explanation:
    """What the last layer's answer to one input is made of."""

    logits: Float[Tensor, "classes"]
    answer: int
    """The class with the largest logit: contributions are about that one."""
    initial: float
    """What the initial weights add to the logit."""
    similar: Top
    """The training examples with the largest scores."""
    by_label: Totals
    """What the training examples of each class add to the logit."""
    pro: Top
    con: Top
    """The training examples that add most to it, and take most from it."""

    @property
    def sum(self) -> str:
        """The answer as a sum."""
        training = float(self.by_label.values.sum())
        logit = float(self.logits[self.answer])
        return f"training {training:+.2f}, initial weights {self.initial:+.2f}: logit {logit:.2f}".replace("-", "−")


def explain(memory: sl.Memory, network: nn.Module, image: Float[Tensor, "1 inputs"]) -> Explanation:
    """Asks all that the demo shows of an answer; the memory has the columns "label" and "example"."""
    spot = memory.attend(network, image)
    last = spot[list(spot)[-1]]
    answer = int(spot.output.argmax())
    contributions = last.contributions(answer)
    return Explanation(
        spot.output[0].cpu(),
        answer,
        float(contributions.initial[0]),
        last.top(_EXAMPLES, by="example"),
        contributions.totals("label"),
        contributions.top(_EXAMPLES, by="example"),
        contributions.bottom(_EXAMPLES, by="example"),
    )


def tables(explanation: Explanation, pixels: Shaped[Tensor, "height width"]) -> Iterator[Any]:
    """What the demo prints: the image, the tables, the sum."""
    yield _letters(pixels)
    yield explanation.similar
    for result in (explanation.by_label, explanation.pro, explanation.con):
        yield replace(result.table(), note=None)  # it is that of the first
    yield f"{explanation.sum}\n"


def _letters(pixels: Shaped[Tensor, "height width"]) -> str:
    """An image in letters: two rows of pixels in each line."""
    letters = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
    pairs = [zip(*lines.tolist(), strict=True) for lines in (pixels > 96).split(2)]
    return "\n".join("".join(letters[pair] for pair in line) for line in pairs)


def plot_explanation(
    explanation: Explanation, pixels: Shaped[Tensor, "height width"], image_of: ImageOf, *, truth: int, title: str
) -> Figure:
    """The image, its logits and the sum; below, the training images for and against the answer.

    Args:
        explanation: of the image.
        pixels: of the image.
        image_of: gives the pixels of a training example, by its id.
        truth: the true class.
        title: what to call the image.
    """
    answer, logits = explanation.answer, explanation.logits.detach().numpy()
    marks = {truth: "true", answer: "said"}
    verdict = "right" if truth == answer else f"wrong: it is {truth}"
    with style():
        figure = new_figure(9.5, 4.4)
        grid = figure.add_gridspec(2, 6, height_ratios=(1.3, 1))
        image, bars = figure.add_subplot(grid[0, :1]), figure.add_subplot(grid[0, 1:3])
        contributions = figure.add_subplot(grid[0, 3:])
        draw_image(image, pixels.numpy(), frame=colours([answer])[0])
        draw_totals(bars, TotalsPanel(logits, range(len(logits)), "", ""), marks=marks)
        bars.set_title("logits")
        draw_totals(contributions, explanation.by_label.panel(), marks=marks)
        contributions.set(title=f"contributions to logit {answer}, by label", xlabel=explanation.sum, ylabel="")
        for place, top, heading, frame in (
            (grid[1, :3], explanation.pro, "for it", FOR),
            (grid[1, 3:], explanation.con, "against it", AGAINST),
        ):
            axes = figure.add_subplot(place)
            draw_images(axes, [_captioned(row, image_of, frame) for row in top.rows()])
            axes.set_title(f"training images most {heading}")
        figure.suptitle(f"{title}: the network says {answer} ({verdict})", x=0.01, ha="left", weight="bold")
        add_note(figure, explanation.by_label.note)
    return figure


def _captioned(row: dict[str, Any], image_of: ImageOf, frame: str) -> Captioned:
    example = int(row["example"])
    below = f"{shown(row['contribution'])}\nexample {example}".replace("-", "−")
    return Captioned(image_of(example), str(row["label"]), below, frame)


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
