"""How a training example or an input looks: an image, a text, or a table for everything else.

A subject has one function from an id to something showable: an array, tensor or PIL image of any channels, or a
matplotlib figure (an image), a string or a `MarkedText` (a text), a mapping or a sequence (a row, shown as a table), or
whatever shows itself in a notebook (`_repr_html_`, such as a sound), which the page puts in a frame without scripts.
"""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from spotlights.errors import SettingError


@dataclass(frozen=True)
class MarkedText:
    """A text, some of which is highlighted."""

    text: str
    start: int = 0
    end: int = 0
    """The highlighted characters, `text[start:end]`."""


Showable = Any
"""An image, a text or a row; the opening of this module says of which types."""
Show = Callable[[int], Showable]


def as_json(shown: Showable, image: str | None = None) -> dict[str, Any]:
    """What the page needs to show something; `image` is where the page asks for the pixels, if it is an image."""
    if isinstance(shown, str):
        return {"kind": "text", "text": shown, "start": 0, "end": 0}
    if isinstance(shown, MarkedText):
        return {"kind": "text", "text": shown.text, "start": shown.start, "end": shown.end}
    row = _row(shown)
    if row is not None:
        cells = [[str(name), f"{v:.4g}" if isinstance(v, float) else str(v)] for name, v in row.items()]
        numbers = [float(v) if isinstance(v, int | float) else None for v in row.values()]
        return {"kind": "table", "rows": cells, "numbers": numbers}
    if hasattr(shown, "savefig"):
        return {"kind": "image", "height": 3, "width": 4, "image": image, "smooth": True}
    if hasattr(shown, "_repr_html_"):
        return {"kind": "html", "html": str(shown._repr_html_())}
    height, width = pixels(shown).shape[:2]
    return {"kind": "image", "height": height, "width": width, "image": image, "smooth": max(height, width) > 96}


def picture(shown: Showable) -> bytes:
    """An image as a PNG file."""
    if hasattr(shown, "savefig"):
        file = io.BytesIO()
        shown.savefig(file, format="png", dpi=100)
        return file.getvalue()
    return png(pixels(shown))


def png_url(file: bytes) -> str:
    """A PNG file as the address of an image, for pages without a server."""
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def pixels(shown: Showable) -> UInt8[np.ndarray, "height width *colours"]:
    """An image as bytes: of shape (height, width) or (height, width, 3)."""
    if isinstance(shown, str | MarkedText) or _row(shown) is not None:
        raise SettingError("This is shown as text or as a table; it has no pixels.")
    if isinstance(shown, Tensor):
        shown = shown.detach().cpu()
    elif hasattr(shown, "convert"):  # of PIL, whose palettes and transparency we do not show
        shown = shown.convert("L" if shown.mode in ("1", "L") else "RGB")
    image = np.asarray(shown)
    if image.ndim == 3 and image.shape[0] <= 4 < image.shape[2]:
        image = np.moveaxis(image, 0, 2)  # PyTorch has the colours first
    elif image.ndim == 3 and image.shape[2] > 4:
        image = np.moveaxis(image, 0, 2) if image.shape[0] < image.shape[2] else image
    if image.ndim == 3:  # without transparency; of two channels, or of many, those that one can see
        image = image[:, :, :3] if image.shape[2] > 2 else image[:, :, 0]
    if image.ndim not in (2, 3):
        raise SettingError(f"An image has the shape (height, width) or (height, width, colours), not {image.shape}.")
    if image.dtype != np.uint8:
        image = np.nan_to_num(image.astype(np.float64))
        low, high = float(image.min(initial=0.0)), float(image.max(initial=0.0))
        image = ((image - low) * (255 / ((high - low) or 1))).round().astype(np.uint8)
    return image


def _row(shown: Showable) -> Mapping[Any, Any] | None:
    """A row of a table by the names of its columns, or their numbers; None if this is not a row."""
    if isinstance(shown, Mapping):
        return shown
    if hasattr(shown, "to_dict"):  # a row of pandas
        return shown.to_dict()
    if isinstance(shown, Tensor | np.ndarray):
        return dict(enumerate(shown.tolist())) if shown.ndim == 1 else None
    return dict(enumerate(shown)) if isinstance(shown, Sequence) else None


def png(image: UInt8[np.ndarray, "height width *colours"]) -> bytes:
    """The image as a PNG file: a few chunks, so that no image library is needed."""
    height, width = image.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    colour = 2 if image.ndim == 3 else 0
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 6)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
