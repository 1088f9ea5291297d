"""Progress on the terminal (stderr), and silence where there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track

Item = TypeVar("Item")


def track(items: Iterable[Item], total: int, what: str) -> Iterable[Item]:
    """Shows how many of the items have been taken."""
    console = Console(stderr=True)
    return rich_track(items, what, total=total, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Shows what is going on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
