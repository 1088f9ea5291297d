"""One layer's spotlight for one query: the largest values, the totals, and when in training they arose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spotlights.attention.grouping import column_values
from spotlights.attention.measure import Measure, top_of
from spotlights.attention.questions import AskTop, AskTotals
from spotlights.attention.results import Top, Totals
from spotlights.errors import SettingError, UnknownNameError
from spotlights.web.data import show_example
from spotlights.web.explorer import Explorer
from spotlights.web.measured import Measured, Wanted, measured
from spotlights.web.queries import Query

TIME_BINS = 60


def spotlight(explorer: Explorer, query: Query, wanted: Wanted) -> dict[str, Any]:
    """All that the page shows of one layer; of all of them, for an estimate."""
    opened = explorer.opened
    if wanted.by not in ("slot", "example"):
        raise SettingError(f'by="{wanted.by}": give "slot" or "example".')
    if wanted.per is not None and wanted.per not in opened.groups:
        known = ", ".join(opened.groups) or "none"
        raise UnknownNameError(f'"{wanted.per}" does not divide the slots into few groups. These do: {known}.')
    seen = measured(explorer, query, wanted)
    measure, signed = seen.parts[0], seen.kind.signed
    by_example = seen.kind.estimate or (wanted.by == "example" and "example" in opened.memory.columns)
    per = wanted.per or next(iter(opened.groups), None)
    if by_example:
        *totals, examples = seen.totals(*opened.groups, "example")
        # For and against in one search: the largest values, and the largest of their opposites.
        both = examples
        if signed:
            errors = examples.standard_errors
            both = replace(
                examples,
                values=torch.cat([examples.values, -examples.values]),
                standard_errors=None if errors is None else torch.cat([errors, errors]),
            )
        found = top_of(measure, both, wanted.top, largest=True)
        top = _rows(explorer, found, measure.what)
        bottom = _rows(explorer, found, measure.what, query=1, sign=-1.0) if signed else None
        columns = _sorted_examples(explorer, measure, examples, per, wanted.sorted, signed)
    else:
        totals, largest, smallest, columns = _slots(seen, list(opened.groups), per, wanted)
        examples = None
        top = _rows(explorer, largest, measure.what)
        bottom = None if smallest is None else _rows(explorer, smallest, measure.what)
    summed = examples if examples is not None else totals[0] if totals else seen.totals("step", bins=1)[0]
    return {
        "layer": seen.layer,
        "measure": wanted.measure,
        "signed": signed,
        "target": seen.target,
        "by": "example" if by_example else "slot",
        "per": per,
        "steps": wanted.steps,
        "exact": seen.exact,
        "caution": seen.caution,
        "note": seen.note,
        "rows": seen.rows,
        "initial": seen.initial,
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
    seen = measured(explorer, query, wanted)
    bins = min(TIME_BINS, max(1, explorer.opened.memory.steps))
    totals = seen.totals("step", bins=bins)[0]
    return {
        "layer": seen.layer,
        "measure": wanted.measure,
        "target": seen.target,
        "exact": seen.exact,
        "caution": seen.caution,
        "steps": explorer.opened.memory.steps,
        "starts": [float(start) for start in totals.groups if isinstance(start, int | float)],
        "totals": [float(value) for value in totals.values[0][: len(totals.groups)]],
    }


def _slots(
    seen: Measured, groups: list[str], per: str | None, wanted: Wanted
) -> tuple[list[Totals], Top, Top | None, dict[str, Any]]:
    """Every visit on its own, all in one scan."""
    measure, signed = seen.parts[0], seen.kind.signed
    half = max(1, wanted.sorted // 2)
    questions: list[Any] = [AskTotals(column) for column in groups]
    questions += [AskTop(wanted.top), AskTop(half if signed else wanted.sorted, per)]
    questions += [AskTop(wanted.top, None, False), AskTop(half, per, False)] if signed else []
    answers = measure.ask(*questions)
    totals, found = answers[: len(groups)], answers[len(groups) :]
    bottom = found[2] if signed else None
    return totals, found[0], bottom, _sorted_slots(measure, found[1], found[3] if signed else None)


def _rows(explorer: Explorer, top: Top, what: str, *, query: int = 0, sign: float = 1.0) -> list[dict[str, Any]]:
    rows = []
    for row in top.rows(query):
        row["value"] = sign * row.pop(what)
        row["shown"] = show_example(explorer, row.get("example"))
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


def _sorted_examples(
    explorer: Explorer, measure: Measure, totals: Totals, per: str | None, count: int, signed: bool
) -> dict[str, Any]:
    """The same for examples: each has the group of its first slot."""
    key = "groups of examples", measure.layer.name, per
    known = explorer.kept(key, lambda: _groups_of_examples(measure, totals, per), 24 * len(totals.groups))
    seen = totals.counts.nonzero().flatten()
    values, first = totals.values[0][seen], measure.layer.first_slots("example")[seen]
    examples, codes, groups = known["examples"][seen], known["codes"][seen], known["groups"]
    # numpy sorts in this thread; torch would call for others, and wait for them on a busy machine.
    by_group = torch.from_numpy(np.lexsort((-values.numpy(), codes.numpy())))
    chosen = []
    for order in by_group.split(torch.bincount(codes, minlength=len(groups)).tolist()):
        if len(order) > count:
            half = count // 2
            order = torch.cat([order[:half], order[-half:]]) if signed else order[:count]
        chosen.append((values[order], first[order], examples[order]))
    return _sorted(groups, chosen)


def _groups_of_examples(measure: Measure, totals: Totals, per: str | None) -> dict[str, Any]:
    """Of all examples the id and the group, which do not depend on the query."""
    examples = torch.tensor([int(example or 0) for example in totals.groups], dtype=torch.int64)
    if per is None:
        return {"examples": examples, "codes": torch.zeros_like(examples), "groups": [None]}
    entry = measure.view.reader.manifest.columns[per]
    found = measure.layer.column_at(per, measure.layer.first_slots("example"))
    distinct, codes = found.unique(return_inverse=True)
    return {"examples": examples, "codes": codes, "groups": column_values(distinct, entry.kind, entry.strings)}


def _sorted(groups: list[Any], chosen: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    kept = [(values, slots, examples, slots >= 0) for values, slots, examples in chosen]
    return {
        "groups": groups,
        "values": [[float(f"{v:.5g}") for v in values[here].tolist()] for values, _, _, here in kept],
        "slots": [slots[here].tolist() for _, slots, _, here in kept],
        "examples": [examples[here].tolist() for _, _, examples, here in kept],
    }
