"""From what was found to figures, each with a name for its file and a caption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure

from spotlights.attention.results import Label, Top, Totals
from spotlights.experiments.analyses.cases import Case, LayerCase, Picture
from spotlights.experiments.results import Results
from spotlights.experiments.run_file import ImageRun
from spotlights.figures.case import LayerPanel, Task, plot_case
from spotlights.figures.examples import RankedExamples, plot_examples
from spotlights.figures.heat_maps import HeatMap, plot_heat_maps
from spotlights.figures.images import Captioned
from spotlights.figures.measures import Bars, plot_measures
from spotlights.figures.over_time import CaseTimeline, Timeline, plot_case_over_time, plot_over_time
from spotlights.figures.palette import colours
from spotlights.figures.shares import plot_accuracies, plot_shares
from spotlights.figures.signed import SignedPanel, plot_signed
from spotlights.figures.suspects import plot_suspect_pictures, suspect_picture

SHORT = {"T-shirt/top": "T-shirt", "Ankle boot": "Boot"}
"""Names that would not fit below a bar."""


@dataclass(frozen=True, eq=False)
class Shown:
    """A figure, the name of its files and what it says."""

    name: str
    caption: str
    figure: Figure


def class_names(results: Results, source: str) -> list[str]:
    return [SHORT.get(name, name) for name in results.classes[source]]


def all_names(results: Results) -> list[str]:
    return [name for source in results.sources for name in class_names(results, source)]


def describe(results: Results, case: Case) -> str:
    """A test image in words: `“6”, said 6`."""
    names = results.classes[case.source]
    verdict = "answered rightly" if case.right else f"answered wrongly: {case.output} ({names[case.output]})"
    return f"“{names[case.label]}” ({case.source} test example {case.example}), {verdict}"


# -- single test images -------------------------------------------------------------------------


def case_figures(results: Results, case: Case, run: ImageRun, prefix: str) -> Iterator[Shown]:
    """The paper's figures for one test image, and ours."""
    yield Shown(
        f"{prefix}-attention",
        "For each layer: the scores of the top training slots of each class, sorted; the totals per class; "
        "the training images with the largest scores.",
        _attention(results, case),
    )
    yield Shown(
        f"{prefix}-contributions",
        "What the slots of each class add to the logit, signed. In the last layer exact: with the initial "
        "weights they add up to the logit. In hidden layers first order, through the gradient of the logit.",
        _signed(results, case),
    )
    yield Shown(
        f"{prefix}-measures",
        "The same attention measured in four ways. The last column: mean and standard deviation of a single "
        "slot's score.",
        _measures(results, case),
    )
    yield Shown(
        f"{prefix}-over-time",
        "When in training the attended slots were visited: the top slots of all classes by step, and total "
        "scores by step.",
        _case_over_time(results, case, run),
    )
    yield Shown(
        f"{prefix}-examples",
        "Scores added up over all visits of each training example, by rank; the examples of the first ranks.",
        plot_examples(
            [
                RankedExamples(
                    layer.layer,
                    layer.example_rank,
                    layer.example_total,
                    [_thumbnail(p, "total score") for p in layer.examples],
                )
                for layer in case.layers
            ]
        ),
    )


def _attention(results: Results, case: Case) -> Figure:
    tasks = []
    for source in results.sources:
        names = class_names(results, source)
        marks: dict[Label, str] = {case.output: "said"}
        if source == case.source and not case.right:
            marks[case.label] = "true"
        tasks.append(Task(source, dict(enumerate(names)), marks))
    image = Captioned(
        case.pixels,
        results.classes[case.source][case.label],
        f"said {case.output}" if case.right else f"said {case.output}, wrongly",
        colours("label", [case.label])[0],
    )
    panels = [
        LayerPanel(
            layer.layer,
            [_top(layer, task) for task in range(len(tasks))],
            [_totals(layer, task) for task in range(len(tasks))],
            [_thumbnail(picture, "score") for picture in layer.pictures],
        )
        for layer in case.layers
    ]
    return plot_case(image, panels, tasks)


