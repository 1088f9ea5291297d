"""One layer's spotlight for one query: the largest values, the totals, and when in training they arose; and the audit.

A query's values, one for each slot, are computed once and kept. Whatever is then asked (the largest, the totals, some
of the slots) needs no further pass over keys and errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

import spotlights as sl
from spotlights.errors import TooLargeError
from spotlights.explorer.data import show_example
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.queries import KINDS, Kind, Query, measure_of, towards
from spotlights.results import Top, Totals
from spotlights.selections import parse_selections, read_selections, where_any

TIME_BINS = 60
CURVE = 100
"""How many points of a cumulative curve are sent."""


@dataclass(frozen=True)
class Wanted:
    """What to look at."""

    layer: str
    measure: str = "contribution"
    target: str | None = None
    """The output that contributions and influence are about, or two, "7-9"; by default what the network says."""
    by: str = "example"
    """"slot", or "example" to add up its visits."""
    where: str = ""
    """Only these slots: selections as text."""
    top: int = 24


@dataclass(frozen=True, eq=False)
class Values:
    """The values of every slot for one query."""

    kind: Kind
    measure: Any
    """The library's measure."""
    target: tuple[int, ...] | None
    """The output that values are about; of two outputs, their difference."""
    value: float | None
    """That output."""
    rows: int
    """How many rows of the query are added up: the positions at which a convolution sees an image."""
    exact: bool
    initial: float | None
    """What the initial weights make up of the output, where contributions are asked for; and"""
    rounding: float | None
    """what rounding does, which no example taught."""
    caution: str | None
    """In a word or two, what the measure's note explains."""

    def facts(self) -> dict[str, Any]:
        """What every answer says about its values."""
        target, versus, *_ = (*(self.target or ()), None, None)
        facts = {"measure": self.kind.name, "exact": self.exact, "caution": self.caution}
        return {"layer": self.measure.layer, **facts, "target": target, "versus": versus, "value": self.value}

    def totals(self, *columns: str, bins: int | None = None) -> list[Totals]:
        """Values summed over the groups of each column."""
        return self.measure.ask(*(sl.AskTotals(column, bins=bins) for column in columns))


def values_of(explorer: Explorer, query: Query, wanted: Wanted) -> Values:
    """The values of every slot, computed once for each query, layer and target."""
    opened, kind = explorer.opened, KINDS[wanted.measure]
    spot = explorer.attend(query)
    target = query.output_numbers(spot.output, wanted.target) if kind.signed else None
    layer = None if kind.estimate else wanted.layer
    layers = spot.influence_layers()[0] if layer is None else [layer]

    def compute() -> tuple[Any, Any]:
        origin = measure_of(query, spot, kind, layer, target)
        try:
            return origin, origin.keep()
        except TooLargeError:
            return origin, None

    what = "score" if kind.name == "absolute" else kind.name
    key = "values", query.name, query.position, layer, what, target
    origin, kept = explorer.kept(key, compute, lambda values: 0 if values[1] is None else values[1].nbytes)
    view = where_any(opened.memory, parse_selections(wanted.where)) if wanted.where else opened.memory
    if kept is None and wanted.where:
        raise TooLargeError("This memory has too many slots to keep their values, which a choice of slots needs.")
    measure = origin if kept is None else kept.within(view)

    contributions = origin if isinstance(origin, sl.Contributions) else None
    rows = max(len(spot[name].queries) for name in layers)
    rows = rows if query.row(rows) is None else 1
    exact = not kind.estimate and (contributions is None or contributions.exact)
    adds_up = contributions is not None and contributions.adds_up
    kernel, outputs = explorer.subject.kernel, query.outputs(spot.output)
    cautions = {
        "estimate": kind.estimate or opened.memory.sampled or bool(opened.memory.observed),
        "first order": contributions is not None and contributions.first_order,
        "not exact": contributions is not None and not adds_up,
        "approximate": opened.layers[layers[0]].lossy,
        kernel: kernel != "dot",
        "visits added up": opened.memory.folded,
        f"{rows:,} positions added up": rows > 1,
    }
    return Values(
        kind,
        measure.absolute() if kind.name == "absolute" else measure,
        target,
        None if target is None else float(towards(outputs, target)),
        rows,
        exact,
        initial=None if contributions is None else float(contributions.initial[0]),
        rounding=float(contributions.rounding[0]) if contributions is not None and adds_up else None,
        caution=next((words for words, holds in cautions.items() if holds), None),
    )


