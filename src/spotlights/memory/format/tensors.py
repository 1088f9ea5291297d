"""The layout of a safetensors file: a header that says where each tensor lies, then the tensors' bytes.

The layout is the published one; any safetensors reader opens the files. Our headers are padded to whole pages, so that
rows of whole pages can go to the disk from where they are in main memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from spotlights.memory.buffers import PAGE

LENGTH_BYTES = 8
"""A file begins with the length of its header."""
_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int8": "I8"}
_DTYPES = {code: getattr(torch, name) for name, code in _CODES.items()}

Blocks = Mapping[str, Sequence[np.ndarray]]
"""Tensors by name, each as blocks to be joined along the first dimension."""


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in its file."""

    dtype: torch.dtype
    shape: list[int]
    start: int
    """In items, from the beginning of the file."""


def lay_out(tensors: Blocks) -> tuple[bytes, list[np.ndarray], int]:
    """The bytes that a file begins with, all blocks in their order in the file, and the size of the file."""
    # Tensors of whole pages first. Then wider types first: each tensor starts at a multiple of its item size.
    sizes = {name: sum(block.nbytes for block in blocks) for name, blocks in tensors.items()}
    ordered = sorted(tensors.items(), key=lambda item: (sizes[item[0]] % PAGE > 0, -item[1][0].itemsize, item[0]))
    header: dict[str, object] = {}
    offset = 0
    for name, blocks in ordered:
        header[name] = {
            "dtype": _CODES[blocks[0].dtype.name],
            "shape": [sum(map(len, blocks)), *blocks[0].shape[1:]],
            "data_offsets": [offset, offset + sizes[name]],
        }
        offset += sizes[name]
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(LENGTH_BYTES + len(encoded)) % PAGE)
    beginning = len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded
    return beginning, [block for _, blocks in ordered for block in blocks], len(beginning) + offset


def parse_header(header: bytes, data_bytes: int) -> dict[str, TensorPlace]:
    """Where each tensor lies, in a file with so many bytes after its header; a ValueError says what is wrong.

    The tensors must fill those bytes without gap or overlap, so that none lies outside of the file.
    """
    entries = json.loads(header)
    if not isinstance(entries, dict):
        raise ValueError("its header is not a table of tensors")
    entries.pop("__metadata__", None)
    layout, ends = {}, []
    for name, entry in entries.items():
        layout[name], span = _parse_place(name, entry, LENGTH_BYTES + len(header))
        ends.append(span)
    end = 0
    for first, last in sorted(ends):
        if first != end:
            raise ValueError(f"byte {min(first, end)} of its data belongs to two tensors, or to none")
        end = last
    if end != data_bytes:
        raise ValueError(f"its tensors take {end} bytes, but {data_bytes} bytes follow its header")
    return layout


def _parse_place(name: str, entry: Any, data_start: int) -> tuple[TensorPlace, tuple[int, int]]:
    try:
        code, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"tensor {name!r} has the entry {entry!r}") from None
    dtype = _DTYPES.get(code) if isinstance(code, str) else None
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
        raise ValueError(f"tensor {name!r} has the entry {entry!r}")
    if dtype is None or (data_start + first) % dtype.itemsize:
        raise ValueError(
            f"tensor {name!r} has dtype {code!r} at byte {data_start + first}, which no version of Spotlights writes"
        )
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} of shape {shape} has {last - first} bytes")
    return TensorPlace(dtype, shape, (data_start + first) // dtype.itemsize), (first, last)
