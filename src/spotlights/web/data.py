"""The data as the page shows them: test inputs with what the network says, training examples with their visits."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from spotlights.attention.grouping import column_values
from spotlights.errors import UnknownNameError
from spotlights.memory.blocks import in_blocks
from spotlights.web.explorer import Explorer
from spotlights.web.views import as_json, pixels, png

BATCH = 512


# -- test inputs ------------------------------------------------------------------------------


def predictions(explorer: Explorer) -> tuple[Int64[Tensor, "inputs"], Float[Tensor, "inputs"]] | None:
    """What the network says to every test input, and how sure it is; None if it is no classifier."""
    opened = explorer.opened
    found = opened.answers.get("predictions")
    if found is None:
        with explorer.scanning:
            found = _predict(opened.model, explorer.subject.inputs.tensors)
        opened.answers.put("predictions", found, 0 if found is None else found[0].nbytes * 2)
    return found


@torch.no_grad()
def _predict(model: nn.Module, tensors: Tensor) -> tuple[Tensor, Tensor] | None:
    said, share = [], []
    for some in (tensors[:1], *tensors[1:].split(BATCH)):  # one alone tells whether it is a classifier
        output = model(some)
        if not isinstance(output, Tensor) or output.ndim != 2 or len(output) != len(some):
            return None
        chances = output.double().softmax(dim=1).max(dim=1)
        said.append(chances.indices.cpu())
        share.append(chances.values.cpu())
    return torch.cat(said), torch.cat(share)


def list_inputs(
    explorer: Explorer,
    *,
    only: str,
    label: int | None,
    source: str | None,
    order: str,
    seed: int,
    first: int,
    count: int,
) -> dict[str, Any]:
    """Test inputs with what the network says to them."""
    inputs, predicted = explorer.subject.inputs, predictions(explorer)
    places = torch.arange(len(inputs))
    labels = None if inputs.labels is None else torch.tensor(inputs.labels)
    if predicted is not None and labels is not None and only != "all":
        right = predicted[0] == labels
        places = places[~right if only == "wrong" else right]
    if label is not None and labels is not None:
        places = places[labels[places] == label]
    if source is not None and inputs.sources is not None:
        places = torch.tensor([p for p in places.tolist() if inputs.sources[p] == source], dtype=torch.int64)
    if order == "random":
        places = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))]
    elif order == "unsure" and predicted is not None:
        places = places[predicted[1][places].argsort(stable=True)]
    rows = [input_row(explorer, place) for place in places[first : first + count].tolist()]
    return {"matching": len(places), "first": first, "inputs": rows}


def input_row(explorer: Explorer, place: int) -> dict[str, Any]:
    """One test input, by its place: how it looks, and what the network says to it."""
    inputs, predicted = explorer.subject.inputs, predictions(explorer)
    shown = as_json(inputs.show(place))
    if shown["kind"] == "image":
        shown["image"] = f"api/inputs/{inputs.ids[place]}.png"
    return {
        "id": inputs.ids[place],
        "label": None if inputs.labels is None else inputs.labels[place],
        "source": None if inputs.sources is None else inputs.sources[place],
        "said": None if predicted is None else int(predicted[0][place]),
        "share": None if predicted is None else float(predicted[1][place]),
        "shown": shown,
    }


def input_png(explorer: Explorer, example: int) -> bytes:
    return png(pixels(explorer.subject.inputs.show(explorer.subject.inputs.place(example))))


# -- training examples ------------------------------------------------------------------------


def example_png(explorer: Explorer, example: int) -> bytes:
    if explorer.subject.show_example is None:
        raise UnknownNameError("Training examples have no pictures here.")
    return png(pixels(explorer.subject.show_example(example)))


def show_example(explorer: Explorer, example: int | None) -> dict[str, Any] | None:
    """How a training example looks; None where nobody has said."""
    if explorer.subject.show_example is None or example is None:
        return None
    shown = as_json(explorer.subject.show_example(example))
    if shown["kind"] == "image":
        shown["image"] = f"api/examples/{example}.png"
    return shown


def example_facts(explorer: Explorer, example: int) -> dict[str, Any]:
    """A training example: how it looks, what is known of it, and when it was visited."""
    memory = explorer.opened.memory
    if "example" not in memory.columns:
        raise UnknownNameError("This memory knows no examples: it was recorded without recorder.batch(example=…).")
    layer = next(iter(memory._view.reader.layers.values()))
    selection = memory.where(example=example)._view.selection
    slots = torch.cat([torch.empty(0, dtype=torch.int64), *(b.slots for b in in_blocks(layer, selection, 1 << 16))])
    if not len(slots):
        raise UnknownNameError(f"No slot has example={example}.")
    entries = memory._view.reader.manifest.columns
    columns = {
        name: column_values(layer.column_at(name, slots[:1]), entry.kind, entry.strings)[0]
        for name, entry in entries.items()
        if name not in ("step", "example", "position")
    }
    steps = [] if layer.folded else layer.column_at("step", slots).unique().tolist()
    return {"example": example, "columns": columns, "steps": steps, "shown": show_example(explorer, example)}
