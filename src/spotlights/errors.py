"""Every exception and warning of Spotlights.

Each message says what was given, what was expected and what to do.

    Exception
    └── SpotlightsError
        ├── MemoryFormatError       the files of a memory are damaged, foreign or of another version
        ├── StoreError              a directory or bucket that cannot be written  (also an OSError)
        ├── MemoryExistsError       the path already holds a memory, or is not empty
        ├── ResumeError             a run that does not continue the memory it was given
        ├── UnknownNameError        no such layer, column or data set        (also a KeyError)
        ├── ShapeMismatchError      two shapes that do not fit each other    (also a ValueError)
        ├── SettingError            an argument that makes no sense          (also a ValueError)
        ├── UnsupportedError        a question that cannot be answered exactly here
        └── TooLargeError           an answer that would not fit in main memory

    UserWarning
    └── SpotlightsWarning
        └── RecordingStoppedWarning     training goes on, unrecorded from here
"""

from __future__ import annotations

import inspect
import warnings


class SpotlightsError(Exception):
    """The root: `except SpotlightsError` catches whatever Spotlights raises on purpose."""


class MemoryFormatError(SpotlightsError):
    """The files of a memory are damaged, missing, foreign or of another format version."""


class StoreError(SpotlightsError, OSError):
    """A directory or bucket that a memory cannot be written to: full, read-only or gone; the message says why."""


class MemoryExistsError(SpotlightsError):
    """The path already holds a memory or other files, which are never overwritten unasked."""


class ResumeError(SpotlightsError):
    """The model, optimizer or settings do not continue the memory they were asked to resume."""


class UnknownNameError(SpotlightsError, KeyError):
    """A layer, column or data set that does not exist; the message lists those that do."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError would show the sentence in quotes


class ShapeMismatchError(SpotlightsError, ValueError):
    """Two shapes that must fit each other do not; the message gives both."""


class SettingError(SpotlightsError, ValueError):
    """An argument that makes no sense; the message lists what does."""


class UnsupportedError(SpotlightsError):
    """This memory, optimizer or kernel cannot answer exactly; the message says which can."""


class TooLargeError(SpotlightsError):
    """The answer would not fit in main memory; the message says what to ask for instead."""


class SpotlightsWarning(UserWarning):
    """The root of all warnings: something is not as asked for, but the work goes on."""


class RecordingStoppedWarning(SpotlightsWarning):
    """Recording stopped. Training goes on, and every segment committed so far stays readable."""


_BETWEEN = ("spotlights", "torch", "contextlib", "lightning", "transformers", "accelerate")
"""Packages whose code calls ours in the place of the user."""


def warn(text: str, category: type[SpotlightsWarning] = SpotlightsWarning) -> None:
    """Warns at the line of the user's code that led here, as `optimizer.step()` does."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
