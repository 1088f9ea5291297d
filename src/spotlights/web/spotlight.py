"""One layer's spotlight for one query: the largest values, the totals, and when in training they arose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spotlights.attention.attention import Contributions
from spotlights.attention.grouping import column_values
from spotlights.attention.measure import Measure, View, top_of
from spotlights.attention.questions import AskTop, AskTotals
from spotlights.attention.results import Top, Totals
from spotlights.errors import SettingError, UnknownNameError
from spotlights.web.explorer import Explorer
from spotlights.web.measures import KINDS, Absolute, Held, hold, measure_of
from spotlights.web.queries import Query, outputs_of, row_of, target_of

TIME_BINS = 60


@dataclass(frozen=True)
class Wanted:
    """What to look at."""

    layer: str
    measure: str = "contribution"
    target: int | None = None
    """The output that contributions are about; by default what the network says."""
    by: str = "example"
    """"slot", or "example" to add up its visits."""
    per: str | None = None
    """The column whose values are the groups of the sorted values."""
    steps: tuple[int, int] | None = None
    """Only these steps, the end not included."""
    top: int = 24
    sorted: int = 500
    """How many values of each group are shown in descending order."""


def measured(explorer: Explorer, query: Query, wanted: Wanted) -> tuple[Measure, Contributions | None, int | None]:
    """The values of every slot, kept; what they contribute to, and which output that is."""
    opened = explorer.opened
    if wanted.measure not in KINDS:
        raise SettingError(f'No measure "{wanted.measure}". There are: {", ".join(KINDS)}.')
    kind = KINDS[wanted.measure]
    spot = explorer.attend(query)
    attention = spot[wanted.layer]
    attention = attention.at(row_of(query, len(attention.queries)))
    target = None
    if kind.signed:
        outputs = outputs_of(spot.output, query)
        target = int(outputs.argmax()) if wanted.target is None else wanted.target
        if not 0 <= target < len(outputs):
            raise SettingError(f"target={target}: the network has outputs 0 to {len(outputs) - 1}.")
    measure = measure_of(kind, attention, None if target is None else target_of(query, spot.output, target))
    view = opened.memory._view
    if wanted.steps is not None:
        view = opened.memory.where(step=range(*wanted.steps))._view
    key = "values", query.name, query.position, wanted.layer, kind.signed, target
    values = opened.values.get(key)
    if values is None:
        found, values = hold(measure, view)
        if values is not None:
            opened.values.put(key, values, values.nbytes)
    else:
        found = Held(measure, values, view)
    if values is None and wanted.steps is not None:
        found = _narrowed(found, view)
    if wanted.measure == "absolute":
        found = Absolute(found)
    return found, measure if isinstance(measure, Contributions) else None, target


def _narrowed(measure: Measure, view: View) -> Measure:
    measure.view = view  # too many slots to keep their values: they are computed again, in this stretch only
    return measure


def spotlight(explorer: Explorer, query: Query, wanted: Wanted) -> dict[str, Any]:
    """All that the page shows of one layer."""
    opened = explorer.opened
    if wanted.by not in ("slot", "example"):
        raise SettingError(f'by="{wanted.by}": give "slot" or "example".')
    if wanted.per is not None and wanted.per not in opened.groups:
        known = ", ".join(opened.groups) or "none"
        raise UnknownNameError(f'"{wanted.per}" does not divide the slots into few groups. These do: {known}.')
    by_example = wanted.by == "example" and "example" in opened.memory.columns
    measure, contributions, target = measured(explorer, query, wanted)
    signed = contributions is not None
    per = wanted.per or next(iter(opened.groups), None)
    half = max(1, wanted.sorted // 2)
    questions: list[Any] = [AskTotals(column) for column in opened.groups]
    if by_example:
        questions.append(AskTotals("example"))
    else:
        questions += [AskTop(wanted.top), AskTop(half if signed else wanted.sorted, per)]
        questions += [AskTop(wanted.top, None, False), AskTop(half, per, False)] if signed else []
    answers = measure.ask(*questions)
    totals: list[Totals] = answers[: len(opened.groups)]
    found = answers[len(opened.groups) :]
    if by_example:
        top = top_of(measure, found[0], wanted.top, largest=True)
        bottom = top_of(measure, found[0], wanted.top, largest=False) if signed else None
        columns = _sorted_examples(measure, found[0], per, wanted.sorted, signed)
    else:
        top, bottom = found[0], found[2] if signed else None
        columns = _sorted_slots(measure, found[1], found[3] if signed else None)
    return {
        "layer": wanted.layer,
        "measure": wanted.measure,
        "signed": signed,
        "target": target,
        "by": "example" if by_example else "slot",
        "per": per,
        "steps": wanted.steps,
        "exact": contributions is None or contributions.exact,
        "note": measure.note,
        "initial": None if contributions is None else float(contributions.initial[0]),
        "total": float(totals[0].values[0].sum()) if totals else None,
        "slots": int(totals[0].counts.sum()) if totals else len(opened.memory),
        "top": _rows(explorer, top, measure.what),
        "bottom": None if bottom is None else _rows(explorer, bottom, measure.what),
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
    """The totals of stretches of training, for one layer."""
    measure, contributions, target = measured(explorer, query, wanted)
    bins = min(TIME_BINS, max(1, explorer.opened.memory.steps))
    totals: Totals = measure.ask(AskTotals("step", bins=bins))[0]
    return {
        "layer": wanted.layer,
        "measure": wanted.measure,
        "target": target,
        "exact": contributions is None or contributions.exact,
        "steps": explorer.opened.memory.steps,
        "starts": [float(start) for start in totals.groups if isinstance(start, int | float)],
        "totals": [float(value) for value in totals.values[0][: len(totals.groups)]],
    }


def _rows(explorer: Explorer, top: Top, what: str) -> list[dict[str, Any]]:
    rows = []
    for row in top.rows(0):
        row["value"] = row.pop(what)
        row["shown"] = explorer.show_example(row.get("example"))
        rows.append(row)
    return rows


def _sorted_slots(measure: Measure, top: Top, bottom: Top | None) -> dict[str, Any]:
    values, slots = top.values[0], top.slots[0]
    if bottom is not None:
        values = torch.cat([values, bottom.values[0].flip(1)], dim=1)
        slots = torch.cat([slots, bottom.slots[0].flip(1)], dim=1)
    known = "example" in measure.view.reader.manifest.columns
    examples = measure.layer.column_at("example", slots.clamp_min(0)) if known else slots
    return _sorted(top.groups, [(values[g], slots[g], examples[g]) for g in range(len(values))])


def _sorted_examples(measure: Measure, totals: Totals, per: str | None, count: int, signed: bool) -> dict[str, Any]:
    """The same for examples: each has the group of its first slot."""
    first = measure.layer.first_slots("example")
    seen = totals.counts.nonzero().flatten()
    values, first = totals.values[0][seen], first[seen]
    examples = torch.tensor([int(totals.groups[place] or 0) for place in seen.tolist()], dtype=torch.int64)
    if per is None:
        codes, groups = torch.zeros(len(seen), dtype=torch.int64), [None]
    else:
        grouping, entry = measure.grouping(per), measure.view.reader.manifest.columns[per]
        distinct, codes = measure.layer.column_at(per, first).unique(return_inverse=True)
        groups = column_values(distinct, entry.kind, entry.strings)
        assert len(groups) <= len(grouping)
    chosen = []
    for group in range(len(groups)):
        members = (codes == group).nonzero().flatten()
        order = members[values[members].argsort(descending=True, stable=True)]
        if len(order) > count:
            half = count // 2
            order = torch.cat([order[:half], order[-half:]]) if signed else order[:count]
        chosen.append((values[order], first[order], examples[order]))
    return _sorted(groups, chosen)


def _sorted(groups: list[Any], chosen: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    kept = [(values, slots, examples, slots >= 0) for values, slots, examples in chosen]
    return {
        "groups": groups,
        "values": [[float(f"{v:.5g}") for v in values[here].tolist()] for values, _, _, here in kept],
        "slots": [slots[here].tolist() for _, slots, _, here in kept],
        "examples": [examples[here].tolist() for _, _, examples, here in kept],
    }
