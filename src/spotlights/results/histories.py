"""What a history is made of, as people and programs see it: the rest by name, the curve, and what was forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.results.answers import Label, check_query
from spotlights.results.tables import Printable, RowAnswer, build, frame

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

_SHOWN_STEPS = 11


class Rest(dict[str, Float[Tensor, "numbers"]]):
    """What no slot added, by name; in a sum it counts as its total."""

    def __init__(self, parts: Mapping[str, Float[Tensor, "numbers"]], numbers: int) -> None:
        super().__init__(parts)
        self._numbers = numbers

    @property
    def total(self) -> Float[Tensor, "numbers"]:
        return sum(self.values(), start=torch.zeros(self._numbers, dtype=torch.float64))

    def __add__(self, other: Any) -> Float[Tensor, "numbers"]:
        return self.total + (other.total if isinstance(other, Rest) else other)

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"Rest({', '.join(f'{name}: {value.tolist()}' for name, value in self.items())})"


@dataclass(frozen=True, repr=False)
class Curve(Printable):
    """Numbers of interest before the first step, and after every step."""

    values: Float[Tensor, "numbers steps_and_one"]
    names: Sequence[str]
    """What each number is."""

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, query: int = 0) -> Iterator[dict[str, Any]]:
        """One number, row by row."""
        check_query(query, len(self), "numbers")
        for steps, value in enumerate(self.values[query].tolist()):
            yield {"steps": steps, self.names[query]: value}

    def table(self) -> Any:
        count = self.values.shape[1]
        places = np.unique(np.linspace(0, count - 1, min(count, _SHOWN_STEPS)).round().astype(int)).tolist()
        rows = [[steps, *self.values[:, steps].tolist()] for steps in places]
        return build("the numbers after so many steps", ["steps", *self.names], rows, None)

    def numpy(self) -> np.ndarray:
        """Of shape (numbers, steps + 1)."""
        return self.values.numpy()

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each step, one column for each number."""
        columns = self.values.T.tolist()
        return frame({"steps": s, **dict(zip(self.names, row, strict=True))} for s, row in enumerate(columns))

    def plot(self, query: int = 0) -> Figure:
        """One number over the steps."""
        from spotlights import figures

        check_query(query, len(self), "numbers")
        return figures.plot_history(figures.HistoryPanel(self.values[query].numpy(), self.names[query]))


@dataclass(frozen=True)
class Lost:
    """A right answer that training lost."""

    number: str
    """Whose answer."""
    since: int
    """The last step before which the number was nearer to its best than to what was left of it."""
    at_step: int
    """The step that lost the answer."""
    before: float
    after: float
    """The number before `since`, and after `at_step`."""
    says: Label
    """What the network said instead."""
    regained: int | None
    """The step that made the answer right again; None if none did."""
    takers: list[tuple[Label, Label, float]]
    """The examples whose visits in between took most, with their labels and what they added."""


@dataclass(frozen=True, repr=False)
class Forgetting(RowAnswer):
    """The steps at which right answers were lost, and the examples that took them."""

    lost: Sequence[Lost]
    note: str | None = None

    def __len__(self) -> int:
        return len(self.lost)

    def __iter__(self) -> Iterator[Lost]:
        return iter(self.lost)

    def __getitem__(self, place: int) -> Lost:
        return self.lost[place]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each loss."""
        for lost in self.lost:
            yield {
                "number": lost.number,
                "falls since step": lost.since,
                "lost at step": lost.at_step,
                "from": lost.before,
                "to": lost.after,
                "says": lost.says,
                "regained": lost.regained,
                "taken by": ", ".join(_taker(*taker) for taker in lost.takers),
            }

    def table(self) -> Any:
        takers = (" ".join(str(example) for example, *_ in lost.takers) for lost in self.lost)
        rows = [{**row, "taken by": ids} for row, ids in zip(self.rows(), takers, strict=True)]
        names = list(rows[0]) if rows else ["number", "lost at step"]
        title = "right answers that training lost" if rows else "training lost no right answer"
        return build(title, names, ([row[name] for name in names] for row in rows), self.note)


def _taker(example: Label, label: Label, share: float) -> str:
    named = "" if label is None else f" (label {label})"
    return f"{example}{named} {share:+.3g}"
