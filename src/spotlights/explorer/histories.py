"""The history of an answer, for the page: computed in the background, as long as somebody asks for it."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

import spotlights as sl
from spotlights.errors import SpotlightsError
from spotlights.explorer.explorer import PATIENCE, Explorer, Preparing
from spotlights.explorer.queries import Query
from spotlights.explorer.spotlight import example_rows

POINTS, AREAS = 300, 100
"""Of the curve, and of the areas under it, over all of training."""
FORGOTTEN = 20.0
"""Seconds after which a history that nobody asks for any more is given up."""


class AbandonedError(SpotlightsError):
    """Nobody waits for this history any more."""


class Job(threading.Thread):
    """One sweep back over all of training."""

    def __init__(self, spot: sl.Spotlights, name: str, target: Any) -> None:
        super().__init__(daemon=True)
        self._spot, self._name, self._target = spot, name, target
        self.progress, self.asked = 0.0, time.monotonic()
        self.result: sl.History | None = None
        self.problem: SpotlightsError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._spot.history({self._name: self._target}, progress=self._went)
        except SpotlightsError as error:
            self.problem = error

    def _went(self, share: float) -> None:
        if time.monotonic() - self.asked > FORGOTTEN:
            raise AbandonedError("Nobody waits for this history any more.")
        self.progress = share


def find_history(explorer: Explorer, query: Query, wanted: str | None) -> tuple[sl.History, tuple[int, ...]]:
    """The history of an output, or of the difference of two; raises `Preparing` while it is computed."""
    spot = explorer.attend(query)
    numbers = query.output_numbers(spot.output, wanted)
    key = "history", query.name, query.position, numbers
    kept = explorer.opened.kept
    if (found := kept.get(key)) is not None:
        return found, numbers
    name = " − ".join(query.output_name(number) for number in numbers)
    with explorer.starting:
        jobs = explorer.opened.histories
        job = jobs.get(key)
        if job is None or isinstance(job.problem, AbandonedError):
            running = next((job for job in jobs.values() if job.is_alive()), None)
            if running is not None:  # one at a time: a sweep takes all cores
                raise Preparing(0.0)
            jobs.clear()
            job = jobs[key] = Job(spot, name, query.target(spot.output, numbers))
    job.asked = time.monotonic()
    job.join(PATIENCE)
    if job.problem is not None:
        raise job.problem
    if job.result is None:
        raise Preparing(job.progress)
    kept.put(key, job.result, 64 << 20)
    return job.result, numbers


def described(explorer: Explorer, query: Query, wanted: str | None, per: str | None) -> dict[str, Any]:
    """The history of an output as plain data: the curve, who made it by groups, and when it was right."""
    history, numbers = find_history(explorer, query, wanted)
    column = per if per in explorer.opened.groups else next(iter(explorer.opened.groups), None)
    key = "history of", query.name, query.position, numbers, column
    return explorer.kept(key, lambda: _described(explorer, query, history, numbers, column))


def during(explorer: Explorer, query: Query, wanted: str | None, steps: range, top: int) -> dict[str, Any]:
    """The examples whose visits in some steps added and took most."""
    history, _ = find_history(explorer, query, wanted)
    part = history.during(steps)
    if "example" not in explorer.opened.memory.columns:
        return {"top": [], "bottom": []}
    with explorer.scanning:
        rows = part.top(top), part.bottom(top)
    return {name: example_rows(explorer, each) for name, each in zip(("top", "bottom"), rows, strict=True)}


def _described(
    explorer: Explorer, query: Query, history: sl.History, numbers: tuple[int, ...], column: str | None
) -> dict[str, Any]:
    curve, steps = history.curve().values[0], explorer.opened.memory.steps
    places = np.unique(np.linspace(0, steps, min(POINTS, steps + 1)).round().astype(int)).tolist()
    panel = history.panel(by=column, bins=AREAS)
    areas = [] if panel.areas is None else panel.areas.tolist()
    return {
        "target": numbers[0],
        "versus": numbers[1] if len(numbers) > 1 else None,
        "name": history.names[0],
        "steps": steps,
        "at": places,
        "curve": [float(curve[place]) for place in places],
        "says": _stretches(query, history),
        "per": column,
        "groups": list(panel.groups or []),
        "edges": [] if panel.edges is None else [float(edge) for edge in panel.edges],
        "areas": areas,
        "layers": {str(row["layer"]): row["total history"] for row in history.by_layer().rows()},
        "terms": {row["term"]: row[history.names[0]] for row in history.rows(0)},
        "exact": history.exact,
        "error": float(history.error[0]),
        "lost": [{**row, "says_name": _name(query, row["says"])} for row in history.forgetting().rows()],
    }


def _stretches(query: Query, history: sl.History) -> list[dict[str, Any]]:
    """What the network said, and since after which step."""
    if history.says is None:
        return []
    said = history.says[0].tolist()
    changes = [step for step, now in enumerate(said) if step == 0 or said[step - 1] != now]
    return [{"since": step, "said": said[step], "name": _name(query, said[step])} for step in changes]


def _name(query: Query, number: Any) -> str | None:
    return None if number is None else query.output_name(int(number))
