"""Which training examples is an answer made of? Record training in dual form, then ask."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spotlights._version import __version__

if TYPE_CHECKING:
    from spotlights import datasets as datasets
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
    from spotlights.layers import FunctionalLinear, LayerAdapter, register_layer
    from spotlights.opened import Memory, open
    from spotlights.recording import Recorder, record
    from spotlights.web import explore

__all__ = [
    "Attention",
    "DatasetError",
    "DualLinear",
    "FunctionalLinear",
    "LayerAdapter",
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
    "explore",
    "open",
    "record",
    "register_layer",
]

# Names are imported when first used: `spotlights --help` and the errors need no torch.
_HOMES = {
    "Attention": "spotlights.attention",
    "DualLinear": "spotlights.dual",
    "dot_attention": "spotlights.dual_form",
    "DatasetError": "spotlights.errors",
    "MemoryExistsError": "spotlights.errors",
    "MemoryFormatError": "spotlights.errors",
    "RecordingStoppedWarning": "spotlights.errors",
    "ResumeError": "spotlights.errors",
    "SettingError": "spotlights.errors",
    "ShapeMismatchError": "spotlights.errors",
    "SpotlightsError": "spotlights.errors",
    "SpotlightsWarning": "spotlights.errors",
    "TooLargeError": "spotlights.errors",
    "UnknownNameError": "spotlights.errors",
    "UnsupportedError": "spotlights.errors",
    "FunctionalLinear": "spotlights.layers",
    "LayerAdapter": "spotlights.layers",
    "register_layer": "spotlights.layers",
    "Memory": "spotlights.opened",
    "open": "spotlights.opened",
    "Recorder": "spotlights.recording",
    "record": "spotlights.recording",
    "explore": "spotlights.web",
}


def __getattr__(name: str) -> Any:
    if name == "datasets":
        return import_module("spotlights.datasets")
    if name not in _HOMES:
        raise AttributeError(f"module 'spotlights' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "datasets"])
