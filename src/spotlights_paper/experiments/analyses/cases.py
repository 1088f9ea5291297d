"""A close look at single test images: the paper's figures 4 to 28, and what each class adds to the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

import spotlights as sl
from spotlights.results import Top
from spotlights_paper.experiments.analyses.glances import Rule, distinct, glances
from spotlights_paper.experiments.analyses.test_set import by_category, categories
from spotlights_paper.experiments.images import Images
from spotlights_paper.experiments.training import Trained, answers

_PICTURES = 3
"""Training images shown for each layer."""
_CANDIDATES = 60
"""The first test images, among which one is searched that fits all that the paper says of its own."""


@dataclass(frozen=True)
class WantedImage:
    """Which test image to look at: the paper's own where its number is known, else the first that fits."""

    source: str
    label: int
    right: bool | None = None
    """Only one that the network gets right (or wrong)."""
    says: int | None = None
    """Only one that the network gives this class."""
    figure: str = ""
    """The paper's figure that shows the image, such as "3a"."""
    number: int | None = None
    """Of the image in its test set; then nothing else counts."""
    also: tuple[Rule, ...] = ()
    """What else the paper says of the image."""


@dataclass(frozen=True, eq=False)
class TrainingImage:
    """A training image and why it is shown."""

    pixels: UInt8[np.ndarray, "height width"]
    source: str
    label: int
    name: str
    example: int
    value: float
    """Its score, or its contribution over all visits."""
    step: int | None = None
    """The step of the visit, if it is about one."""


@dataclass(frozen=True, eq=False)
class Pushed:
    """What speaks for one logit, through one layer."""

    target: int
    logit: float
    adds_up: bool
    """initial + all contributions is the logit; otherwise first order."""
    initial: float
    by_category: Float[np.ndarray, "sources classes"]
    strongest_for: list[TrainingImage]
    strongest_against: list[TrainingImage]


@dataclass(frozen=True, eq=False)
class LayerCase:
    """One layer's part of one answer."""

    layer: str
    top: Float[np.ndarray, "sources classes k"]
    """The largest scores of each category, largest first; NaN where there are fewer slots."""
    top_steps: Int[np.ndarray, "sources classes k"]
    """When these slots were visited; -1 where there are fewer."""
    absolute: Float[np.ndarray, "sources classes"]
    """|score| added up."""
    pictures: list[TrainingImage]
    """The training images with the largest scores, each once."""
    top_category: Int[np.ndarray, "k"]
    """Of the slots with the largest scores of all: source · classes + class."""
    pushed: list[Pushed]
    """Towards the network's answer and, if that is wrong, towards the true class."""


@dataclass(frozen=True, eq=False)
class Case:
    """One test image and what its answer is made of."""

    source: str
    pixels: UInt8[np.ndarray, "height width"]
    example: int
    label: int
    output: int
    logits: Float[np.ndarray, "classes"]
    layers: list[LayerCase]
    figure: str = ""
    """The paper's figure that shows this image, or one of its kind."""
    fits: bool = True
    """Whether what the paper says of its own image holds for this one; if False, this is the first of its label."""
    fitting: float = float("nan")
    """The share of the first images of this label and answer of which all of that is true; NaN for the paper's own."""

    @property
    def right(self) -> bool:
        return self.label == self.output


def find(trained: Trained, wanted: WantedImage) -> tuple[int, bool, float] | None:
    """The place of the paper's own image, or of the first that fits all that is said of it, and how well it fits.

    None without any of its label. The place is followed by `fits` and `fitting`, as `Case` has them.
    """
    test = trained.data[wanted.source].test
    said = answers(trained.model, test)
    if wanted.number is not None and wanted.number < len(test):
        return wanted.number, True, float("nan")
    of_label = test.labels == wanted.label
    fits = of_label.clone()
    if wanted.right is not None:
        fits &= (said == test.labels) == wanted.right
    if wanted.says is not None:
        fits &= said == wanted.says
    places = fits.nonzero()[:, 0]
    if not wanted.also:
        return (int(places[0]), True, float("nan")) if len(places) else None
    some = places[:_CANDIDATES]
    looked = glances(trained, test, some)
    true = torch.tensor([all(rule(glance) for rule in wanted.also) for glance in looked], dtype=torch.bool)
    if true.any():
        return int(some[true][0]), True, float(true.double().mean())
    first = places if len(places) else of_label.nonzero()[:, 0]
    return (int(first[0]), False, 0.0) if len(first) else None


