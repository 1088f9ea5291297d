"""Recording: hooks on the user's model and optimizer, adapters, the writer."""

from spotlights.recording.recorder import Recorder, record

__all__ = ["Recorder", "record"]
