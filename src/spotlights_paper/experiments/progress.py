"""Progress on the terminal (stderr); silent where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from rich.console import Console
from rich.progress import track as rich_track
from rich.status import Status

Item = TypeVar("Item")


def track(items: Iterable[Item], total: int, what: str) -> Iterable[Item]:
    """Shows how many of the items have been taken."""
    console = Console(stderr=True)
    return rich_track(items, what, total=total, console=console, transient=True, disable=not console.is_terminal)


def stage(what: str) -> Status:
    """Shows what is going on, as a context."""
    return Console(stderr=True).status(what)


def say(what: str) -> None:
    """One line."""
    Console(stderr=True).print(what, highlight=False)
