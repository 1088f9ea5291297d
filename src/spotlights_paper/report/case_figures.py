"""Figures about one test image: the paper's figures, and others that the paper does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec, SubplotSpec
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from spotlights.figures import TopPanel, TotalsPanel, draw_top, draw_totals, new_figure
from spotlights.figures.palette import CLASSES, INK, QUIET, colours, sign_colours, style
from spotlights_paper.datasets.catalogue import IMAGES
from spotlights_paper.experiments.analyses.cases import Case, Pushed, TrainingImage
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.pictures import Captioned, draw_images
from spotlights_paper.report.picture import (
    SHORT_NAMES,
    Picture,
    all_names,
    bar_places,
    class_names,
    finish_values,
    mark_switch,
    name_ticks,
    task_colour,
)

FIGURES = {
    "3a": (4, 5, 8),
    "3b": (6, 7, 9),
    "10a": (12, 13, 11),
    "10b": (15, 16, 14),
    "10c": (18, 19, 17),
    "10d": (21, 22, 20),
    "10e": (24, 25, 23),
    "10f": (27, 28, 26),
}
"""The paper's figures of top scores, totals and top training images for each of its test images."""


_NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST"}
_TRAINING = 60_000
"""Training images of each data set: the ids of its test images come after theirs."""


def describe(results: ImageResults, case: Case) -> str:
    """A test image in words: `“6”, MNIST test image 5938, answered rightly`."""
    names, number = results.classes[case.source], case.example - IMAGES[case.source].first_id - _TRAINING
    verdict = "answered rightly" if case.right else f"answered wrongly, “{names[case.output]}”"
    return f"“{names[case.label]}”, {_NAMES.get(case.source, case.source)} test image {number}, {verdict}"


