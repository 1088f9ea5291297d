"""The idx format: `00 00 08 d`, then d big-endian 32-bit sizes, then that many bytes.

Only unsigned bytes (type 08) are read, and only when the header and the length agree.
"""

import math
import struct

import torch
from jaxtyping import UInt8
from torch import Tensor

from spotlights.errors import DatasetError


def read_images(content: bytes, name: str) -> UInt8[Tensor, "n height width"]:
    return _read(content, name, dimensions=3)


def read_labels(content: bytes, name: str) -> UInt8[Tensor, "n"]:
    return _read(content, name, dimensions=1)


def _read(content: bytes, name: str, dimensions: int) -> UInt8[Tensor, "..."]:
    magic = bytes([0, 0, 8, dimensions])
    start = len(magic) + 4 * dimensions
    if content[:4] != magic:
        raise DatasetError(
            f"{name} is not an idx file of bytes in {dimensions} dimension(s): "
            f"it begins with {content[:4].hex(' ') or 'nothing'}, not with {magic.hex(' ')}."
        )
    if len(content) < start:
        raise DatasetError(f"{name} ends inside its header, after {len(content)} bytes.")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    expected = math.prod(shape)
    if expected == 0 or len(content) - start != expected:
        raise DatasetError(
            f"{name} announces {' × '.join(map(str, shape))} = {expected} bytes and holds {len(content) - start}."
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)
