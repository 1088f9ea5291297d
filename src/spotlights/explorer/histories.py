"""The history of an answer, for the page: computed in the background, as long as somebody asks for it.

Where a memory has no history (a sampled one, or an optimizer that is lazy), the network is rebuilt as of some fifty
steps: the number after these steps, without who made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import spotlights as sl
from spotlights.errors import UnsupportedError
from spotlights.explorer.data import show_example
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.jobs import AbandonedError, BackgroundJob, Preparing
from spotlights.explorer.queries import Query, run, towards
from spotlights.explorer.spotlight import example_rows

POINTS, AREAS, REBUILT = 300, 100, 50
"""Of the curve, of the areas under it, and of a curve that is made of rebuilt networks, over all of training."""


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """The network's outputs as of some steps."""

    why: str
    """Why there is no history."""
    steps: list[int]
    outputs: Float[Tensor, "steps outputs"]


def _swept(
    explorer: Explorer, query: Query, numbers: tuple[int, ...], progress: Callable[[float], None]
) -> sl.History | Rebuilt:
    """One sweep back over all of training."""
    spot = explorer.attend(query)
    try:
        return spot.history({query.target_name(numbers): query.target(spot.output, numbers)}, progress=progress)
    except UnsupportedError as error:
        return _networks_rebuilt(explorer, query, str(error), progress)


def _networks_rebuilt(explorer: Explorer, query: Query, why: str, progress: Callable[[float], None]) -> Rebuilt:
    """The outputs of the network as of some steps, one after the other."""
    opened = explorer.opened
    steps = np.unique(np.linspace(0, opened.memory.steps, REBUILT + 1).round().astype(int)).tolist()
    outputs = []
    for place, step in enumerate(steps):
        progress(place / len(steps))
        with explorer.scanning:
            network = opened.memory.as_of(step).primal(opened.model)
        outputs.append(query.outputs(run(network, query.batch)))
    return Rebuilt(why, steps, torch.stack(outputs))


def find_history(explorer: Explorer, query: Query, wanted: str | None) -> tuple[sl.History | Rebuilt, tuple[int, ...]]:
    """The history of an output, or of the difference of two; raises `Preparing` while it is computed."""
    numbers = query.output_numbers(explorer.attend(query).output, wanted)
    key = "history", query.name, query.position, numbers
    kept = explorer.opened.kept
    if (history := kept.get(key)) is not None:
        return history, numbers
    with explorer.starting:
        jobs = explorer.opened.histories
        job = jobs.get(key)
        if job is None or isinstance(job.problem, AbandonedError):
            if any(other.is_alive() for other in jobs.values()):  # one at a time: a sweep takes all cores
                raise Preparing(0.0)
            jobs.clear()
            job = jobs[key] = BackgroundJob(partial(_swept, explorer, query, numbers), needs_interest=True)
    history = job.result()
    kept.put(key, history, 64 << 20)
    return history, numbers


def described(explorer: Explorer, query: Query, wanted: str | None, per: str | None) -> dict[str, Any]:
    """The history of an output as plain data: the curve, who made it by groups, and when it was right."""
    history, numbers = find_history(explorer, query, wanted)
    column = per if per in explorer.opened.groups else next(iter(explorer.opened.groups), None)
    key = "history of", query.name, query.position, numbers, column
    if isinstance(history, Rebuilt):
        return _rebuilt(explorer, query, history, numbers)
    return explorer.kept(key, lambda: _described(explorer, query, history, numbers, column))


def during(explorer: Explorer, query: Query, wanted: str | None, steps: range, top: int) -> dict[str, Any]:
    """The examples whose visits in some steps added and took most."""
    history, _ = find_history(explorer, query, wanted)
    if isinstance(history, Rebuilt) or "example" not in explorer.opened.memory.columns:
        return {"top": [], "bottom": []}
    part = history.during(steps)
    with explorer.scanning:
        rows = part.top(top), part.bottom(top)
    return {name: example_rows(explorer, ranked) for name, ranked in zip(("top", "bottom"), rows, strict=True)}


def _described(
    explorer: Explorer, query: Query, history: sl.History, numbers: tuple[int, ...], column: str | None
) -> dict[str, Any]:
    curve, steps = history.curve().values[0], explorer.opened.memory.steps
    places = np.unique(np.linspace(0, steps, min(POINTS, steps + 1)).round().astype(int)).tolist()
    panel = history.panel(by=column, bins=AREAS)
    areas = [] if panel.areas is None else panel.areas.tolist()
    said = [] if history.says is None else history.says[0].tolist()
    return {
        **_named(query, numbers),
        "steps": steps,
        "at": places,
        "curve": [float(curve[place]) for place in places],
        "says": _stretches(query, dict(enumerate(said))),
        "note": None,
        "per": column,
        "groups": list(panel.groups or []),
        "edges": [] if panel.edges is None else [float(edge) for edge in panel.edges],
        "areas": areas,
        "exact": history.exact,
        "error": float(history.error[0]),
        "lost": _lost(explorer, query, history),
    }


def _lost(explorer: Explorer, query: Query, history: sl.History) -> list[dict[str, Any]]:
    """When the answer was lost, and the examples that took it."""
    forgetting = history.forgetting()
    rows = []
    for row, lost in zip(forgetting.rows(), forgetting.lost, strict=True):
        takers = [
            {"example": example, "label": label, "value": value, "shown": show_example(explorer, example)}
            for example, label, value in lost.takers
            if isinstance(example, int)
        ]
        rows.append({**row, "says_name": _name(query, row["says"]), "takers": takers})
    return rows


def _rebuilt(explorer: Explorer, query: Query, rebuilt: Rebuilt, numbers: tuple[int, ...]) -> dict[str, Any]:
    """The same answer without who made the number."""
    outputs = rebuilt.outputs
    said = outputs.argmax(dim=1).tolist() if outputs.shape[1] > 1 else []
    nothing = {"per": None, "groups": [], "edges": [], "areas": [], "lost": []}
    return {
        **_named(query, numbers),
        "steps": explorer.opened.memory.steps,
        "at": rebuilt.steps,
        "curve": towards(outputs, numbers).tolist(),
        "says": _stretches(query, dict(zip(rebuilt.steps, said, strict=False))),
        "note": f"Networks rebuilt from the memory as of {len(rebuilt.steps)} steps. {rebuilt.why}",
        "exact": False,
        "error": 0.0,
        **nothing,
    }


def _named(query: Query, numbers: tuple[int, ...]) -> dict[str, Any]:
    target, versus, *_ = (*numbers, None)
    return {"target": target, "versus": versus, "name": query.target_name(numbers)}


def _stretches(query: Query, said: dict[int, int]) -> list[dict[str, Any]]:
    """What the network said, and since after which step."""
    stretches: list[dict[str, Any]] = []
    for step, now in said.items():
        if not stretches or stretches[-1]["said"] != now:
            stretches.append({"since": step, "said": now, "name": _name(query, now)})
    return stretches


def _name(query: Query, number: Any) -> str | None:
    return None if number is None else query.output_name(int(number))
