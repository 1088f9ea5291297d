"""Both levels of a transformer's retrieval: context tokens above, the training tokens behind each of them below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from spotlights.figures.canvas import new_figure, say
from spotlights.figures.palette import FAINT, FOR, INK, MARK, QUIET, style

_REACH = 13
"""Characters on either side of a training token that are shown."""
_VISIBLE = {" ": "␣", "\n": "↵"}


@dataclass(frozen=True)
class Snippet:
    """A token of the training text, what is around it, and its number."""

    before: str
    token: str
    after: str
    value: float


@dataclass(frozen=True)
class Column:
    """One way to the second level."""

    title: str
    rows: Sequence[Sequence[Snippet]]
    """For each token that is looked at."""


def plot_two_levels(
    prompt: Sequence[str],
    weights: Float[np.ndarray, "heads places"],
    looked: Sequence[tuple[int, str]],
    columns: Sequence[Column],
    *,
    note: str | None = None,
) -> Figure:
    """Draws them.

    Args:
        prompt: the tokens; the last one with a weight is the one that looks.
        weights: the softmax attention of each head.
        looked: the places that are followed to the second level, each with what is said of it.
        columns: the second level.
        note: what a reader must know.
    """
    with style():
        heights = [1.15] + [0.62 + 0.2 * max(len(column.rows[row]) for column in columns) for row in range(len(looked))]
        figure = new_figure(3.4 * len(columns), sum(heights) + 0.7)
        parts: Any = figure.subfigures(1 + len(looked), 1, height_ratios=heights, squeeze=False)
        top, *below = parts[:, 0]
        _context(top.subplots(), prompt, weights, [place for place, _ in looked])
        for row, (part, (_, title)) in enumerate(zip(below, looked, strict=True)):
            part.suptitle(title, x=0.01, ha="left", fontsize=9.5, fontweight="bold")
            for axes, column in zip(np.atleast_1d(part.subplots(1, len(columns))), columns, strict=True):
                _snippets(axes, column.title, column.rows[row])
        say(figure, note)
        return figure


def _context(axes: Axes, prompt: Sequence[str], weights: Float[np.ndarray, "heads places"], picked: list[int]) -> None:
    heads, places = weights.shape
    axes.imshow(weights, cmap="Greys", vmin=0.0, vmax=float(weights.max()), aspect="auto")
    for rank, place in enumerate(picked, start=1):
        axes.add_patch(Rectangle((place - 0.5, -0.5), 1, heads, fill=False, edgecolor=FOR, linewidth=1.4))
        axes.text(place, -0.7, str(rank), ha="center", va="bottom", color=FOR, fontsize=8, fontweight="bold")
    axes.set_xticks(range(places), [_VISIBLE.get(token, token) for token in prompt[:places]], family="DejaVu Sans Mono")
    axes.tick_params(axis="x", labelsize=7)
    axes.get_xticklabels()[-1].set_bbox({"facecolor": MARK, "edgecolor": "none", "pad": 1.0})
    axes.set_yticks(range(heads), [f"head {head}" for head in range(heads)])
    axes.set_title("first level: where the marked token looks, by softmax attention", pad=12)
    axes.grid(visible=False)


def _snippets(axes: Axes, title: str, snippets: Sequence[Snippet]) -> None:
    """One line for each; all letters have the same width, so places can be counted."""
    axes.set_xlim(-_REACH - 8, _REACH + 1)
    axes.set_ylim(len(snippets) - 0.4, -0.6)
    axes.set_axis_off()
    axes.set_title(title, fontsize=8.5, fontweight="normal", color=QUIET, pad=3)
    for line, snippet in enumerate(snippets):
        axes.add_patch(Rectangle((-0.5, line - 0.42), 1, 0.84, facecolor=MARK, edgecolor="none"))
        axes.text(-_REACH - 1.5, line, f"{snippet.value:.3g}", ha="right", va="center", fontsize=7.5, color=QUIET)
        letters = [*snippet.before[-_REACH:].rjust(_REACH), _VISIBLE.get(snippet.token, snippet.token)]
        letters += snippet.after[:_REACH]
        for place, letter in enumerate(letters):
            shown = " " if place != _REACH and letter.isspace() else letter
            here: dict[str, Any] = {"color": INK, "fontweight": "bold"} if place == _REACH else {"color": INK}
            axes.text(
                place - _REACH, line, shown, ha="center", va="center", fontsize=7.5, family="DejaVu Sans Mono", **here
            )
    axes.axhline(len(snippets) - 0.45, color=FAINT, linewidth=0.8)
