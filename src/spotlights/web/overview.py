"""What an explorer is about, and what goes on in it: the first things that the page asks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import spotlights as sl
from spotlights.figures import palette
from spotlights.web.explorer import Explorer
from spotlights.web.measures import KINDS, Kind


def overview(explorer: Explorer) -> dict[str, Any]:
    """The run: its layers, its groups, what can be asked."""
    opened, subject = explorer.opened, explorer.subject
    memory, inputs, drawing = opened.memory, subject.inputs, subject.drawing
    known, masks = memory.info.as_dict(), opened.masks
    examples = "example" in memory.columns
    return {
        "title": subject.title,
        "opened": opened.number,
        "status": known["status"],
        "steps": memory.steps,
        "slots": len(memory),
        "optimizer": known["optimizer"],
        "exact": known["exact"],
        "columns": known["columns"],
        "layers": [
            {"name": name, "in": info.in_features, "out": info.out_features, "slots": info.slots}
            for name, info in memory.layers.items()
        ],
        "measures": [asdict(kind) for kind in _measures(explorer)],
        "groups": _groups(explorer),
        "inputs": len(inputs),
        "labelled": inputs.labels is not None,
        "sources": sorted(set(inputs.sources or [])),
        "classes": _classes(explorer),
        "examples": examples,
        "visits": known["folded"] is None,
        "audit": examples and known["folded"] is None and memory._view.reader.manifest.errors,
        "training_queries": subject.example_input is not None and examples,
        "drawing": None if drawing is None else {"height": drawing.height, "width": drawing.width},
        "prompt": subject.tokenizer is not None,
        "edges": [] if masks is None or masks.groups is None else masks.groups.edges,
        "no_masks": opened.no_masks,
        "ink": drawing is not None,
        "colours": {
            "for": palette.FOR,
            "against": palette.AGAINST,
            "ink": palette.INK,
            "quiet": palette.QUIET,
            "faint": palette.FAINT,
            "caution": palette.CAUTION,
            "classes": palette.CLASSES,
        },
        "version": sl.__version__,
    }


def status(explorer: Explorer) -> dict[str, Any]:
    """What is still going on: the recording, the preparation of masks, the verdict."""
    opened = explorer.opened
    unfinished = _is_recording(opened.memory)
    now = explorer.subject.reopen() if unfinished else opened.memory
    # Of an unfinished memory the network is what the memory adds up to: to compare the two would prove nothing.
    checks = None if unfinished else opened.verification
    return {
        "opened": opened.number,
        "recording": _is_recording(now),
        "steps": opened.memory.steps,
        "steps_now": now.steps,
        "outdated": unfinished and (not _is_recording(now) or now.steps > opened.memory.steps),
        "masks": None if opened.masks is None else 1.0 if opened.masks.ready else opened.masks.progress,
        "verified": None
        if checks is None
        else {
            name: {**{k: v for k, v in asdict(check).items() if not k.endswith("_steps")}, "ok": check.ok}
            for name, check in checks.items()
        },
    }


def _is_recording(memory: sl.Memory) -> bool:
    return memory._view.reader.manifest.status == "recording"


def _classes(explorer: Explorer) -> list[str]:
    subject = explorer.subject
    sources = subject.inputs.sources
    return [] if subject.class_names is None else subject.class_names(None if sources is None else sources[0])


def _groups(explorer: Explorer) -> dict[str, list[dict[str, Any]]]:
    """The values of each column, with their names and the colours that they have in every picture."""
    classes, several = _classes(explorer), len(set(explorer.subject.inputs.sources or [])) > 1
    groups = {}
    for column, values in explorer.opened.groups.items():
        names = [str(value) for value in values]
        if column == "label" and not several:  # of several data sets, a label has several names
            names = [classes[v] if isinstance(v, int) and 0 <= v < len(classes) else str(v) for v in values]
        groups[column] = [
            {"value": value, "name": name, "colour": colour}
            for value, name, colour in zip(values, names, palette.colours(column, values), strict=True)
        ]
    return groups


def _measures(explorer: Explorer) -> list[Kind]:
    """What this memory can answer."""
    memory = explorer.opened.memory
    known, examples = memory.info.as_dict(), "example" in memory.columns
    exact = known["exact"] and explorer.subject.kernel == "dot"
    kinds = [kind for kind in KINDS.values() if (exact or not kind.signed) and (examples or not kind.estimate)]
    return kinds if known["folded"] is None else [KINDS["score"]]
