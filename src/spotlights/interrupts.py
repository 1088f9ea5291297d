"""A question can be stopped: whoever asks says what to check between two blocks of a pass, and raises to stop it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
Check = Callable[[], object]
"""Returns to go on; raises to stop."""

_CHECK: ContextVar[Check] = ContextVar("check", default=lambda: None)


@contextmanager
def checking(check: Check) -> Iterator[None]:
    """What is asked inside is stopped as soon as `check` raises, which comes out of the question."""
    before = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(before)


def check() -> None:
    """Raises if the question of this thread is to stop."""
    _CHECK.get()()


def checked(items: Iterable[T]) -> Iterator[T]:
    """The items, with the check of the thread that calls this before each, whichever thread takes them."""
    stop = _CHECK.get()

    def one_by_one() -> Iterator[T]:
        for item in items:
            stop()
            yield item

    return one_by_one()
