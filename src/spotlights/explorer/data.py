"""What the page shows besides spotlights: the run, its test inputs, its training examples, and accuracy under masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

import spotlights as sl
from spotlights.errors import SettingError, UnsupportedError
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.queries import KINDS, Kind, numbers_of, read_query, run
from spotlights.explorer.views import as_json
from spotlights.figures import palette

if TYPE_CHECKING:
    from spotlights.subject import Subject

BATCH = 512
SHOWN_INPUTS = 6
EDGES = 30
LEAST_CHANGE = 0.01
"""A smaller change of the right answer's share is not worth a look."""


# -- the run ----------------------------------------------------------------------------------


def overview(explorer: Explorer) -> dict[str, Any]:
    """The run: its layers, its groups, what can be asked."""
    opened, subject = explorer.opened, explorer.subject
    memory, inputs, drawing = opened.memory, subject.inputs, subject.drawing
    known, masks = memory.info.as_dict(), opened.masks
    examples = "example" in memory.columns
    return {
        "title": subject.title,
        "steps": memory.steps,
        "slots": len(memory),
        "optimizer": known["optimizer"],
        "observed": memory.observed,
        "layers": [
            {"name": name, "in": info.in_features, "out": info.out_features, "slots": info.slots}
            for name, info in opened.layers.items()
        ],
        "measures": [asdict(kind) for kind in _measures(explorer)],
        "groups": _groups(explorer),
        "inputs": len(inputs),
        "labelled": inputs.labels is not None,
        "sources": sorted(set(inputs.sources or [])),
        "classes": subject.class_names((inputs.sources or [None])[0]),
        "examples": examples,
        "visits": not memory.folded,
        "times": not memory.folded and not memory.observed,
        "audit": examples and not memory.folded and memory.has_errors,
        "history": bool(known["contributions"]),
        "map": examples,
        "other": explorer.other is not None,
        "training_queries": subject.example_input is not None and examples,
        "drawing": None if drawing is None else {"height": drawing.height, "width": drawing.width},
        "prompt": subject.tokenizer is not None,
        "texts": examples and (subject.tokenizer is not None or subject.text is not None),
        "decisions": [] if subject.decisions is None else list(subject.decisions.rows),
        "edges": [] if masks is None else masks.edges or _edges(memory.steps),
        "no_masks": opened.no_masks,
        "version": sl.__version__,
    }


def _edges(steps: int) -> list[int]:
    """Where stretches of steps may begin and end if the masks prefer none."""
    return sorted({round(steps * edge / EDGES) for edge in range(EDGES + 1)})


def status(explorer: Explorer) -> dict[str, Any]:
    """What is still going on: the recording, the preparation of masks, the verdict."""
    opened = explorer.opened
    unfinished = opened.memory.status == "recording"
    now = explorer.subject.open() if unfinished else opened.memory
    recording = now.status == "recording"
    # Of an unfinished memory the network is what the memory adds up to: to compare the two would prove nothing.
    checks = None if unfinished else opened.verification
    return {
        "recording": recording,
        "steps": opened.memory.steps,
        "steps_now": now.steps,
        "outdated": unfinished and (not recording or now.steps > opened.memory.steps),
        "masks": None if opened.masks is None else 1.0 if opened.masks.ready else opened.masks.progress,
        "verified": None
        if checks is None
        else {
            name: {**{k: v for k, v in asdict(check).items() if not k.endswith("_steps")}, "ok": check.ok}
            for name, check in checks.items()
        },
    }


def _groups(explorer: Explorer) -> dict[str, list[dict[str, Any]]]:
    """The values of each column, with their names and the colours that they have in every picture."""
    sources = explorer.inputs.sources or [None]
    one_source = len(set(sources)) == 1  # of several data sets, a label has several names
    groups = {}
    for column, values in explorer.opened.groups.items():
        named = column == "label" and one_source
        names = [_label_name(explorer, value, sources[0]) if named else str(value) for value in values]
        groups[column] = [
            {"value": value, "name": name, "colour": colour}
            for value, name, colour in zip(values, names, palette.colours(values), strict=True)
        ]
    return groups


def _label_name(explorer: Explorer, value: Any, source: str | None) -> str:
    """A class by its name; of a language model, the token itself."""
    subject = explorer.subject
    if subject.tokenizer is not None and isinstance(value, int) and value >= 0 and not subject.class_names(source):
        return subject.tokenizer.decode([value])
    return subject.class_name(value, source)


