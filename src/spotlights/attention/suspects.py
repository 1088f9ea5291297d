"""Suspects: training examples that look mislabelled, because the network kept disagreeing with them.

The last layer's error is what the network said minus what the label says. An example whose label fits its
neighbours is soon answered rightly and its error vanishes; a wrong label is taught against all the others, visit after
visit. So the sum over visits of the error's norm ranks them, and the class that the error pointed to is what
the network would have said. Nothing but the recorded errors is read, so a run can be audited while it trains.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.grouping import Grouping
from spotlights.attention.measure import View
from spotlights.attention.reducers import Reducer
from spotlights.attention.results import Label, frame
from spotlights.attention.scan import Job, scan
from spotlights.attention.tables import Printable, build
from spotlights.attention.visits import Visits
from spotlights.errors import SettingError, UnsupportedError
from spotlights.memory.blocks import Block
from spotlights.memory.selection import OneOf
from spotlights.memory.step_log import StepLog

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from spotlights.figures import ImageOf

_SHOWN_ROWS = 10
_NO_VALUES = torch.empty(0, 0)
NOTE = "a ranking, not a verdict: hard and rare examples rank high too; look at them"


@dataclass(frozen=True, repr=False)
class Suspects(Printable):
    """Training examples, the most suspicious first."""

    layer: str
    """The layer whose errors were added up."""
    examples: list[Label]
    scores: Float[Tensor, "k"]
    """The sum over visits of the norm of the error."""
    visits: Int64[Tensor, "k"]
    answers: list[int | None]
    """The class that the network said instead, over all visits; None where errors are not those of classes."""
    columns: Mapping[str, list[Label]]
    """The other columns of each example, such as its label."""

    def __len__(self) -> int:
        return len(self.examples)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each example."""
        for index, example in enumerate(self.examples):
            yield {
                "rank": index + 1,
                "example": example,
                **{name: held[index] for name, held in self.columns.items()},
                "network says": self.answers[index],
                "suspicion": float(self.scores[index]),
                "visits": int(self.visits[index]),
            }

    def table(self) -> Any:
        rows = list(self.rows())[:_SHOWN_ROWS]
        names = list(rows[0]) if rows else ["rank", "example", "suspicion"]
        title = f"suspects by the errors of {self.layer} (the first {len(rows)} of {len(self):,})"
        return build(title, names, ([row[name] for name in names] for row in rows), NOTE)

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each example."""
        return frame(self.rows())

    def to_csv(self, path: str | Path) -> Path:
        """Writes one line for each example."""
        path = Path(path)
        rows = list(self.rows())
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["rank", "example"])
            writer.writeheader()
            writer.writerows(rows)
        return path

    def plot(self, image_of: ImageOf, **options: Any) -> Figure:
        """The examples' pictures, with their labels and what the network says."""
        from spotlights import figures

        return figures.plot_suspects(self, image_of, **options)


def find_suspects(view: View, k: int, layer: str | None) -> Suspects:
    """The k examples of a view that the network disagreed with most; see `Memory.suspects`."""
    if k < 1:
        raise SettingError(f"suspects({k}): ask for at least one example.")
    reader = view.reader
    reader.need_visits("the error of each visit, which suspects are told by", "Ask for scores, top or totals")
    reader.need_all_slots("Suspects are told by the errors of all visits, so they need")
    if not reader.manifest.errors:
        raise UnsupportedError(
            f"{reader.directory} was recorded with errors=False: there is nothing to tell suspects by."
        )
    if "example" not in reader.manifest.columns:
        raise SettingError(
            f"{reader.directory} does not say which example a slot belongs to. Record with recorder.batch(example=ids)."
        )
    name = list(reader.layers)[-1] if layer is None else layer
    found = reader.layer(name)
    grouping = Grouping(found, "example", view.strings("example"), None)
    reducer = DisagreementReducer(grouping, found.entry.out_features, _scale(reader.log(name), reader.steps))
    selection = view.selection
    if found.entry.turned:  # slots of an embedding that shares the weight have no errors of classes
        strings = view.strings("module")
        own = tuple(strings.index(path) for path in found.entry.modules if path in strings)
        selection = selection & OneOf("module", own, "the layer itself")
    scan([Job(found, selection, 0, lambda block: _NO_VALUES, [reducer])])
    labels = grouping.labels
    seen = torch.tensor(
        [n > 0 and labels[i] is not None for i, n in enumerate(reducer.visits.tolist())], dtype=torch.bool
    )
    seen = seen.nonzero().flatten()
    order = seen[reducer.norms[seen].sort(descending=True, stable=True).indices[:k]]
    answers = reducer.errors[order].argmax(dim=1).tolist()
    visits = Visits(found, view, grouping, order)
    columns = {}
    for column in reader.manifest.columns:
        agreed = visits.agreed(column) if column not in ("example", "step", "position") else []
        if any(value is not None for value in agreed):
            columns[column] = agreed
    return Suspects(
        name,
        [labels[index] for index in order.tolist()],
        reducer.norms[order],
        reducer.visits[order],
        answers if reducer.of_classes else [None] * len(answers),
        columns,
    )


def _scale(log: StepLog, steps: int) -> Float[Tensor, "steps"]:
    """What undoes the scale of a scaled loss: the γ of a parameter that is not held back."""
    factors = list(log.factor.values())
    return torch.stack(factors).amax(dim=0) if factors else torch.ones(steps, dtype=torch.float64)


class DisagreementReducer(Reducer):
    """Per example: the sum of the errors, the sum of their norms, and the number of visits, in float64."""

    def __init__(self, grouping: Grouping, out_features: int, factor: Float[Tensor, "steps"]) -> None:
        self._grouping = grouping
        self._factor = factor
        self.errors = torch.zeros(len(grouping), out_features, dtype=torch.float64)
        self.norms = torch.zeros(len(grouping), dtype=torch.float64)
        self.visits = torch.zeros(len(grouping), dtype=torch.int64)

    def fresh(self) -> DisagreementReducer:
        return type(self)(self._grouping, self.errors.shape[1], self._factor)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        codes = self._grouping.codes(block)
        factor = self._factor[block.column("step")]  # undoes the scale of a scaled loss
        self.visits += torch.bincount(codes, minlength=len(self.visits))
        for errors in block.errors():
            scale = factor[errors.place] if errors.scale is None else factor[errors.place] * errors.scale
            rows = errors.rows.double() * scale[:, None]
            self.errors.index_add_(0, codes[errors.place], rows)
            self.norms.index_add_(0, codes[errors.place], rows.norm(dim=1))

    def merge(self, other: DisagreementReducer) -> None:
        self.errors += other.errors
        self.norms += other.norms
        self.visits += other.visits

    @property
    def of_classes(self) -> bool:
        """Whether the errors are those of probabilities, which add up to nothing."""
        # All examples together: of one that is answered almost perfectly, nothing but rounding may be left.
        sums, sizes = self.errors.sum(dim=1).abs().sum(), self.errors.abs().sum()
        return self.errors.shape[1] > 1 and bool(sums <= 1e-3 * sizes)
