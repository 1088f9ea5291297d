"""Both levels of a transformer's retrieval: context tokens above, the training tokens behind each of them below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from spotlights.figures import new_figure
from spotlights.figures.palette import FAINT, FOR, INK, MARK, QUIET, style
from spotlights.results import Passage
from spotlights_paper.experiments.language.two_levels import TwoLevels
from spotlights_paper.pictures import Picture

_REACH = 13
"""Characters on either side of a training token that are shown."""
_VISIBLE = {" ": "␣", "\n": "↵"}
_FONT: dict[str, Any] = {"family": "DejaVu Sans Mono"}


def two_levels_figure(levels: TwoLevels, name: str) -> Picture:
    """The figure about one token of a prompt."""
    return Picture(
        name,
        f"Two levels of retrieval in block {levels.block}. Above: the softmax attention of the token "
        f"{levels.prompt[levels.token]!r}. Below, for each of the tokens it looks at most: which training tokens its "
        "projections attend to. Contributions of all training tokens through the query, or through the key, and the "
        "initial weights add up to the attention logit q·k/√d; contributions through the value are first order.",
        _plot(levels),
    )


def _plot(levels: TwoLevels) -> Figure:
    columns = {
        "alike": "training tokens that look alike (score)",
        "by_query": "why it looks there: through its query",
        "by_key": "why it is looked at: through its key",
        "by_value": f"what it adds to {levels.answer!r}: through its value",
    }
    looked = levels.looked
    with style():
        lines = [max(len(getattr(place, what)) for what in columns) for place in looked]
        heights = [1.15] + [0.62 + 0.2 * count for count in lines]
        figure = new_figure(3.4 * len(columns), sum(heights) + 0.7)
        parts: Any = figure.subfigures(1 + len(looked), 1, height_ratios=heights, squeeze=False)
        top, *below = parts[:, 0]
        _draw_context(top.subplots(), levels)
        for rank, (part, place) in enumerate(zip(below, looked, strict=True), start=1):
            token = levels.prompt[place.place]
            title = (
                f"{rank}. {token!r} at place {place.place}: {place.weight:.0%} of the attention, "
                f"attention logit {place.inclination:.2f}"
            )
            part.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold")
            for axes, (what, heading) in zip(part.subplots(1, len(columns)), columns.items(), strict=True):
                _draw_passages(axes, heading, getattr(place, what).passages)
    return figure


def _draw_context(axes: Axes, levels: TwoLevels) -> None:
    weights = np.array(levels.weights)
    heads, places = weights.shape
    axes.imshow(weights, cmap="Greys", vmin=0.0, vmax=float(weights.max()), aspect="auto")
    for rank, looked in enumerate(levels.looked, start=1):
        place = looked.place
        axes.add_patch(Rectangle((place - 0.5, -0.5), 1, heads, fill=False, edgecolor=FOR, linewidth=1.4))
        axes.text(place, -0.7, str(rank), ha="center", va="bottom", color=FOR, fontsize=8, fontweight="bold")
    axes.set_xticks(range(places), [_VISIBLE.get(token, token) for token in levels.prompt[:places]], **_FONT)
    axes.tick_params(axis="x", labelsize=7)
    axes.get_xticklabels()[-1].set_bbox({"facecolor": MARK, "edgecolor": "none", "pad": 1.0})
    axes.set_yticks(range(heads), [f"head {head}" for head in range(heads)])
    axes.set_title("first level: where the marked token looks, by softmax attention", pad=12)
    axes.grid(visible=False)


def _draw_passages(axes: Axes, title: str, passages: Sequence[Passage]) -> None:
    """One line for each; all letters have the same width, so that places can be counted."""
    axes.set_xlim(-_REACH - 8, _REACH + 1)
    axes.set_ylim(len(passages) - 0.4, -0.6)
    axes.set_axis_off()
    axes.set_title(title, fontsize=8.5, fontweight="normal", color=QUIET, pad=3)
    for line, passage in enumerate(passages):
        hit = max(passage.hits, key=lambda hit: hit.score)
        place, text = hit.position - passage.start, passage.text
        before, after = "".join(text[:place])[-_REACH:].rjust(_REACH), "".join(text[place + 1 :])[:_REACH]
        axes.add_patch(Rectangle((-0.5, line - 0.42), 1, 0.84, facecolor=MARK, edgecolor="none"))
        axes.text(-_REACH - 1.5, line, f"{hit.score:.3g}", ha="right", va="center", fontsize=7.5, color=QUIET)
        for column, letter in enumerate([*before, _VISIBLE.get(text[place], text[place]), *after], start=-_REACH):
            letter = " " if column and letter.isspace() else letter
            weight = "normal" if column else "bold"
            axes.text(
                column, line, letter, ha="center", va="center", fontsize=7.5, color=INK, fontweight=weight, **_FONT
            )
    axes.axhline(len(passages) - 0.45, color=FAINT, linewidth=0.8)