def _top(layer: LayerCase, task: int) -> Top:
    values = torch.from_numpy(layer.top[task])[None]
    slots = torch.where(values.isnan(), -1, 0)
    return Top(layer.layer, "score", values, slots, {}, "label", list(range(values.shape[1])))


def _totals(layer: LayerCase, task: int) -> Totals:
    values = torch.from_numpy(layer.totals[task])[None]
    counts = torch.zeros(values.shape[1], dtype=torch.int64)
    return Totals(layer.layer, "score", "label", values, counts, list(range(values.shape[1])))


def _thumbnail(picture: Picture, what: str) -> Captioned:
    size = f"{picture.value:,.0f}" if abs(picture.value) >= 1000 else f"{picture.value:.3g}"
    below = f"{what}\n{size}".replace("-", "−")
    if picture.step is not None:
        below = f"{what} {size}\nstep {picture.step:,}"
    name = SHORT.get(picture.name, picture.name)
    return Captioned(picture.pixels, name, below, colours("label", [picture.label])[0])


def _signed(results: Results, case: Case) -> Figure:
    names = results.classes[case.source]
    panels = []
    for index in range(len(case.layers[0].pushed)):
        for layer in case.layers:
            pushed = layer.pushed[index]
            role = "said" if pushed.target == case.output else "true"
            training = float(pushed.by_category.sum())
            total = f"training {training:+.2f}, first order"
            if pushed.exact:
                parts = f"training {training:+.2f}, initial {pushed.initial:+.2f}"
                total = f"{parts}, logit {pushed.logit:.2f}, exact"
            panels.append(
                SignedPanel(
                    layer.layer,
                    f"{pushed.target} ({names[pushed.target]}, {role})"
                    if names[pushed.target] != str(pushed.target)
                    else f"{pushed.target} ({role})",
                    pushed.by_category,
                    total.replace("-", "−"),
                    [_thumbnail(p, "adds") for p in pushed.strongest_for],
                    [_thumbnail(p, "adds") for p in pushed.strongest_against],
                )
            )
    return plot_signed(panels, all_names(results), tasks=results.sources)


def _measures(results: Results, case: Case) -> Figure:
    rows = [
        (
            layer.layer,
            [
                Bars("total score", layer.totals),
                Bars("total |score|", layer.absolute),
                Bars("total |score| · ‖error‖", layer.weighted),
                Bars("score of a slot", layer.mean, layer.spread),
            ],
        )
        for layer in case.layers
    ]
    return plot_measures(rows, all_names(results), tasks=results.sources)


def _case_over_time(results: Results, case: Case, run: ImageRun) -> Figure:
    classes = case.layers[0].totals.shape[1]
    timelines = [
        CaseTimeline(
            layer.layer,
            layer.top_step,
            layer.top_score,
            layer.top_category % classes,
            layer.top_category // classes,
            layer.starts,
            layer.by_step,
        )
        for layer in case.layers
    ]
    several = len(results.sources) > 1
    names = {
        label: " / ".join(class_names(results, source)[label] for source in results.sources)
        if several
        else class_names(results, results.sources[0])[label]
        for label in range(classes)
    }
    return plot_case_over_time(timelines, steps=run.settings["steps"], switch=run.settings.get("switch"), names=names)


# -- all test images ----------------------------------------------------------------------------