def spotlight(explorer: Explorer, query: Query, wanted: Wanted) -> dict[str, Any]:
    """All that the page shows of one layer; of all of them, for an estimate."""
    opened = explorer.opened
    seen = values_of(explorer, query, wanted)
    measure, signed, groups = seen.measure, seen.kind.signed, list(opened.groups)
    by_example = seen.kind.estimate or (wanted.by == "example" and "example" in opened.memory.columns)
    examples = bottom = None
    if by_example:
        *totals, examples = seen.totals(*groups, "example")
        top = measure.rank(examples, wanted.top)
        bottom = measure.rank(examples, wanted.top, largest=False) if signed else None
    else:
        questions: list[Any] = [sl.AskTotals(column) for column in groups] + [sl.AskTop(wanted.top)]
        questions += [sl.AskTop(wanted.top, largest=False)] if signed else []
        answers = measure.ask(*questions)
        totals, top = answers[: len(groups)], answers[len(groups)]
        bottom = answers[-1] if signed else None
    summed = examples or (totals[0] if totals else seen.totals("step", bins=1)[0])
    return {
        **seen.facts(),
        "signed": signed,
        "by": "example" if by_example else "slot",
        "where": wanted.where,
        "note": measure.note,
        "rows": seen.rows,
        "initial": seen.initial,
        "rounding": seen.rounding,
        "total": float(summed.values[0].sum()),
        "slots": int(summed.counts.sum()),
        "shares": None if examples is None else shares(examples.values[0][examples.counts > 0]),
        "top": example_rows(explorer, top),
        "bottom": None if bottom is None else example_rows(explorer, bottom),
        "totals": {
            of_group.column: [
                {"value": group, "total": float(of_group.values[0, place]), "slots": int(of_group.counts[place])}
                for place, group in enumerate(of_group.groups)
            ]
            for of_group in totals
        },
    }


def shares(values: Tensor) -> dict[str, Any]:
    """Of how many examples a sum is made: what speaks for and against it, and the cumulative curve.

    The curve adds up the larger side, largest first; `half` examples of that side make half of it.
    """
    pro, con = values[values > 0].double(), values[values < 0].double()
    side = (pro if float(pro.sum()) >= -float(con.sum()) else -con).sort(descending=True).values
    curve = side.cumsum(0)
    whole = float(curve[-1]) if len(curve) else 0.0
    places = np.unique(np.linspace(0, max(0, len(curve) - 1), min(CURVE, len(curve))).round().astype(int)).tolist()
    return {
        "examples": len(values),
        "for": float(pro.sum()),
        "against": float(con.sum()),
        "side": len(side),
        "half": int((curve < whole / 2).sum()) + 1 if len(curve) else 0,
        "curve": [[place + 1, float(curve[place]) / (whole or 1.0)] for place in places],
    }


def over_time(explorer: Explorer, query: Query, wanted: Wanted) -> dict[str, Any]:
    """The totals of stretches of training, for one layer; for all of them together, if it is an estimate."""
    seen = values_of(explorer, query, wanted)
    bins = min(TIME_BINS, max(1, explorer.opened.memory.steps))
    totals = seen.totals("step", bins=bins)[0]
    return {
        **seen.facts(),
        "steps": explorer.opened.memory.steps,
        "starts": [float(start) for start in totals.groups if isinstance(start, int | float)],
        "totals": [float(value) for value in totals.values[0][: len(totals.groups)]],
    }


def example_rows(explorer: Explorer, top: Top) -> list[dict[str, Any]]:
    """The rows of an answer, each with how its example looks."""
    rows = list(top.rows())
    for row in rows:
        row["value"] = row.pop(top.what)
        row["shown"] = show_example(explorer, row.get("example"))
    return rows


# -- the audit --------------------------------------------------------------------------------


def audit(explorer: Explorer, top: int, where: str = "") -> dict[str, Any]:
    """The most suspicious examples (`memory.suspects`), of all or of some slots."""
    memory = explorer.opened.memory
    suspects = where_any(memory, read_selections(where, memory)).suspects(top)
    rows = list(suspects.rows())
    for row in rows:
        label, said = row.get("label"), row.pop("network says")
        row["says"] = said if label is not None else None  # a text has a label for each of its tokens
        for name in ("label", "says"):
            number = row.get(name)
            row[f"{name}_name"] = None if number is None else explorer.subject.class_name(number, row.get("source"))
        row["shown"] = show_example(explorer, row["example"])
    return {"layer": suspects.layer, "note": suspects.note, "suspects": rows}
