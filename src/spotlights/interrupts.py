"""A question can be watched and stopped: whoever asks is told how far a pass is, and says what to check meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Check = Callable[[], object]
"""Returns to go on; raises to stop."""

CHECK: ContextVar[Check | None] = ContextVar("check", default=None)
"""That of the question which this thread asks."""


@contextmanager
def checking(check: Check) -> Iterator[None]:
    """What is asked inside is stopped as soon as `check` raises, which comes out of the question."""
    before = CHECK.set(check)
    try:
        yield
    finally:
        CHECK.reset(before)


def check() -> None:
    """Raises if the question of this thread is to stop."""
    own = CHECK.get()
    if own is not None:
        own()


Watch = Callable[[int, int], object]
"""Is told how many segments of a pass have been read, and of how many."""

_WATCH: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Passes that are asked for inside, by an engine that counts segments, tell how far they are."""
    before = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(before)


def progress(done: int, total: int) -> None:
    """Tells the one who asks, if they want to know."""
    watch = _WATCH.get()
    if watch is not None:
        watch(done, total)
