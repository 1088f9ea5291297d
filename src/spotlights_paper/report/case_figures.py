"""Figures about one test image: the paper's, and the signed contributions that the paper does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, SubplotSpec
from matplotlib.ticker import MaxNLocator

from spotlights.figures import TopPanel, TotalsPanel, draw_top, draw_totals, new_figure
from spotlights.figures.palette import INK, QUIET, colours, sign_colours, style
from spotlights_paper.datasets.catalogue import IMAGES
from spotlights_paper.experiments.analyses.cases import Case, Pushed, TrainingImage
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.experiments.paper import PAPER_IMAGES
from spotlights_paper.pictures import (
    SHORT_NAMES,
    Captioned,
    Picture,
    all_names,
    class_names,
    draw_images,
    name_ticks,
    task_colour,
)

_NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
_TRAINING = 60_000
"""Training images of each data set: the ids of its test images come after theirs."""
_WINDOW = 100
"""Ranks that a line averages over."""


def describe(results: ImageResults, case: Case) -> str:
    """A test image in words: `“6”, MNIST test image 5938, answered rightly`."""
    names, number = results.classes[case.source], case.example - IMAGES[case.source].first_id - _TRAINING
    verdict = "answered rightly" if case.right else f"answered wrongly, “{names[case.output]}”"
    return f"“{names[case.label]}”, {_NAMES.get(case.source, case.source)} test image {number}, {verdict}"


def case_figures(results: ImageResults, case: Case, prefix: str) -> Iterator[Picture]:
    """The figures about one test image; `prefix` begins the names of their files."""
    yield Picture(
        f"{prefix}-attention",
        "For each layer: the scores of the top training slots of each class, sorted; the sums of |score| per class; "
        "the training images with the largest scores.",
        attention_figure(results, case),
    )
    yield Picture(
        f"{prefix}-contributions",
        "What the slots of each class add to the logit, signed. In the last layer, contributions and initial weights "
        "add up to the logit. In hidden layers contributions are first order, through the gradient of the logit.",
        _contributions(results, case),
    )


def _thumbnail(image: TrainingImage, what: str) -> Captioned:
    size = f"{image.value:,.0f}" if abs(image.value) >= 1000 else f"{image.value:.3g}"
    below = f"{what}\n{size}".replace("-", "−")
    if image.step is not None:
        below = f"{what} {size}\nstep {image.step:,}"
    name = SHORT_NAMES.get(image.name, image.name)
    return Captioned(image.pixels, name, below, colours([image.label])[0])


# -- attention --------------------------------------------------------------------------------


def attention_figure(results: ImageResults, case: Case) -> Figure:
    """One row for each layer, with the test image beside the first; tasks side by side, on one scale."""
    count, layers = len(results.sources), case.layers
    widths = [1.15, *[2.9] * count, *[1.75] * count, 2.5]
    said = f"said {case.output}" if case.right else f"said {case.output}, wrongly"
    name = results.classes[case.source][case.label]
    shown_in = PAPER_IMAGES[case.figure].figures if case.figure in PAPER_IMAGES else ()
    of_top, of_totals, of_images = [f"Figure {number}: " for number in shown_in] or ["", "", ""]
    with style():
        figure = new_figure(1.12 * sum(widths), 0.45 + 1.85 * len(layers))
        grid = GridSpec(len(layers), len(widths), figure, width_ratios=widths)
        asked = figure.add_subplot(grid[0, 0])
        draw_images(asked, [Captioned(case.pixels, name, said, colours([case.label])[0])])
        asked.set_title(f"Figure {case.figure}" if case.figure else "")
        for row, layer in enumerate(layers):
            groups = list(range(layer.absolute.shape[1]))
            tops = [TopPanel(values, groups, "score", "label") for values in layer.top]
            totals = [TotalsPanel(values, groups, "total |score|", "label") for values in layer.absolute]
            cells = [grid[row, column] for column in range(1, len(widths))]
            left = _draw_tasks(figure, results, case, cells[:count], draw_top, tops)
            right = _draw_tasks(figure, results, case, cells[count:-1], draw_totals, totals)
            images = figure.add_subplot(cells[-1])
            draw_images(images, [_thumbnail(image, "score") for image in layer.pictures])
            left[0].set_ylabel(layer.layer, weight="bold", color=INK)
            for axes in left + right:
                axes.tick_params(axis="x", labelsize=7.5, labelbottom=row + 1 == len(layers))
            if row == 0:
                images.set_title(f"{of_images}top training images")
                for source, top, total in zip(results.sources, left, right, strict=True):
                    colour, of = (task_colour(source), f"{source}, ") if count > 1 else (INK, "")
                    top.set_title(f"{of_top}{of}top {layer.top.shape[2]} by class", color=colour)
                    total.set_title(f"{of_totals}total |score|", color=colour)
                    of_top = of_totals = ""  # the second task is the same figure
    return figure


def _draw_tasks(
    figure: Figure,
    results: ImageResults,
    case: Case,
    cells: Sequence[SubplotSpec],
    draw: Callable[..., None],
    panels: Sequence[Any],
) -> list[Axes]:
    """One task beside the other, on a scale with room for the largest value of any task."""
    places: list[Axes] = []
    for cell, panel, source in zip(cells, panels, results.sources, strict=True):
        axes = figure.add_subplot(cell, sharey=places[0] if places else None)
        marks = {case.output: "said"}
        if source == case.source and not case.right:
            marks[case.label] = "true"
        draw(axes, panel, names=dict(enumerate(class_names(results.classes, source))), marks=marks)
        axes.set(xlabel="", ylabel="")
        axes.tick_params(axis="y", labelleft=not places)
        places.append(axes)
    values = np.nan_to_num(np.concatenate([panel.values.reshape(-1) for panel in panels]))
    places[0].autoscale(axis="y")
    low, high = places[0].get_ylim()
    places[0].set_ylim(0 if values.min() >= 0 else low, 0 if values.max() <= 0 and values.min() < 0 else high)
    return places


# -- contributions ----------------------------------------------------------------------------


def _contributions(results: ImageResults, case: Case) -> Figure:
    """One row for each logit and layer: bars above or below zero, then images for and against."""
    rows = [(layer, layer.pushed[i]) for i in range(len(case.layers[0].pushed)) for layer in case.layers]
    width = 3.4 if len(all_names(results.classes)) <= 10 else 5.6
    with style():
        figure = new_figure(width + 6.4, 1.75 * len(rows) + 0.7)
        grid = GridSpec(len(rows), 3, figure, width_ratios=(width, 3.1, 3.1))
        for row, (layer, pushed) in enumerate(rows):
            axes = figure.add_subplot(grid[row, 0])
            _draw_bars(axes, results, pushed.by_category, named=row + 1 == len(rows))
            axes.axhline(0, color=QUIET, linewidth=0.8)
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.set_ylabel(layer.layer, weight="bold", color=INK)
            axes.set_title(_logit_title(results, case, pushed), fontsize=8.5, weight="normal")
            sides = (pushed.strongest_for, "most for it"), (pushed.strongest_against, "most against it")
            for column, (images, heading) in enumerate(sides, start=1):
                place = figure.add_subplot(grid[row, column])
                draw_images(place, [_thumbnail(image, "adds") for image in images])
                if row == 0:
                    place.set_title(heading)
    return figure


def _logit_title(results: ImageResults, case: Case, pushed: Pushed) -> str:
    name, role = results.classes[case.source][pushed.target], "said" if pushed.target == case.output else "true"
    target = f"{pushed.target} ({role})" if name == str(pushed.target) else f"{pushed.target} ({name}, {role})"
    total = f"training {float(pushed.by_category.sum()):+.2f}"
    if pushed.adds_up:
        total += f", initial {pushed.initial:+.2f}, logit {pushed.logit:.2f}"
    else:
        total += ", first order"
    return f"to the logit of {target}: {total}".replace("-", "−")


def _draw_bars(axes: Axes, results: ImageResults, values: np.ndarray, *, named: bool) -> None:
    """One bar per class, task after task, with a gap between tasks."""
    tasks, classes = values.shape
    places = [task * (classes + 1) + label for task in range(tasks) for label in range(classes)]
    heights = values.reshape(-1)
    axes.bar(places, heights, width=0.78, color=sign_colours(heights.tolist()))
    name_ticks(axes, places, all_names(results.classes) if named else [])
    if named and tasks > 1:
        axes.set_xlabel("   |   ".join(results.sources), fontsize=8)


# -- rank against time ------------------------------------------------------------------------


def ranks_against_time(results: ImageResults, case: Case, *, steps: int) -> Picture:
    """A row for each layer, a panel for each class: a dot for each slot, a line for the mean of neighbouring ranks."""
    names = class_names(results.classes, results.sources[0])
    with style():
        figure = new_figure(1.05 * len(names) + 0.6, 1.35 * len(case.layers) + 0.5)
        grid = figure.subplots(len(case.layers), len(names), squeeze=False, sharex=True, sharey=True)
        for line, layer in zip(grid, case.layers, strict=True):
            tints = colours(list(range(len(names))))
            for axes, visited, tint in zip(line, layer.top_steps[0], tints, strict=True):
                visited = visited[visited >= 0]
                ranks, width = np.arange(1, len(visited) + 1), min(_WINDOW, max(len(visited), 1))
                axes.scatter(ranks, visited, s=2, color=tint, alpha=0.6, linewidths=0)
                mean = np.convolve(visited, np.ones(width) / width, "valid")
                axes.plot(ranks[width // 2 :][: len(mean)], mean[: len(ranks) - width // 2], color=INK, linewidth=1.4)
                axes.tick_params(labelsize=7)
            line[0].set_ylabel(f"{layer.layer}\nstep", fontsize=8)
        for axes, name in zip(grid[0], names, strict=True):
            axes.set_title(name, loc="center")
        grid[0, 0].set_ylim(0, steps)
        figure.supxlabel("rank of the slot within its class", fontsize=8)
    return Picture(
        "ranks-against-time",
        f"When the top {case.layers[0].top_steps.shape[2]} slots of each class were visited, for the image of Figure "
        f"{case.figure}: a dot for each slot, a line for the mean of {_WINDOW} neighbouring ranks.",
        figure,
    )
