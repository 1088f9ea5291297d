"""Says once, at the first step with slots, how much disk space a recording takes."""

from __future__ import annotations

import logging

import numpy as np

from spotlights.errors import warn
from spotlights.memory.slots import StepRecord

_LARGE, _LARGE_RUN = 10e6, 20e9
"""From that many bytes per example, or per 1,000 steps, on: a warning instead of a line in the log."""
_LAYERS_SHOWN = 3


def announce_bytes(record: StepRecord) -> bool:
    """Says how many bytes an example takes, or a step if no examples were given; whether there was anything to say."""
    of_layer = {name: sum(rows.nbytes for rows in step.rows) for name, step in record.layers.items()}
    total = sum(of_layer.values())
    if not total:
        return False
    examples = max(_examples(record), default=0)
    first = sorted(of_layer, key=lambda name: -of_layer[name])[:_LAYERS_SHOWN]
    shares = ", ".join(f"{name} {of_layer[name] / total:.0%}" for name in first)
    per = f"{size_in_words(total)} per step"
    per = f"{size_in_words(total / examples)} per example, {per}" if examples else per
    text = f"Slots take {per}, {size_in_words(1000 * total)} per 1,000 steps ({shares})."
    if (examples and total / examples >= _LARGE) or 1000 * total >= _LARGE_RUN:
        hint = 'Smaller: keep="recipe", layers=…, dtype="float16" or "int8", sample=….'
        warn(f"{text} {hint}")
    else:
        logging.getLogger("spotlights").info("%s", text)
    return True


def _examples(record: StepRecord) -> list[int]:
    """How many different examples each layer's slots are of."""
    counts = []
    for step in record.layers.values():
        given = [rows.columns["example"] for rows in step.rows if "example" in rows.columns]
        counts += [len(np.unique(np.concatenate(given)))] if given else []
    return counts


def size_in_words(nbytes: int | float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 999.5 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} B"