def _measures(explorer: Explorer) -> list[Kind]:
    """What this memory can answer."""
    memory = explorer.opened.memory
    examples = "example" in memory.columns
    exact = explorer.subject.kernel == "dot" and (memory.info.as_dict()["contributions"] or _estimates(explorer))
    kinds = [
        kind
        for kind in KINDS.values()
        if (exact or not kind.signed or (kind.estimate and memory.observed)) and (examples or not kind.estimate)
    ]
    return [KINDS["score"]] if memory.folded else kinds


def _estimates(explorer: Explorer) -> bool:
    """Whether a sample of the slots is enough to estimate contributions, which depends on the optimizer."""
    if not explorer.opened.memory.sampled:
        return False
    query = read_query(explorer.subject, f"test:{explorer.inputs.ids[0]}")
    spot = explorer.attend(query)
    try:
        spot[explorer.answering_layer(query)].contributions(query.target(spot.output, (0,)))
    except UnsupportedError:
        return False
    return True


# -- test inputs ------------------------------------------------------------------------------


def chances(subject: Subject, network: Callable[[Any], Any]) -> Float[Tensor, "inputs outputs"]:
    """How likely a network finds each class, for every test input."""
    batches = subject.inputs.batches(BATCH)
    outputs = torch.cat([numbers_of(subject, network(batch)) for batch in batches])
    return outputs.double().softmax(dim=1).cpu()


def predictions(explorer: Explorer) -> tuple[Int64[Tensor, "inputs"], Float[Tensor, "inputs"]] | None:
    """The network's answer to every test input, and how sure it is; None if it is not a classifier."""
    return explorer.kept("predictions", lambda: (_predictions(explorer),), 16 * len(explorer.inputs))[0]


def _predictions(explorer: Explorer) -> tuple[Tensor, Tensor] | None:
    try:
        likely = chances(explorer.subject, partial(run, explorer.opened.model))
    except SettingError:
        return None
    if likely.shape != (len(explorer.inputs), likely.shape[1]) or likely.shape[1] < 2:
        return None
    shares, said = likely.max(dim=1)
    return said, shares


def input_row(explorer: Explorer, place: int) -> dict[str, Any]:
    """One test input, by its place: how it looks, and what the network says to it."""
    inputs, predicted = explorer.inputs, predictions(explorer)
    return {
        "id": inputs.ids[place],
        "label": None if inputs.labels is None else inputs.labels[place],
        "source": None if inputs.sources is None else inputs.sources[place],
        "said": None if predicted is None else int(predicted[0][place]),
        "share": None if predicted is None else float(predicted[1][place]),
        "shown": as_json(inputs.show(place), f"api/inputs/{inputs.ids[place]}.png"),
    }


def show_example(explorer: Explorer, example: int | None) -> dict[str, Any] | None:
    """How a training example looks; None where nobody has said."""
    show = explorer.subject.show_example
    return None if show is None or example is None else as_json(show(example), f"api/examples/{example}.png")


# -- masks ------------------------------------------------------------------------------------


def accuracy(explorer: Explorer, mask: sl.Mask) -> dict[str, Any]:
    """The share of test inputs that are right, with and without what the mask leaves out, and who changes most."""
    masks, inputs = explorer.masks(), explorer.inputs
    if predictions(explorer) is None or inputs.labels is None:
        raise UnsupportedError("The test inputs have no labels: there is no accuracy.")
    labels = torch.tensor(inputs.labels)

    def answers(of: sl.Mask) -> dict[str, Any]:
        likely = chances(explorer.subject, masks.network(of))
        return {"said": likely.argmax(dim=1), "share": likely.gather(1, labels[:, None])[:, 0]}

    before = explorer.kept(("answers", sl.Mask()), lambda: answers(sl.Mask()), labels.nbytes * 2)
    after = answers(mask) if mask else before
    change = after["share"] - before["share"]
    return {
        "with": _shares(before["said"], labels),
        "without": _shares(after["said"], labels),
        "worse": _changed(explorer, -change, before, after),
        "better": _changed(explorer, change, before, after),
    }


def _shares(said: Tensor, labels: Tensor) -> dict[str, Any]:
    right = (said == labels).double()
    by_label = {int(label): float(right[labels == label].mean()) for label in labels.unique()}
    return {"all": float(right.mean()), "by_label": by_label}


def _changed(explorer: Explorer, by: Tensor, before: dict[str, Tensor], after: dict[str, Tensor]) -> list[Any]:
    """The inputs that change most in one direction."""
    places = by.topk(min(SHOWN_INPUTS, len(by))).indices
    return [
        {
            **input_row(explorer, place),
            "now": int(after["said"][place]),
            "right": float(before["share"][place]),
            "right_now": float(after["share"][place]),
        }
        for place in places[by[places] >= LEAST_CHANGE].tolist()
    ]
