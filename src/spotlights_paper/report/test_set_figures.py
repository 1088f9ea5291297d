"""Figures about many test images: shares of attention, training time, masks, forgetting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spotlights.figures import new_figure
from spotlights.figures.palette import AGAINST, FOR, INK, QUIET, colours, style
from spotlights_paper.experiments.analyses.forgetting import ForgottenImages, Masked
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.experiments.analyses.test_set import OverTime
from spotlights_paper.experiments.registry import ImageRun
from spotlights_paper.pictures import Captioned, Picture, class_names, draw_images, name_ticks, task_colour

_SIGNED = LinearSegmentedColormap.from_list("signed", [AGAINST, "#f7f7f5", FOR])


def test_set_figures(results: ImageResults, run: ImageRun, prefix: str) -> Iterator[Picture]:
    """Where the attention of the test images goes: to tasks, classes and ranges of steps."""
    if len(results.sources) > 1:
        yield Picture(
            f"{prefix}-cross-task",
            "How the attention (total |score|) of each task's test images is divided among the tasks.",
            _plot_shares(results),
        )
    yield Picture(
        f"{prefix}-over-time",
        f"How the attention of {run.settings['timeline_images']:,} test images of each task is spread over "
        "training time; the band is one standard deviation over the images.",
        _plot_over_time(results.over_time, steps=run.settings["steps"], switch=run.settings.get("switch")),
    )


def samples_figure(results: ImageResults, name: str) -> Picture:
    """Test images that the network gets right, and below some that it gets wrong, with each layer's vote."""
    lines = [[glance for glance in results.samples if glance.right is right] for right in (True, False)]
    with style():
        figure = new_figure(11.0, 1.95 * len(lines) + 0.2)
        for axes, line, title in zip(
            figure.subplots(2, 1), lines, ("answered rightly", "answered wrongly"), strict=True
        ):
            pictures = []
            for glance in line:
                names = class_names(results.classes, glance.source)
                votes = ", ".join(names[layer.vote] for layer in glance.layers)
                below = f"said {names[glance.output]}\nmost: {votes}"
                pictures.append(Captioned(glance.pixels, names[glance.label], below, colours([glance.label])[0]))
            draw_images(axes, pictures, across=10)
            axes.set_title(title)
    return Picture(
        name,
        "The first test images that the network answers rightly and wrongly. Above: the class. Below: the answer, and "
        "the class with the largest total |score| in each layer, the input layer first.",
        figure,
    )


def forgetting_figures(results: ImageResults, run: ImageRun, prefix: str) -> Iterator[Picture]:
    """Masks and interference; nothing for experiments without them."""
    if results.masks:
        yield masks_figure(results, prefix)
    if results.forgetting is not None and results.forgetting.layers:
        yield _interference_figure(results, results.forgetting, run.settings["switch"], prefix)


def masks_figure(results: ImageResults, prefix: str) -> Picture:
    """Accuracies on each task, one group of bars for each mask."""
    masks, tasks = results.masks, results.sources
    with style():
        figure = new_figure(8.6, 0.36 * len(masks) + 1.0)
        axes = figure.add_subplot()
        places = np.arange(len(masks))[::-1].astype(float)
        height = 0.8 / len(tasks)
        for index, task in enumerate(tasks):
            values = [mask.accuracy[task] for mask in masks]
            at = places + 0.4 - height * (index + 0.5)
            bars = axes.barh(at, values, height * 0.92, color=task_colour(task), label=task)
            axes.bar_label(bars, [f"{value:.1%}" for value in values], padding=3, fontsize=7, color=INK)
        axes.set_yticks(places, [mask_name(results, mask) for mask in masks], fontsize=8)
        axes.set_xlim(0, 1.08)
        axes.grid(visible=False)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("test accuracy", color=QUIET)
        figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8)  # clear of the bars
    return Picture(
        f"{prefix}-masks",
        "Test accuracy of the same network with one task's slots left out, in all layers or in one.",
        figure,
    )


def mask_name(results: ImageResults, mask: Masked) -> str:
    """A mask in words."""
    if not mask.masked:
        return f"nothing masked, as of step {mask.as_of:,}"
    where = "all layers" if len(mask.layers) == len(results.layers) else f"{', '.join(mask.layers)} only"
    return f"{mask.masked} masked in {where}"


# -- drawing ----------------------------------------------------------------------------------


