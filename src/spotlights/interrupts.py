"""A question can be stopped: whoever asks says what to check between two blocks of a pass, and raises to stop it."""

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
