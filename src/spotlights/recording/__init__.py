"""Recording: from the training loop to slots. Hooks on model and optimizer, the probe, the recorder."""

from spotlights.recording.recorder import Recorder, record

__all__ = ["Recorder", "record"]
