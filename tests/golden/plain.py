"""Answers as plain data, and the questions that several subjects ask; see `answers.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import spotlights as sl

FIRST = 4
"""So many numbers of a large tensor are stored as they are; of all of them, some sums."""
SHOWN_QUERIES = 2
"""Top lists are stored for so many queries."""

Plain = Any


def rounded(value: float) -> float:
    return float(f"{float(value):.8g}")


def numbers(found: Any) -> Plain:
    """The first numbers of a tensor, and sums that change when any number or the order changes."""
    tensor = torch.as_tensor(found).detach().double()
    flat = tensor.flatten()
    plain: dict[str, Any] = {"shape": list(tensor.shape), "first": [rounded(x) for x in flat[:FIRST].tolist()]}
    if len(flat) > FIRST:
        place = torch.arange(1, len(flat) + 1, dtype=torch.float64) * 0.6180339887498949 % 1
        plain["sum"] = rounded(flat.sum())
        plain["weighted"] = rounded((flat * place).sum())
        plain["squares"] = rounded(flat.square().sum())
    plain["largest"] = rounded(flat.abs().max()) if len(flat) else 0.0
    return plain


def ranked(rows: Sequence[dict[str, Any]], what: str) -> Plain:
    """A list in the order of its values: these, their standard errors if they have any, and which slot each row is."""
    plain: dict[str, Any] = {"values": [rounded(row[what]) for row in rows]}
    if rows and "±" in rows[0]:
        plain["errors"] = [rounded(row["±"]) for row in rows]
    names = [name for name in (rows[0] if rows else ()) if name not in (what, "±")]
    return plain | {"is": {name: [row[name] for row in rows] for name in names}}


def top(found: Any) -> Plain:
    """The lists of the first queries; with `per`, a list begins anew at each rank 1."""
    shown = range(min(len(found), SHOWN_QUERIES))
    return {"top": [ranked(list(found.rows(query)), found.what) for query in shown]}


def totals(found: Any) -> Plain:
    plain = {"groups": found.groups, "counts": found.counts.tolist(), "values": numbers(found.values)}
    if found.standard_errors is not None:
        plain["standard errors"] = numbers(found.standard_errors)
    return plain


def parameters(found: dict[str, Tensor]) -> Plain:
    return {name: numbers(value) for name, value in found.items()}


def passages(found: Any) -> Plain:
    """Each passage with all of its hits."""
    spans = [
        {"score": each.score, "start": each.start, "stop": each.stop, "text": "".join(each.text)} for each in found
    ]
    hits: dict[int, list[dict[str, Any]]] = {}
    for hit in (hit for each in found for hit in each.hits):
        steps = {"first_step": hit.first_step, "last_step": hit.last_step}
        row = {"score": hit.score, "position": hit.position, "visits": hit.visits, **steps}
        hits.setdefault(hit.token, []).append(row)
    by_score = {token: sorted(rows, key=lambda row: -row["score"]) for token, rows in sorted(hits.items())}
    return {
        "passages": {"top": [ranked(spans, "score")]},
        "hits": {str(token): {"top": [ranked(rows, "score")]} for token, rows in by_score.items()},
    }


def suspects(found: Any) -> Plain:
    return {"layer": found.layer, "top": [ranked(list(found.rows()), "suspicion")]}


def verified(memory: sl.Memory, model: nn.Module | None = None, *, within: float = 1e-11) -> Plain:
    """The errors themselves are rounding: only whether they are small is an answer."""
    found = memory.verify(model)
    return {
        "ok": found.ok,
        "damaged": found.damaged,
        "layers": {
            name: {
                "ok": check.ok,
                "small": check.relative_error < within,
                "unexplained": check.unexplained_steps,
                "moved": check.moved_steps,
            }
            for name, check in found.items()
        },
    }


def about(memory: sl.Memory) -> Plain:
    """What a memory says that it holds."""
    known = ("in_features", "out_features", "bias", "slots", "distinct_keys", "trained", "unexplained_steps")
    return {
        "steps": memory.steps,
        "slots": len(memory),
        "columns": sorted(memory.columns),
        "layers": {name: {each: getattr(info, each) for each in known} for name, info in memory.layers.items()},
    }


# -- questions that several subjects ask -------------------------------------------------------


def scores_of(spot: sl.Attention) -> Plain:
    """The questions about similarity."""
    return {
        "scores": numbers(spot.scores()),
        "top": top(spot.top(4)),
        "by example": top(spot.top(4, by="example")),
        "per label": top(spot.at(1).top(2, per="label")),
        "totals by label": totals(spot.totals("label")),
        "totals by example": numbers(spot.totals("example").values),
        "sizes by label": totals(spot.totals("label", absolute=True)),
        "totals over steps": totals(spot.totals("step", bins=4)),
    }


def contributions_of(spot: Any, target: Any) -> Plain:
    """The questions about what an answer is made of."""
    found = spot.contributions(target, rows=True) if hasattr(spot, "contributions") else spot
    return {
        "exact": found.adds_up,
        "initial": numbers(found.initial),
        "total": numbers(found.total()),
        "contributions": numbers(found.numpy()),
        "top": top(found.top(4)),
        "bottom": top(found.bottom(4)),
        "by example": top(found.top(4, by="example")),
        "bottom by example": top(found.bottom(4, by="example")),
        "totals by label": totals(found.totals("label")),
        "sizes by label": totals(found.totals("label", absolute=True)),
        "totals over steps": totals(found.totals("step", bins=4)),
    }


def influence_of(found: Any, *, label: str = "label") -> Plain:
    return {
        "total": numbers(found.total()),
        "by example": numbers(found.numpy()),
        "totals by label": totals(found.totals(label)),
        "totals over steps": totals(found.totals("step", bins=3)),
        "top": top(found.top(4)),
        "bottom": top(found.bottom(4)),
        "summed": top(found.summed().top(4)),
        "summed by label": totals(found.summed().totals(label)),
    }


def weights_of(memory: sl.Memory) -> Plain:
    return {name: parameters(memory.parameters(name)) for name in memory.layers}


def trained(memory: sl.Memory, model: nn.Module, inputs: Any, target: Any) -> Plain:
    """What the network is made of, and its answers, layer by layer."""
    spot = memory.attend(model, inputs)
    return {
        "about": about(memory),
        "verified": verified(memory, model),
        "weights": weights_of(memory),
        "output": numbers(spot.output),
        "contributions": {name: contributions_of(each, target) for name, each in spot.items()},
    }
