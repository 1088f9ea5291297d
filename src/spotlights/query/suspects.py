"""Suspects: training examples that look mislabelled, because the network kept disagreeing with them.

The last layer's error is what the network said minus what the label says. An example whose label fits its neighbours is
soon answered correctly, and its error vanishes. A wrong label is taught against all the others, visit after
visit. So the sum over visits of the error's norm ranks the examples, and the class that the error points to is what
the network would have said. Only recorded errors are read, so a run can be audited while it trains.

Why an example is suspected: the class that the network would give it, the share of visits at which the network agreed
with the label, and the examples of other classes that look most like it to the layer that answers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.errors import SettingError, UnsupportedError
from spotlights.memory.blocks import Block, OneOf, Selection
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.reader import MemoryReader, StepLog
from spotlights.query.columns import Grouping, Visits, grouping
from spotlights.query.distinct_keys import KeysOfSlots
from spotlights.query.engine import View
from spotlights.query.reducers import CountReducer, Reducer
from spotlights.results.answers import Label
from spotlights.results.suspects import NOTE, Suspects
from spotlights.sparse_rows import dense

RIVALS = 3
"""How many of the nearest examples that disagree are named."""
_KEY_BYTES = 256 << 20
"""What the keys of all examples may take, to find the nearest."""


@dataclass(eq=False)
class ErrorSumsReducer(Reducer):
    """The sum of the errors of each group's slots, each times one number for its step, and the sum of their norms."""

    adds = ("sums", "sizes", "counts", "agreed")
    out_features: int
    grouping: Grouping
    per_step: Float[Tensor, "steps"]
    rows: Int64[Tensor, "steps"]
    """The slots of each step: errors are those of a mean over them."""

    def start(self) -> None:
        groups = len(self.grouping)
        self.sums = torch.zeros(groups, self.out_features, dtype=torch.float64)
        self.sizes = torch.zeros(groups, dtype=torch.float64)
        self.counts, self.agreed = torch.zeros(groups, dtype=torch.int64), torch.zeros(groups, dtype=torch.int64)
        """Of `agreed`: the slots where the network's first answer was the label."""
        self.last = torch.full((groups,), -1)
        """The last slot of each group."""
        self.largest = 0.0
        """Of all errors; above 1 they are not those of a mean over rows, and `agreed` means nothing."""

    def update(self, block: Block, values: Any) -> None:
        codes, steps = self.grouping.codes(block), block.column("step")
        scales = self.per_step[steps]
        self.counts += self.grouping.counts(block)
        self.last.scatter_reduce_(0, codes, block.slots, "amax")
        for errors in block.errors():
            scaled = dense(errors.rows).double() * errors.times_scale(scales[errors.place])[:, None]
            self.sums.index_add_(0, codes[errors.place], scaled)
            self.sizes.index_add_(0, codes[errors.place], scaled.norm(dim=1))
            least, most = scaled.aminmax(dim=1)  # p − 1 of the label, and p of the first among the others
            count = self.rows[steps[errors.place]]
            self.largest = max(self.largest, float((count * -least).max())) if len(scaled) else self.largest
            self.agreed.index_add_(0, codes[errors.place], (count * (most - least) <= 1).long())

    def merge(self, other: Any) -> None:
        super().merge(other)
        self.last = torch.maximum(self.last, other.last)
        self.largest = max(self.largest, other.largest)


