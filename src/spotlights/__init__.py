"""Which training examples is an answer made of? Record training in dual form, then ask."""

from spotlights._version import __version__
from spotlights.attention import Attention
from spotlights.dual import DualLinear
from spotlights.dual_form import dot_attention
from spotlights.errors import (
    DatasetError,
    MemoryExistsError,
    MemoryFormatError,
    RecordingStoppedWarning,
    ResumeError,
    SettingError,
    ShapeMismatchError,
    SpotlightsError,
    SpotlightsWarning,
    TooLargeError,
    UnknownNameError,
    UnsupportedError,
)
from spotlights.opened import Memory, open
from spotlights.recording import Recorder, record

__all__ = [
    "Attention",
    "DatasetError",
    "DualLinear",
    "Memory",
    "MemoryExistsError",
    "MemoryFormatError",
    "Recorder",
    "RecordingStoppedWarning",
    "ResumeError",
    "SettingError",
    "ShapeMismatchError",
    "SpotlightsError",
    "SpotlightsWarning",
    "TooLargeError",
    "UnknownNameError",
    "UnsupportedError",
    "__version__",
    "dot_attention",
    "open",
    "record",
]