def _plot_shares(results: ImageResults) -> Figure:
    """One plot for the test images of each task: bars for layers, divided among the tasks of the slots."""
    tasks = results.sources
    shares = {(part.layer, part.test, part.train): part.share for part in results.cross_task}
    layers = list(dict.fromkeys(part.layer for part in results.cross_task))
    with style():
        figure = new_figure(3.0 * len(tasks) + 1.6, 2.8)
        grid = figure.subplots(1, len(tasks), squeeze=False, sharey=True)
        for axes, test in zip(grid[0], tasks, strict=True):
            bottoms = np.zeros(len(layers))
            for train in tasks:
                heights = np.array([shares[layer, test, train] for layer in layers])
                bars = axes.bar(layers, heights, 0.6, bottom=bottoms, color=task_colour(train), label=train)
                labels = [f"{height:.0%}" for height in heights]
                axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
                bottoms += heights
            axes.set_ylim(0, 1)
            axes.set_title(f"test images of {test}")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        grid[0, 0].set_ylabel("share of the total |score|")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, title="goes to slots of", loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _plot_over_time(timelines: Sequence[OverTime], *, steps: int, switch: int | None) -> Figure:
    """One column for each layer, one line for each task's test images; the band is their spread."""
    layers = list(dict.fromkeys(timeline.layer for timeline in timelines))
    with style():
        figure = new_figure(3.6 * len(layers), 2.9)
        grid = figure.subplots(1, len(layers), squeeze=False, sharey=True)
        for axes, layer in zip(grid[0], layers, strict=True):
            for timeline in (timeline for timeline in timelines if timeline.layer == layer):
                edges, colour = np.append(timeline.starts, steps), task_colour(timeline.source)
                low, high = np.maximum(timeline.share - timeline.spread, 0), timeline.share + timeline.spread
                axes.stairs(timeline.share, edges, baseline=None, color=colour, linewidth=1.6, label=timeline.source)
                axes.stairs(high, edges, baseline=low, fill=True, color=colour, alpha=0.15, linewidth=0)
            axes.set(xlim=(0, steps), xlabel="step")
            axes.set_title(layer)
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
            if switch is not None:
                axes.axvline(switch, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        highest = max(float((timeline.share + timeline.spread).max()) for timeline in timelines)
        grid[0, 0].set(ylabel="share of the total |score|", ylim=(0, 1.08 * highest))
        if len({timeline.source for timeline in timelines}) > 1:
            grid[0, 0].legend(title="test images of", frameon=False, fontsize=8, title_fontsize=8)
    return figure


def _interference_figure(results: ImageResults, lost: ForgottenImages, switch: int, prefix: str) -> Picture:
    """A map for each layer, class of the second task × class of the forgotten one, on a scale of its own around 0."""
    other = results.sources[1]
    rows, columns, cell = class_names(results.classes, lost.source), class_names(results.classes, other), 0.42
    with style():
        width = (cell * len(columns) + 0.9) * len(lost.layers) + 0.8
        figure = new_figure(width, max(cell * len(rows), 2.0) + 1.15)
        grid = figure.subplots(1, len(lost.layers), squeeze=False, sharey=True)
        for axes, layer in zip(grid[0], lost.layers, strict=True):
            values = layer.contributions[:, 1]
            largest = np.abs(values[np.isfinite(values)]).max(initial=0) or 1.0
            image = axes.imshow(np.ma.masked_invalid(values), cmap=_SIGNED, vmin=-largest, vmax=largest, aspect="equal")
            axes.grid(visible=False)
            axes.set_yticks(range(len(rows)), rows, fontsize=7.5)
            name_ticks(axes, range(len(columns)), columns)
            axes.spines[:].set_visible(False)
            axes.set(title=f"{layer.layer}{'' if layer.adds_up else ' (first order)'}", xlabel=f"{other} slots")
            _number_cells(axes, values, largest)
            bar = figure.colorbar(image, ax=axes, shrink=0.75, aspect=25, pad=0.02)
            bar.outline.set_visible(False)  # type: ignore[operator]
            bar.ax.tick_params(labelsize=7)
        grid[0, 0].set_ylabel(f"forgotten {lost.source} digit")
    return Picture(
        f"{prefix}-interference",
        f"What the slots of each {other} class added to the margin (logit of the wrong answer minus "
        f"logit of the true class) of {lost.sampled:,} forgotten {lost.source} digits: right at step "
        f"{switch:,}, wrong at the end. Positive: pushed over. Exact in the last layer, "
        "first order in the others. Mean over the digits of a class; a scale of its own for each layer.",
        figure,
    )


def _number_cells(axes: Axes, values: np.ndarray, largest: float) -> None:
    for (row, column), value in np.ndenumerate(values):
        text, colour = "·", QUIET
        if np.isfinite(value):
            text, colour = f"{value:.1f}".replace("-", "−"), "white" if abs(value) > 0.6 * largest else INK
        axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=colour)
