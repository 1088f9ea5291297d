"""Small pictures in a terminal of 24-bit colours: each character holds two pixels, one above the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import UInt8
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

import spotlights as sl
from spotlights.explorer.views import as_json, pixels
from spotlights.results import printable

SIDE = 16
"""Pixels of the longer side: as many characters, or half as many lines."""
HALF = "▀"
_GAP = 2


def can_show(console: Console) -> bool:
    """Whether people will see the pictures: not where the output goes to a file or a pipe."""
    return console.is_terminal and console.color_system == "truecolor" and not console.no_color


def strips(subject: sl.Subject, place: int | None, examples: Sequence[int], width: int) -> Text | None:
    """The input at a place and the training examples as rows of pictures; None if these are not pictures."""
    show = subject.show_example
    if show is None or not examples or as_json(first := show(examples[0]))["kind"] != "image":
        return None
    if hasattr(first, "savefig"):
        return None  # a figure has words, which are not legible in so few pixels
    shown = [] if place is None else [("the input", subject.inputs.show(place))]
    shown += [(f"example {example}", show(example)) for example in examples]
    cells = [(name, _scaled(pixels(look))) for name, look in shown]
    each_row = max(1, (width + _GAP) // (SIDE + _GAP))
    rows = [cells[at : at + each_row] for at in range(0, len(cells), each_row)]
    return Text("\n").join([_row(row) for row in rows])


def _row(cells: Sequence[tuple[str, UInt8[np.ndarray, "height width 3"]]]) -> Text:
    row = Text()
    for line in range(0, max(image.shape[0] for _, image in cells), 2):
        for _, image in cells:
            for column in range(SIDE):
                row.append(*_character(image, line, column))
            row.append(" " * _GAP)
        row.append("\n")
    captions = (printable(name)[:SIDE].ljust(SIDE + _GAP) for name, _ in cells)
    return row.append("".join(captions).rstrip(), "dim").append("\n")


def _character(image: UInt8[np.ndarray, "height width 3"], line: int, column: int) -> tuple[str, Style | None]:
    height, width = image.shape[:2]
    if line >= height or column >= width:
        return " ", None
    above = Color.from_rgb(*image[line, column].tolist())
    below = Color.from_rgb(*image[line + 1, column].tolist()) if line + 1 < height else None
    return HALF, Style(color=above.name, bgcolor=None if below is None else below.name)


def _scaled(image: UInt8[np.ndarray, "height width *colours"]) -> UInt8[np.ndarray, "height width 3"]:
    """The image with colours and a longer side of `SIDE`: each pixel the mean of those that it stands for."""
    image = np.repeat(image[:, :, None], 3, axis=2) if image.ndim == 2 else image
    height, width = (max(1, round(size * SIDE / max(image.shape[:2]))) for size in image.shape[:2])
    colours_first = torch.from_numpy(np.moveaxis(image, 2, 0).astype(np.float32))
    means = torch.nn.functional.adaptive_avg_pool2d(colours_first, (height, width))
    return means.round().byte().permute(1, 2, 0).numpy()