def find_suspects(view: View, k: int, layer: str | None, *, per_class: bool = False) -> Suspects:
    """The k examples of a view that the network disagreed with most; see `Memory.suspects`."""
    if k < 1:
        raise SettingError(f"suspects({k}): ask for at least one example.")
    reader = view.reader
    reader.need_visits("the error of each visit, which suspects are told by", "Ask for scores, top or totals")
    reader.need_all_slots("Suspects are told by the errors of all visits, so they need")
    reader.need_errors("Suspects are told by")
    reader.need_examples()
    name = list(reader.layers)[-1] if layer is None else layer
    recorded = reader.layer(name)
    examples = grouping(view, recorded, "example")
    selection = own_slots(reader, recorded, view.selection)  # those of an embedding have no errors of classes
    per_step = loss_scale(reader.log(name), reader.steps)
    steps = Grouping("step", "int", [], np.arange(max(reader.steps, 1)), None)
    rows = view.reduce(name, CountReducer(steps), selection=view.all_slots).counts
    errors = ErrorSumsReducer(recorded.entry.out_features, examples, per_step, rows)
    errors = view.reduce(name, errors, selection=selection)
    labels = examples.labels
    known = torch.tensor([label is not None for label in labels], dtype=torch.bool)
    seen = ((errors.counts > 0) & known).nonzero().flatten()
    order = seen[errors.sizes[seen].sort(descending=True, stable=True).indices]
    of_classes = _are_of_classes(errors.sums)
    if per_class and not of_classes:
        raise UnsupportedError(f'The errors of "{name}" are not those of classes: ask for suspects of all examples.')
    classes = errors.sums.argmin(dim=1)  # the label's error alone is negative
    if per_class:
        by_class = [order[classes[order] == number][:k] for number in range(recorded.entry.out_features)]
        order = torch.cat(by_class)
    else:
        order = order[:k]
    answers: list[int | None] = [None] * len(order)
    agreement: list[float | None] = [None] * len(order)
    rivals: list[list[Label]] = [[] for _ in order]
    if of_classes:
        answers = errors.sums[order].argmax(dim=1).tolist()
        if errors.largest <= 1.01:
            agreement = (errors.agreed[order] / errors.counts[order]).tolist()
        rivals = _rivals(view, recorded, errors, classes, seen, order, labels)
    names = [column for column in reader.manifest.columns if column not in ("example", "step", "position")]
    visits = Visits(view, recorded, examples, order, names)
    agreed = {column: visits.agreed(column) for column in (names if len(order) else ())}
    return Suspects(
        name,
        [labels[index] for index in order.tolist()],
        errors.sizes[order],
        errors.counts[order],
        answers,
        agreement,
        rivals,
        {column: values for column, values in agreed.items() if any(value is not None for value in values)},
        "; ".join(filter(None, [NOTE, reader.manifest.slots_note])),
    )


def _rivals(
    view: View,
    recorded: LayerReader,
    errors: ErrorSumsReducer,
    classes: Tensor,
    seen: Tensor,
    order: Tensor,
    labels: list[Label],
) -> list[list[Label]]:
    """For each suspect the nearest examples of other classes, by the cosine of the layer's keys at the last visits."""
    if recorded.slots and len(seen) * recorded.entry.in_features * 4 > _KEY_BYTES:
        return [[] for _ in order]
    whole = replace(view, engine=view.engine.of_the_whole)
    (keys,) = whole.values((recorded.name, KeysOfSlots(errors.last[seen])))
    keys = torch.nn.functional.normalize(keys.float(), dim=1)
    rivals: list[list[Label]] = []
    for some in order.split(256):
        own = torch.searchsorted(seen, some)
        alike = (keys[own] @ keys.T).masked_fill(classes[some][:, None] == classes[seen][None], float("-inf"))
        values, nearest = alike.topk(min(RIVALS, len(seen)), dim=1)
        pairs = zip(values.tolist(), seen[nearest].tolist(), strict=True)
        rivals += [[labels[at] for value, at in zip(*pair, strict=True) if value > float("-inf")] for pair in pairs]
    return rivals


def own_slots(reader: MemoryReader, recorded: LayerReader, selection: Selection) -> Selection:
    """Without the slots of an embedding that shares the layer's weight."""
    if not recorded.entry.turned:
        return selection
    strings = reader.manifest.columns["module"].strings
    own = tuple(strings.index(path) for path in recorded.entry.modules if path in strings)
    return selection & OneOf("module", own, "the layer itself")


def loss_scale(log: StepLog, steps: int) -> Float[Tensor, "steps"]:
    """What undoes the scale of a scaled loss: the γ of a parameter that is not clipped."""
    factors = list(log.factor.values())
    return torch.stack(factors).amax(dim=0) if factors else torch.ones(steps, dtype=torch.float64)


def _are_of_classes(errors: Float[Tensor, "examples out_features"]) -> bool:
    """Whether the errors are those of probabilities, which add up to nothing."""
    # All examples together: of one that is answered almost perfectly, nothing but rounding may be left.
    sums, sizes = errors.sum(dim=1).abs().sum(), errors.abs().sum()
    return errors.shape[1] > 1 and bool(sums <= 1e-3 * sizes)
