"""A question can be watched and stopped: whoever asks is told how far a pass is, and says what to check meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

Check = Callable[[], object]
"""Returns to go on; raises to stop."""
Watch = Callable[[int, int], object]
"""Is told how many segments of a pass have been read, and of how many."""

CHECK: ContextVar[Check | None] = ContextVar("check", default=None)
"""That of the question which this thread asks; None for a question that nobody stops."""
_WATCH: ContextVar[Watch] = ContextVar("watch", default=lambda done, total: None)


def checking(check: Check) -> AbstractContextManager[None]:
    """What is asked inside is stopped as soon as `check` raises, which comes out of the question."""
    return _inside(CHECK, check)


def watching(watch: Watch) -> AbstractContextManager[None]:
    """Passes that are asked for inside, by an engine that counts segments, tell how far they are."""
    return _inside(_WATCH, watch)


@contextmanager
def _inside(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def check() -> None:
    """Raises if the question of this thread is to stop."""
    own = CHECK.get()
    if own is not None:
        own()


def progress(done: int, total: int) -> None:
    """Tells the one who asks, if they want to know."""
    _WATCH.get()(done, total)
