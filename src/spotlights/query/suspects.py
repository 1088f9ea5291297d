"""Suspects: training examples that look mislabelled, because the network kept disagreeing with them.

The last layer's error is what the network said minus what the label says. An example whose label fits its neighbours is
soon answered correctly, and its error vanishes. A wrong label is taught against all the others, visit after
visit. So the sum over visits of the error's norm ranks the examples, and the class that the error points to is what
the network would have said. Only recorded errors are read, so a run can be audited while it trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import SettingError, UnsupportedError
from spotlights.memory.blocks import Block, OneOf
from spotlights.memory.reader import StepLog
from spotlights.query.columns import Grouping, Visits, grouping
from spotlights.query.engine import View
from spotlights.query.reducers import Reducer
from spotlights.results.suspects import NOTE, Suspects
from spotlights.sparse_rows import dense


@dataclass(eq=False)
class ErrorSumsReducer(Reducer):
    """The sum of the errors of each group's slots, each times one number for its step, and the sum of their norms."""

    adds = ("sums", "sizes", "counts")
    out_features: int
    grouping: Grouping
    per_step: Float[Tensor, "steps"]

    def start(self) -> None:
        self.sums = torch.zeros(len(self.grouping), self.out_features, dtype=torch.float64)
        self.sizes = torch.zeros(len(self.grouping), dtype=torch.float64)
        self.counts = torch.zeros(len(self.grouping), dtype=torch.int64)

    def update(self, block: Block, values: Any) -> None:
        codes, scales = self.grouping.codes(block), self.per_step[block.column("step")]
        self.counts += self.grouping.counts(block)
        for errors in block.errors():
            scale = scales[errors.place] if errors.scale is None else scales[errors.place] * errors.scale
            scaled = dense(errors.rows).double() * scale[:, None]
            self.sums.index_add_(0, codes[errors.place], scaled)
            self.sizes.index_add_(0, codes[errors.place], scaled.norm(dim=1))


def find_suspects(view: View, k: int, layer: str | None) -> Suspects:
    """The k examples of a view that the network disagreed with most; see `Memory.suspects`."""
    if k < 1:
        raise SettingError(f"suspects({k}): ask for at least one example.")
    reader = view.reader
    reader.need_visits("the error of each visit, which suspects are told by", "Ask for scores, top or totals")
    reader.need_all_slots("Suspects are told by the errors of all visits, so they need")
    if not reader.manifest.errors:
        raise UnsupportedError(
            f"{reader.address} was recorded with errors=False: there is nothing to tell suspects by."
        )
    if "example" not in reader.manifest.columns:
        raise SettingError(
            f"{reader.address} does not say which example a slot belongs to. Record with recorder.batch(example=ids)."
        )
    name = list(reader.layers)[-1] if layer is None else layer
    recorded = reader.layer(name)
    examples = grouping(view, recorded, "example")
    selection = view.selection
    if recorded.entry.turned:  # slots of an embedding that shares the weight have no errors of classes
        strings = reader.manifest.columns["module"].strings
        own = tuple(strings.index(path) for path in recorded.entry.modules if path in strings)
        selection = selection & OneOf("module", own, "the layer itself")
    per_step = loss_scale(reader.log(name), reader.steps)
    errors = ErrorSumsReducer(recorded.entry.out_features, examples, per_step)
    errors = view.reduce(name, errors, selection=selection)
    labels = examples.labels
    known = torch.tensor([label is not None for label in labels], dtype=torch.bool)
    seen = ((errors.counts > 0) & known).nonzero().flatten()
    order = seen[errors.sizes[seen].sort(descending=True, stable=True).indices[:k]]
    answers: list[int | None] = [None] * len(order)
    if _are_of_classes(errors.sums):
        answers = errors.sums[order].argmax(dim=1).tolist()
    names = [column for column in reader.manifest.columns if column not in ("example", "step", "position")]
    visits = Visits(view, recorded, examples, order, names)
    agreed = {column: visits.agreed(column) for column in (names if len(order) else ())}
    return Suspects(
        name,
        [labels[index] for index in order.tolist()],
        errors.sizes[order],
        errors.counts[order],
        answers,
        {column: values for column, values in agreed.items() if any(value is not None for value in values)},
        "; ".join(filter(None, [NOTE, reader.manifest.slots_note])),
    )


def loss_scale(log: StepLog, steps: int) -> Float[Tensor, "steps"]:
    """What undoes the scale of a scaled loss: the γ of a parameter that is not clipped."""
    factors = list(log.factor.values())
    return torch.stack(factors).amax(dim=0) if factors else torch.ones(steps, dtype=torch.float64)


def _are_of_classes(errors: Float[Tensor, "examples out_features"]) -> bool:
    """Whether the errors are those of probabilities, which add up to nothing."""
    # All examples together: of one that is answered almost perfectly, nothing but rounding may be left.
    sums, sizes = errors.sum(dim=1).abs().sum(), errors.abs().sum()
    return errors.shape[1] > 1 and bool(sums <= 1e-3 * sizes)
