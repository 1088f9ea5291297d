"""One layer's spotlight for one query: the largest values, the totals, and when in training they arose; and the audit.

A query's values, one for each slot, are computed once and kept. Whatever is then asked (the largest, the totals, some
of the slots) needs no further pass over keys and errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import spotlights as sl
from spotlights.errors import TooLargeError, UnknownNameError
from spotlights.explorer.data import show_example
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.queries import KINDS, Kind, Query, measure_of
from spotlights.results import Top, Totals
from spotlights.selections import parse_selections, where_any

TIME_BINS = 60
SORTED = 500
"""How many values of each group are shown in descending order."""


@dataclass(frozen=True)
class Wanted:
    """What to look at."""

    layer: str
    measure: str = "contribution"
    target: int | None = None
    """The output that contributions and influence are about; by default what the network says."""
    by: str = "example"
    """"slot", or "example" to add up its visits."""
    per: str | None = None
    """The column whose values are the groups of the sorted values."""
    where: str = ""
    """Only these slots: selections as text."""
    top: int = 24


@dataclass(frozen=True, eq=False)
class Values:
    """The values of every slot for one query."""

    kind: Kind
    measure: Any
    """The library's measure."""
    layers: Sequence[str]
    """The layers whose values are added up."""
    target: int | None
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
        facts = {"measure": self.kind.name, "target": self.target, "exact": self.exact, "caution": self.caution}
        return {"layer": self.measure.layer, **facts}

    def totals(self, *columns: str, bins: int | None = None) -> list[Totals]:
        """Values summed over the groups of each column."""
        return self.measure.ask(*(sl.AskTotals(column, bins=bins) for column in columns))


def values_of(explorer: Explorer, query: Query, wanted: Wanted) -> Values:
    """The values of every slot, computed once for each query, layer and target."""
    opened, kind = explorer.opened, KINDS[wanted.measure]
    spot = explorer.attend(query)
    target = query.output_number(spot.output, wanted.target) if kind.signed else None
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
    kernel = explorer.subject.kernel
    cautions = {
        "estimate": kind.estimate or opened.memory.sampled,
        "first order": contributions is not None and contributions.first_order,
        "not exact": not exact,
        "approximate": opened.layers[layers[0]].lossy,
        kernel: kernel != "dot",
        "visits added up": opened.memory.folded,
        f"{rows:,} positions added up": rows > 1,
    }
    return Values(
        kind,
        measure.absolute() if kind.name == "absolute" else measure,
        layers,
        target,
        rows,
        exact,
        initial=None if contributions is None else float(contributions.initial[0]),
        rounding=None if contributions is None or not exact else float(contributions.rounding[0]),
        caution=next((words for words, holds in cautions.items() if holds), None),
    )


