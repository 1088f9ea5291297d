"""Views: how a datum is shown. A picture, a passage of text, or a plain table for everything else.

A view is one function from an id to something showable: a numpy array of pixels (an image), a string or a
`Passage` (text), or a mapping (a table). The page asks for nothing else, so this is all that a new kind of data needs.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8
from torch import Tensor

from spotlights.errors import SettingError


@dataclass(frozen=True)
class Passage:
    """A text, some of which is highlighted."""

    text: str
    start: int = 0
    end: int = 0
    """The highlighted characters, `text[start:end]`."""


Showable = np.ndarray | Tensor | str | Passage | Mapping[str, Any]
View = Callable[[int], Showable]


def as_json(shown: Showable) -> dict[str, Any]:
    """What the page needs to show it; an image's pixels are asked for apart."""
    if isinstance(shown, str):
        return {"kind": "text", "text": shown, "start": 0, "end": 0}
    if isinstance(shown, Passage):
        return {"kind": "text", "text": shown.text, "start": shown.start, "end": shown.end}
    if isinstance(shown, Mapping):
        return {"kind": "table", "rows": [[str(name), str(value)] for name, value in shown.items()]}
    height, width = pixels(shown).shape[:2]
    return {"kind": "image", "height": height, "width": width}


def pixels(shown: Showable) -> UInt8[np.ndarray, "height width *colours"]:
    """An image as bytes: of shape (height, width) or (height, width, 3)."""
    if isinstance(shown, Tensor):
        shown = shown.detach().cpu().numpy()
    if not isinstance(shown, np.ndarray):
        raise SettingError("This is shown as text or as a table; it has no pixels.")
    if shown.ndim == 3 and shown.shape[0] in (1, 3) and shown.shape[2] not in (1, 3):
        shown = np.moveaxis(shown, 0, 2)  # PyTorch has the colours first
    if shown.ndim == 3 and shown.shape[2] == 1:
        shown = shown[:, :, 0]
    if shown.ndim not in (2, 3) or (shown.ndim == 3 and shown.shape[2] != 3):
        raise SettingError(f"An image has the shape (height, width) or (height, width, 3), not {shown.shape}.")
    if shown.dtype != np.uint8:
        shown = np.nan_to_num(shown.astype(np.float64))
        low, high = float(shown.min(initial=0.0)), float(shown.max(initial=0.0))
        shown = ((shown - low) * (255 / ((high - low) or 1))).round().astype(np.uint8)
    return shown


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
