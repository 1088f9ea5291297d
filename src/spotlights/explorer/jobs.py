"""Long work in a thread of its own, for which a request need not wait: whoever asks comes again until it is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from spotlights.errors import SpotlightsError

PATIENCE = 1.0
"""Seconds for which an answer waits for what it needs before it is put off."""
FORGOTTEN = 20.0
"""Seconds after which work that nobody asks for any more is given up."""

T = TypeVar("T")


class Preparing(Exception):  # noqa: N818 (no error, an answer for later)
    """An answer that needs something which is still being prepared: ask again."""

    def __init__(self, progress: float) -> None:
        super().__init__(progress)
        self.progress = progress
        """0 to 1."""


class AbandonedError(SpotlightsError):
    """Nobody waits for this work any more."""


class BackgroundJob(threading.Thread, Generic[T]):
    """Some work that takes long, its progress and its result."""

    def __init__(self, work: Callable[[Callable[[float], None]], T], *, needs_interest: bool = False) -> None:
        """
        Args:
            work: is given a function to call with the share that is done.
            needs_interest: give the work up once nobody has asked for it for a while.
        """
        super().__init__(daemon=True)
        self._work, self._needs_interest = work, needs_interest
        self._progress, self._asked = 0.0, time.monotonic()
        self._result: Any = None
        self.problem: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._work(self._note)
        except Exception as error:  # it is raised where somebody asks
            self.problem = error

    def _note(self, progress: float) -> None:
        if self._needs_interest and time.monotonic() - self._asked > FORGOTTEN:
            raise AbandonedError("Nobody waits for this answer any more.")
        self._progress = progress

    def result(self) -> T:
        """What came of the work; raises `Preparing` while that takes long, and what the work raised."""
        self._asked = time.monotonic()
        self.join(PATIENCE)
        if self.problem is not None:
            raise self.problem
        if self.is_alive():
            raise Preparing(self._progress)
        return self._result