def test_set_figures(results: Results, run: ImageRun, prefix: str) -> Iterator[Shown]:
    """What is about many test images."""
    if len(results.sources) > 1:
        shares: dict[str, dict[tuple[str, str], float]] = {}
        for each in results.cross_task:
            shares.setdefault(each.layer, {})[each.test, each.train] = each.share
        yield Shown(
            f"{prefix}-cross-task",
            "How the attention (total |score|) of each task's test images is divided among the tasks.",
            plot_shares(shares, results.sources),
        )
    names = all_names(results)
    yield Shown(
        f"{prefix}-class-attention",
        "Where each class of test images looks: the share of its total |score| that goes to each training "
        "class (in percent), averaged over the test images.",
        plot_heat_maps(
            [HeatMap(each.layer, each.share) for each in results.class_attention],
            rows=names,
            columns=names,
            labels=("class of the test image", "class of the slots"),
            signed=False,
        ),
    )
    yield Shown(
        f"{prefix}-over-time",
        f"How the attention of {run.settings['timeline_images']:,} test images of each task is spread over "
        "training time; the band is one standard deviation over the images.",
        plot_over_time(
            [Timeline(t.layer, t.source, t.starts, t.share, t.spread) for t in results.over_time],
            steps=run.settings["steps"],
            switch=run.settings.get("switch"),
        ),
    )


# -- labels -------------------------------------------------------------------------------------


def audit_figures(results: Results, prefix: str) -> Iterator[Shown]:
    """The training images that look mislabelled; nothing for runs that kept no audit."""
    if results.suspects:
        pictures = []
        for each in results.suspects:
            names = class_names(results, each.source)
            said = None if each.says is None else names[each.says]
            pictures.append(suspect_picture(each.pixels, names[each.label], said, each.example, each.suspicion))
        yield Shown(
            f"{prefix}-suspects",
            f"The {len(pictures)} training images that the network disagreed with most, added up over all visits. "
            "Above: the label it was trained with. Below: what the network says, the example's id, its suspicion.",
            plot_suspect_pictures(pictures),
        )


# -- forgetting ---------------------------------------------------------------------------------


def forgetting_figures(results: Results, run: ImageRun, prefix: str) -> Iterator[Shown]:
    """Masks and interference; nothing for experiments without them."""
    if results.masks:
        yield Shown(
            f"{prefix}-masks",
            "Test accuracy of the same network with one task's slots left out, in all layers or in one.",
            plot_accuracies(
                [(mask_name(results, m.masked, m.layers, m.as_of), m.accuracy) for m in results.masks],
                results.sources,
            ),
        )
    if results.forgetting is not None and results.forgetting.layers:
        lost, other = results.forgetting, results.sources[1]
        yield Shown(
            f"{prefix}-interference",
            f"What the slots of each {other} class added to the margin (logit of the wrong answer minus "
            f"logit of the true class) of {lost.sampled:,} forgotten {lost.source} digits: right at step "
            f"{run.settings['switch']:,}, wrong at the end. Positive: pushed over. Exact in the last layer, "
            "first order in the others. Mean over the digits of a class; a scale of its own for each layer.",
            plot_heat_maps(
                [
                    HeatMap(f"{each.layer} ({'exact' if each.exact else 'first order'})", each.contributions[:, 1])
                    for each in lost.layers
                ],
                rows=class_names(results, lost.source),
                columns=class_names(results, other),
                labels=(f"forgotten {lost.source} digit", f"{other} slots"),
                signed=True,
            ),
        )
        rows = lost.answered / np.maximum(lost.answered.sum(axis=1, keepdims=True), 1)
        yield Shown(
            f"{prefix}-forgotten",
            f"What the {int(lost.forgotten.sum()):,} forgotten {lost.source} digits are taken for (percent "
            f"of the row; column names are those of {other}).",
            plot_heat_maps(
                [HeatMap("wrong answers", rows)],
                rows=[
                    f"{name} ({count:,} of {before:,})"
                    for name, count, before in zip(
                        class_names(results, lost.source), lost.forgotten, lost.right_before, strict=True
                    )
                ],
                columns=[f"{i} {name}" for i, name in enumerate(class_names(results, other))],
                labels=(f"forgotten {lost.source} digit", "answer"),
                signed=False,
            ),
        )


def mask_name(results: Results, masked: str, layers: list[str], as_of: int) -> str:
    """A mask in words."""
    if not masked:
        return f"nothing masked, as of step {as_of:,}"
    where = "all layers" if len(layers) == len(results.layers) else f"{', '.join(layers)} only"
    return f"{masked} masked in {where}"
