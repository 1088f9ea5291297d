"""Which training examples is an answer made of? Record training in dual form, then ask."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spotlights._version import __version__

if TYPE_CHECKING:
    from spotlights.api import Memory, observe, open
    from spotlights.decisions import Decisions
    from spotlights.dual import DualLinear
    from spotlights.dual_form import dot_attention
    from spotlights.errors import (
        MemoryExistsError,
        MemoryFormatError,
        RecordingStoppedWarning,
        ResumeError,
        SettingError,
        ShapeMismatchError,
        SpotlightsError,
        SpotlightsWarning,
        StoreError,
        TooLargeError,
        UnknownNameError,
        UnsupportedError,
    )
    from spotlights.explorer.views import MarkedText
    from spotlights.layers import FunctionalLinear, LayerAdapter, register_layer
    from spotlights.query import AskTop, AskTotals, Attention, Contributions, History, Influence, Spotlights
    from spotlights.query.masks import Mask
    from spotlights.query.parts import Merged, Shard
    from spotlights.query.runs import RunsInfluence, influence
    from spotlights.recording import Recorder, record
    from spotlights.rewinding import Rewound
    from spotlights.subject import Drawing, Subject

__all__ = [
    "AskTop",
    "AskTotals",
    "Attention",
    "Contributions",
    "Decisions",
    "Drawing",
    "DualLinear",
    "FunctionalLinear",
    "History",
    "Influence",
    "LayerAdapter",
    "MarkedText",
    "Mask",
    "Memory",
    "MemoryExistsError",
    "MemoryFormatError",
    "Merged",
    "Recorder",
    "RecordingStoppedWarning",
    "ResumeError",
    "Rewound",
    "RunsInfluence",
    "SettingError",
    "ShapeMismatchError",
    "Shard",
    "Spotlights",
    "SpotlightsError",
    "SpotlightsWarning",
    "StoreError",
    "Subject",
    "TooLargeError",
    "UnknownNameError",
    "UnsupportedError",
    "__version__",
    "dot_attention",
    "influence",
    "observe",
    "open",
    "record",
    "register_layer",
]

# Names are imported when first used: `spotlights --help` and the errors need no torch.
_NAMES = {
    "spotlights.api": "Memory observe open",
    "spotlights.decisions": "Decisions",
    "spotlights.dual": "DualLinear",
    "spotlights.dual_form": "dot_attention",
    "spotlights.errors": (
        "MemoryExistsError MemoryFormatError RecordingStoppedWarning ResumeError SettingError "
        "ShapeMismatchError SpotlightsError SpotlightsWarning StoreError TooLargeError UnknownNameError "
        "UnsupportedError"
    ),
    "spotlights.explorer.views": "MarkedText",
    "spotlights.layers": "FunctionalLinear LayerAdapter register_layer",
    "spotlights.query": "AskTop AskTotals Attention Contributions History Influence Spotlights",
    "spotlights.query.masks": "Mask",
    "spotlights.query.parts": "Merged Shard",
    "spotlights.query.runs": "RunsInfluence influence",
    "spotlights.recording": "Recorder record",
    "spotlights.rewinding": "Rewound",
    "spotlights.subject": "Drawing Subject",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in ("figures", "results"):
        return import_module(f"spotlights.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'spotlights' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