def case_figures(
    results: ImageResults, case: Case, *, steps: int, switch: int | None, prefix: str
) -> Iterator[Picture]:
    """All figures about one test image.

    Args:
        results: what the run found.
        case: one of its test images.
        steps: of the run.
        switch: the step at which the second task began, if there is one.
        prefix: of the names of the files.
    """
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
    yield Picture(
        f"{prefix}-measures",
        "The same attention measured in four ways. The last column: mean and standard deviation of a single "
        "slot's score.",
        _measures(results, case),
    )
    yield Picture(
        f"{prefix}-over-time",
        "When in training the attended slots were visited: the top slots of all classes by step, and total "
        "scores by step.",
        _over_time(results, case, steps=steps, switch=switch),
    )
    yield Picture(
        f"{prefix}-examples",
        "Scores added up over all visits of each training example, by rank; the examples of the first ranks.",
        _examples(case),
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
    of_top, of_totals, of_images = [f"Figure {number}: " for number in FIGURES.get(case.figure, ())] or ["", "", ""]
    with style():
        figure = new_figure(1.12 * sum(widths), 0.45 + 1.85 * len(layers))
        grid = GridSpec(len(layers), len(widths), figure, width_ratios=widths)
        asked = figure.add_subplot(grid[0, 0])
        draw_images(asked, [Captioned(case.pixels, name, said, colours([case.label])[0])])
        asked.set_title(f"Figure {case.figure}" if case.figure else "")
        for row, layer in enumerate(layers):
            groups = list(range(layer.totals.shape[1]))
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
        draw(axes, panel, names=dict(enumerate(class_names(results, source))), marks=marks)
        axes.set(xlabel="", ylabel="")
        axes.tick_params(axis="y", labelleft=not places)
        places.append(axes)
    values = np.nan_to_num(np.concatenate([panel.values.reshape(-1) for panel in panels]))
    places[0].autoscale(axis="y")
    low, high = places[0].get_ylim()
    places[0].set_ylim(0 if values.min() >= 0 else low, 0 if values.max() <= 0 and values.min() < 0 else high)
    return places


# -- contributions and measures ---------------------------------------------------------------


def _contributions(results: ImageResults, case: Case) -> Figure:
    """One row for each logit and layer: bars above or below zero, then images for and against."""
    rows = [(layer, layer.pushed[i]) for i in range(len(case.layers[0].pushed)) for layer in case.layers]
    width = 3.4 if len(all_names(results)) <= 10 else 5.6
    with style():
        figure = new_figure(width + 6.4, 1.75 * len(rows) + 0.7)
        grid = GridSpec(len(rows), 3, figure, width_ratios=(width, 3.1, 3.1))
        for row, (layer, pushed) in enumerate(rows):
            last = row + 1 == len(rows)
            axes = figure.add_subplot(grid[row, 0])
            values = pushed.by_category
            _draw_bars(axes, results, values, sign_colours(values.reshape(-1).tolist()), named=last)
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
    if pushed.exact:
        total += f", initial {pushed.initial:+.2f}, logit {pushed.logit:.2f}, exact"
    else:
        total += ", first order"
    return f"to the logit of {target}: {total}".replace("-", "−")


def _measures(results: ImageResults, case: Case) -> Figure:
    """A row for each layer, a column for each measure, one bar per class."""
    titles = ("total score", "total |score|", "total |score| · ‖error‖", "score of a slot")
    layers = case.layers
    width = 2.5 if len(all_names(results)) <= 10 else 4.0
    with style():
        figure = new_figure(width * len(titles) + 0.4, 1.65 * len(layers) + 0.8)
        grid = figure.subplots(len(layers), len(titles), squeeze=False)
        for row, layer in enumerate(layers):
            measures = (layer.totals, layer.absolute, layer.weighted, layer.mean)
            spreads = (None, None, None, layer.spread)
            for axes, title, values, spread in zip(grid[row], titles, measures, spreads, strict=True):
                tasks, classes = values.shape
                tints = colours(list(range(classes))) * tasks
                places = _draw_bars(axes, results, values, tints, named=row + 1 == len(layers))
                if spread is not None:
                    errors = {"fmt": "none", "ecolor": INK, "elinewidth": 0.9, "capsize": 2}
                    axes.errorbar(places, values.reshape(-1), spread.reshape(-1), **errors)
                finish_values(axes)
                if row == 0:
                    axes.set_title(title)
            grid[row, 0].set_ylabel(layer.layer, weight="bold", color=INK)
    return figure


def _draw_bars(
    axes: Axes, results: ImageResults, values: np.ndarray, tints: Sequence[str], *, named: bool
) -> np.ndarray:
    """One bar per class, task after task; returns where the bars stand."""
    places = bar_places(*values.shape)
    axes.bar(places, values.reshape(-1), width=0.78, color=tints)
    name_ticks(axes, places, all_names(results) if named else [])
    if named and len(results.sources) > 1:
        axes.set_xlabel("   |   ".join(results.sources), fontsize=8)
    return places


# -- time and examples ------------------------------------------------------------------------


def _over_time(results: ImageResults, case: Case, *, steps: int, switch: int | None) -> Figure:
    """One column for each layer: above, the top slots by step; below, the totals of ranges of steps."""
    classes = case.layers[0].totals.shape[1]
    seen, second_task = set(), False
    with style():
        figure = new_figure(3.6 * len(case.layers), 4.3)
        grid = figure.subplots(2, len(case.layers), squeeze=False, sharex=True)
        for column, layer in enumerate(case.layers):
            above, below = grid[:, column]
            task, label = np.divmod(layer.top_category, classes)
            tints = np.array(colours(label.tolist()))
            for number, mark in ((0, "o"), (1, "^")):
                mine = task == number
                above.scatter(layer.top_step[mine], layer.top_score[mine], s=9, marker=mark, c=tints[mine], alpha=0.7)
            seen |= set(label.tolist())
            second_task |= bool((task == 1).any())
            edges = np.append(layer.starts, steps)
            below.stairs(layer.by_step, edges, fill=True, color=CLASSES[0], alpha=0.35, linewidth=0)
            below.stairs(layer.by_step, edges, baseline=None, color=CLASSES[0], linewidth=1.4)
            below.set(xlim=(0, steps), xlabel="step")
            above.set_title(f"{layer.layer}: top {len(layer.top_step)} slots by step")
            below.set_title("total score by step")
            for axes in (above, below):
                axes.yaxis.set_major_locator(MaxNLocator(4))
                axes.yaxis.set_major_formatter(EngFormatter(sep=""))
                mark_switch(axes, switch)
        names = [" / ".join(class_names(results, s)[label] for s in results.sources) for label in sorted(seen)]
        handles = [
            Line2D([], [], marker="o", linestyle="", color=colour, label=name)
            for name, colour in zip(names, colours(sorted(seen)), strict=True)
        ]
        if second_task:
            handles.append(Line2D([], [], marker="^", linestyle="", color=QUIET, label="second task"))
        in_a_row = 11 if all(len(str(handle.get_label())) <= 2 for handle in handles) else 6
        figure.legend(handles=handles, loc="outside lower center", ncols=in_a_row, frameon=False, fontsize=8)
    return figure


def _examples(case: Case) -> Figure:
    """One column for each layer: the totals by rank, and the training images of the first ranks."""
    with style():
        figure = new_figure(3.6 * len(case.layers), 3.9)
        grid = GridSpec(2, len(case.layers), figure, height_ratios=(1.5, 1))
        for column, layer in enumerate(case.layers):
            axes = figure.add_subplot(grid[0, column])
            axes.plot(layer.example_rank, layer.example_total, color=CLASSES[0], linewidth=1.6)
            axes.fill_between(layer.example_rank, layer.example_total, color=CLASSES[0], alpha=0.2, linewidth=0)
            finish_values(axes)
            axes.set_xscale("log")
            axes.set_xlim(1, layer.example_rank[-1])
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(layer.layer)
            axes.set_xlabel("training example, by rank")
            if column == 0:
                axes.set_ylabel("total score over all visits")
            draw_images(
                figure.add_subplot(grid[1, column]), [_thumbnail(image, "total score") for image in layer.examples]
            )
    return figure