def cases(trained: Trained, wanted: Sequence[WantedImage], *, top: int) -> list[Case]:
    """Looks at one test image of each kind; a network may have no such mistake (or success) to show."""
    shown = []
    for kind in wanted:
        found = find(trained, kind)
        if found is not None:
            place, fits, fitting = found
            case = look_at(trained, trained.data[kind.source].test, place, top=top)
            shown.append(replace(case, figure=kind.figure, fits=fits, fitting=fitting))
    return shown


def look_at(trained: Trained, test: Images, position: int, *, top: int) -> Case:
    """Everything about one test image."""
    spotlights = trained.attend(test.inputs[position : position + 1])
    logits = spotlights.output[0].double()
    label, output = int(test.labels[position]), int(logits.argmax())
    targets = [output] if output == label else [output, label]
    asked = spotlights.ask(
        sl.AskTop(top, per="category"),
        sl.AskTop(top),
        sl.AskTotals("category", absolute=True),
    )
    layers = []
    for name, (per, overall, absolute) in asked.items():
        layers.append(
            LayerCase(
                name,
                *_arrange_top(trained, per),
                by_category(trained, absolute)[0],
                _pictures(trained, overall.what, distinct(overall, 0, _PICTURES)),
                np.array([categories(trained).index(str(c)) for c in overall.columns["category"][0][0]]),
                [_pushed(trained, spotlights[name], target, float(logits[target])) for target in targets],
            )
        )
    return Case(
        test.source,
        test.pixels[position].numpy(),
        int(test.ids[position]),
        label,
        output,
        logits.numpy(),
        layers,
    )


def _pushed(trained: Trained, attention: sl.Attention, target: int, logit: float) -> Pushed:
    contributions = attention.contributions(target)
    most, least = (of(_PICTURES, by="example") for of in (contributions.top, contributions.bottom))
    return Pushed(
        target,
        logit,
        contributions.adds_up,
        float(contributions.initial[0]),
        by_category(trained, contributions.totals("category"))[0],
        *(_pictures(trained, top.what, top.rows(0)) for top in (most, least)),
    )


def _arrange_top(
    trained: Trained, top: Top
) -> tuple[Float[np.ndarray, "sources classes k"], Int[np.ndarray, "sources classes k"]]:
    """The scores of each category's top slots, and their steps."""
    names = categories(trained)
    values = top.numpy()[0]
    scores = np.full((len(names), values.shape[1]), np.nan)
    steps = np.full(scores.shape, -1, dtype=np.int64)
    for row, (group, held) in enumerate(zip(top.groups, values, strict=True)):
        place, count = names.index(str(group)), int(np.isfinite(held).sum())
        scores[place] = held
        steps[place, :count] = np.array(top.columns["step"][0][row][:count], dtype=np.int64)
    shape = len(trained.sources), -1, values.shape[1]
    return scores.reshape(shape), steps.reshape(shape)


def _pictures(trained: Trained, what: str, rows: Iterable[dict]) -> list[TrainingImage]:
    """The training images of some rows of an answer; rows about examples, and not about visits, have no step."""
    images = []
    for row in rows:
        train = trained.data[row["source"]].train
        label, example = row["label"], row["example"]
        pixels, name, value = train.pixels_of(example), train.classes[label], float(row[what])
        images.append(TrainingImage(pixels, train.source, label, name, example, value, row.get("step")))
    return images
