"""The names of a memory's files, and of the tensors in a segment.

A segment holds, for each layer, `LAYER/keys`, `LAYER/errors` (and their scales), `LAYER/index` where keys are stored
once, `LAYER/column/NAME`, the step log under `/log/`, and now and then the optimizer's state under `/state/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

MANIFEST, INITIAL, FINAL = "memory.json", "initial.safetensors", "final.safetensors"
MOMENTS = "moments.safetensors"
CALIBRATION = "calibration.json"
"""Both are made by readers (`memory/moments.py`, `query/forecast.py`); the manifest does not list these files."""
SEGMENTS = "segments/"
UNFINISHED = ".part"
"""Ends the name of a file that is being written, in stores where such a file can be seen."""

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)
_OF_A_MEMORY = re.compile(
    rf"(rank\d+/)*(memory\.json|calibration\.json|(initial|final|moments|{SEGMENTS}\d{{6}}-rank\d+)\.safetensors)(\.[\d-]+)?(\.part)?"
)


def is_name(name: object) -> bool:
    """Whether a file of a memory can have this name: no way leads out of the store."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name)) and not {".", ".."} & set(name.split("/"))


def may_be_of_a_memory(name: str) -> bool:
    """Whether Spotlights gives such names: to the files of a memory, of its ranks, and to unfinished ones."""
    return bool(_OF_A_MEMORY.fullmatch(name))


def segment_file(number: int, rank: int) -> str:
    return f"{SEGMENTS}{number:06d}-rank{rank}.safetensors"


def segment_number(name: str) -> int:
    """The number of a segment's file; -1 if the name is of something else."""
    number = name.removeprefix(SEGMENTS)[:6]
    return int(number) if number.isdigit() else -1


KEYS, KEY_SCALE, ERRORS, ERROR_SCALE, INDEX = "keys", "key_scale", "errors", "error_scale", "index"
SCALES = {KEYS: (KEYS, KEY_SCALE), ERRORS: (ERRORS, ERROR_SCALE)}
"""The tensors with a row for each row that is stored in full."""
TOKENS, AMOUNTS = {KEYS: "key_tokens", ERRORS: "error_tokens"}, {KEYS: "key_amounts", ERRORS: "error_amounts"}
"""Of rows that are zero but for a few entries: which entries, one row for each slot, and their numbers if some are not
1. In the first column, `IN_FULL` says that the slot's row is stored in full."""
IN_FULL = -1
NORMS = "norms"
"""Of a folded memory: the norm of each sum, one for each part of the key. Computing norms costs as much as scores."""
LOG, STATE = "/log/", "/state/"
"""No layer can have these prefixes: names of layers are never empty."""
STEPS = f"{LOG}step"
PROBE = "probe"
"""In the log of a layer: the unexplained share, and 1 if the weights were changed outside the optimizer."""
FACTOR, RULE = "factor", "rule"
"""In the log of a parameter: γ, and the fields of the update rule."""
EXPLAINED, GRADIENT = "explained", "gradient"
"""Of a run in several processes: the sum of this process' slots on a block of the gradient, and that block itself (in
rank 0; NaN where there is no gradient)."""
PROBED = "sample"
"""The probed entries of the parameter after the step (see `probed_entries`)."""
_PROBED_ENTRIES = 64
STATISTICS = "/statistics/"
"""Before the name of a running statistic (`bn1.running_mean`) in `initial.safetensors`; after `LOG`, in the log."""


def layer_tensor(layer: str, what: str) -> str:
    return f"{layer}/{what}"


def column_tensor(layer: str, column: str) -> str:
    return f"{layer}/column/{column}"


def log_tensor(layer: str, *what: str) -> str:
    """A row per step: of a layer (`PROBE`), or of one of its parameters ("weight", `FACTOR`)."""
    return f"{LOG}{layer}/{'/'.join(what)}"


def state_tensor(layer: str, parameter: str, state: str) -> str:
    """The optimizer's state of a parameter before the segment's first step; or the parameter itself."""
    return f"{STATE}{layer}/{parameter}/{state}"


@cache
def probed_entries(numel: int) -> slice:
    """Which entries of a parameter, flattened, the step log keeps: spread over its rows and its columns."""
    count = min(_PROBED_ENTRIES, numel)
    stride = numel // max(count, 1)
    stride -= stride % 2 == 0  # odd, or it would meet few columns of the usual sizes
    return slice(max(stride, 1) // 2, count * max(stride, 1), max(stride, 1))


MOVED = {
    1: "weights changed outside the optimizer",
    2: "the optimizer's state was loaded or replaced",
    4: "its parameters left the optimizer, or were replaced",
    8: "the optimizer trains parameters that it did not hold when recording began",
    16: "trained by an optimizer that is not recorded",
}
"""What the step log says in its column `moved`, added up, where a step does not follow from the one before."""


def moved_steps(moved: Iterable[int | float]) -> dict[str, list[int]]:
    """The steps of each reason."""
    logged = [(step, int(reasons)) for step, reasons in enumerate(moved) if reasons]
    steps = {text: [step for step, reasons in logged if reasons & bit] for bit, text in MOVED.items()}
    return {text: of_reason for text, of_reason in steps.items() if of_reason}