def spotlight(explorer: Explorer, query: Query, wanted: Wanted) -> dict[str, Any]:
    """All that the page shows of one layer; of all of them, for an estimate."""
    opened = explorer.opened
    if wanted.per is not None and wanted.per not in opened.groups:
        known = ", ".join(opened.groups) or "none"
        raise UnknownNameError(f'"{wanted.per}" does not divide the slots into few groups. These do: {known}.')
    seen = values_of(explorer, query, wanted)
    measure, signed = seen.measure, seen.kind.signed
    by_example = seen.kind.estimate or (wanted.by == "example" and "example" in opened.memory.columns)
    per = wanted.per or next(iter(opened.groups), None)
    if by_example:
        *totals, examples = seen.totals(*opened.groups, "example")
        top = _rows(explorer, measure.rank(examples, wanted.top))
        bottom = _rows(explorer, measure.rank(examples, wanted.top, largest=False)) if signed else None
        columns = _sorted_examples(explorer, seen, examples, per)
    else:
        totals, largest, smallest, columns = _slots(explorer, seen, per, wanted)
        examples = None
        top = _rows(explorer, largest)
        bottom = None if smallest is None else _rows(explorer, smallest)
    summed = examples if examples is not None else totals[0] if totals else seen.totals("step", bins=1)[0]
    return {
        **seen.facts(),
        "signed": signed,
        "by": "example" if by_example else "slot",
        "per": per,
        "where": wanted.where,
        "note": measure.note,
        "rows": seen.rows,
        "initial": seen.initial,
        "rounding": seen.rounding,
        "total": float(summed.values[0].sum()),
        "slots": int(summed.counts.sum()),
        "top": top,
        "bottom": bottom,
        "sorted": columns,
        "totals": {
            each.column: [
                {"value": group, "total": float(each.values[0, place]), "slots": int(each.counts[place])}
                for place, group in enumerate(each.groups)
            ]
            for each in totals
        },
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


def _slots(
    explorer: Explorer, seen: Values, per: str | None, wanted: Wanted
) -> tuple[list[Totals], Top, Top | None, dict[str, Any]]:
    """Every visit on its own, all in one pass."""
    signed, groups = seen.kind.signed, list(explorer.opened.groups)
    questions: list[Any] = [sl.AskTotals(column) for column in groups]
    questions += [sl.AskTop(wanted.top), sl.AskTop(SORTED // 2 if signed else SORTED, per)]
    questions += [sl.AskTop(wanted.top, largest=False), sl.AskTop(SORTED // 2, per, largest=False)] if signed else []
    answers = seen.measure.ask(*questions)
    totals, (top, sorted_top, *smallest) = answers[: len(groups)], answers[len(groups) :]
    bottom, sorted_bottom = smallest or (None, None)
    return totals, top, bottom, _sorted_slots(explorer.opened.memory, sorted_top, sorted_bottom)


def _rows(explorer: Explorer, top: Top) -> list[dict[str, Any]]:
    rows = list(top.rows())
    for row in rows:
        row["value"] = row.pop(top.what)
        row["shown"] = None if explorer.show is None else show_example(explorer, row.get("example"))
    return rows


def _sorted_slots(memory: sl.Memory, top: Top, bottom: Top | None) -> dict[str, Any]:
    values, slots = top.values[0], top.slots[0]
    if bottom is not None:
        values = torch.cat([values, bottom.values[0].flip(1)], dim=1)
        slots = torch.cat([slots, bottom.slots[0].flip(1)], dim=1)
    examples = slots
    if "example" in memory.columns:
        known = memory.column("example", slots.clamp_min(0).flatten().numpy(), layer=top.layer)
        examples = torch.tensor([example or 0 for example in known], dtype=torch.int64).reshape(slots.shape)
    return _sorted(top.groups, list(zip(values, slots, examples, strict=True)))


def _sorted_examples(explorer: Explorer, seen: Values, totals: Totals, per: str | None) -> dict[str, Any]:
    """The same for examples: each has the group of its first slot."""
    key = "groups of examples", tuple(seen.layers), per
    known = explorer.kept(key, lambda: _groups_of_examples(explorer, seen, totals, per), 32 * len(totals.groups))
    there = totals.counts.nonzero().flatten()
    values, examples, slots, codes = (
        numbers[there] for numbers in (totals.values[0], known["examples"], known["slots"], known["codes"])
    )
    # numpy sorts in this thread; torch would call for others, and wait for them on a busy machine.
    by_group = torch.from_numpy(np.lexsort((-values.numpy(), codes.numpy())))
    columns = []
    for order in by_group.split(torch.bincount(codes, minlength=len(known["groups"])).tolist()):
        if len(order) > SORTED:
            half = SORTED // 2
            order = torch.cat([order[:half], order[-half:]]) if seen.kind.signed else order[:SORTED]
        columns.append((values[order], slots[order], examples[order]))
    return _sorted(known["groups"], columns)


def _groups_of_examples(explorer: Explorer, seen: Values, totals: Totals, per: str | None) -> dict[str, Any]:
    """Of all examples the id, the first slot and the group, which do not depend on the query."""
    memory, layer = explorer.opened.memory, seen.layers[0]
    examples = torch.tensor([example or 0 for example in totals.groups], dtype=torch.int64)
    ids, first = memory.distinct("example", layer=layer), memory.first_slots("example", layer=layer)
    slot_of = dict(zip(ids, first.tolist(), strict=True))
    slots = [slot_of.get(example, -1) for example in totals.groups]
    numbers, groups = [0] * len(slots), [None]
    if per is not None:
        values = memory.column(per, [max(slot, 0) for slot in slots], layer=layer)
        present = set(values)
        groups = [value for value in memory.distinct(per, layer=layer) if value in present]
        number_of = {value: number for number, value in enumerate(groups)}
        numbers = [number_of[value] for value in values]
    return {"examples": examples, "slots": torch.tensor(slots), "codes": torch.tensor(numbers), "groups": groups}


def _sorted(groups: list[Any], columns: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    kept = [(values, slots, examples, slots >= 0) for values, slots, examples in columns]
    return {
        "groups": groups,
        "values": [[float(f"{v:.5g}") for v in values[here].tolist()] for values, _, _, here in kept],
        "slots": [slots[here].tolist() for _, slots, _, here in kept],
        "examples": [examples[here].tolist() for _, _, examples, here in kept],
    }


# -- the audit --------------------------------------------------------------------------------


def audit(explorer: Explorer, top: int) -> dict[str, Any]:
    """The most suspicious examples (`memory.suspects`)."""
    suspects = explorer.opened.memory.suspects(top)
    rows = list(suspects.rows())
    for row in rows:
        label, said = row.get("label"), row.pop("network says")
        row["says"] = said if label is not None else None  # a text has a label for each of its tokens
        for name in ("label", "says"):
            number = row.get(name)
            row[f"{name}_name"] = None if number is None else explorer.subject.class_name(number, row.get("source"))
        row["shown"] = show_example(explorer, row["example"])
    return {"layer": suspects.layer, "note": suspects.note, "suspects": rows}
