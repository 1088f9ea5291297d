"""Keys that come again, kept once: each distinct key of a layer gets a number."""

from __future__ import annotations

import operator

import numpy as np
import xxhash

_GIVE_UP_ROWS = 1 << 20


class KeyIndex:
    """Numbers the distinct keys of a layer, by a 128-bit hash of their stored bytes."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._count = 0
        self._seen = 0
        self._worthwhile = True

    def distinct(
        self, keys: list[np.ndarray], scales: list[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """Those of the keys, and of their scales, that were not met before; and the numbers of all."""
        kept, kept_scales, numbers = [], [], []
        done = 0
        for block in keys:
            scale = scales[0][done : done + len(block)] if scales else None
            found, fresh = self.add(block, scale)
            numbers.append(found)
            kept.append(block[fresh])
            if scale is not None:
                kept_scales.append(scale[fresh])
            done += len(block)
        return kept, kept_scales, numbers

    def add(self, keys: np.ndarray, scale: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The number of each row's key, and which rows hold a key not met before."""
        count = len(keys)
        if not self._worthwhile:
            numbers = np.arange(self._count, self._count + count)
            self._count += count
            return numbers, np.arange(count)
        digests = list(map(xxhash.xxh3_128_digest, keys))
        if scale is not None:
            digests = list(map(operator.add, digests, scale.view("V4").tolist()))
        numbers = list(map(self._numbers.get, digests))
        fresh = []
        for row in [row for row, number in enumerate(numbers) if number is None]:
            numbers[row] = self._numbers.setdefault(digests[row], self._count)
            if numbers[row] == self._count:
                self._count += 1
                fresh.append(row)
        self._seen += count
        # Inputs that never repeat (augmentation, streams) would only grow the table.
        if self._seen >= _GIVE_UP_ROWS and self._count > 0.9 * self._seen:
            self._worthwhile = False
            self._numbers.clear()
        return np.array(numbers, dtype=np.int64), np.array(fresh, dtype=np.int64)
