"""What a request looks at, and the values behind it: one layer's, or all layers' for an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spotlights.attention import Spotlights
from spotlights.attention.attention import Contributions
from spotlights.attention.influence import Influence
from spotlights.attention.measure import Measure
from spotlights.attention.questions import AskTotals
from spotlights.attention.results import Totals
from spotlights.errors import SettingError, UnsupportedError
from spotlights.web.explorer import Explorer
from spotlights.web.measures import KINDS, Absolute, Held, Kind, hold, measure_of
from spotlights.web.queries import Query, outputs_of, row_of, target_of


@dataclass(frozen=True)
class Wanted:
    """What to look at."""

    layer: str
    measure: str = "contribution"
    target: int | None = None
    """The output that contributions and influence are about; by default what the network says."""
    by: str = "example"
    """"slot", or "example" to add up its visits."""
    per: str | None = None
    """The column whose values are the groups of the sorted values."""
    steps: tuple[int, int] | None = None
    """Only these steps, the end not included."""
    top: int = 24
    sorted: int = 500
    """How many values of each group are shown in descending order."""


@dataclass(frozen=True, eq=False)
class Measured:
    """The values of every slot for one query."""

    kind: Kind
    parts: Sequence[Measure]
    """One layer's; for an estimate one for each layer."""
    target: int | None
    exact: bool
    left_out: Sequence[str]
    """Layers through which an estimate does not go."""
    initial: float | None
    """What the initial weights make up of the output, where contributions are asked for."""
    rows: int
    """How many rows of the query are added up: the positions at which a convolution sees an image."""
    kernel: str

    @property
    def layer(self) -> str:
        return "all layers" if self.kind.estimate else self.parts[0].layer.name

    @property
    def note(self) -> str | None:
        return self._influence().note if self.kind.estimate else self.parts[0].note

    @property
    def caution(self) -> str | None:
        """In a word or two, what the note explains."""
        part = self.parts[0]
        reasons = {
            "estimate": self.kind.estimate or part.sample is not None,
            "first order": not self.exact,
            "approximate": part.layer.storage.name in ("float16", "int8"),
            self.kernel: self.kernel != "dot",
            "visits added up": part.view.reader.manifest.fold is not None,
            f"{self.rows:,} positions added up": self.rows > 1,
        }
        return next((word for word, holds in reasons.items() if holds), None)

    def totals(self, *columns: str, bins: int | None = None) -> list[Totals]:
        """Values summed over the groups of each column."""
        if not self.kind.estimate:
            return self.parts[0].ask(*(AskTotals(column, bins=bins) for column in columns))
        influence = self._influence()
        return [influence.totals(column, bins=bins) for column in columns]

    def _influence(self) -> Influence:
        owners = [torch.zeros(len(part.queries), dtype=torch.int64) for part in self.parts]
        return Influence(self.parts, owners, inputs=1, left_out=self.left_out)


def measured(explorer: Explorer, query: Query, wanted: Wanted) -> Measured:
    """The values of every slot, computed once for each query and layer."""
    if wanted.measure not in KINDS:
        raise SettingError(f'No measure "{wanted.measure}". There are: {", ".join(KINDS)}.')
    kind = KINDS[wanted.measure]
    spot = explorer.attend(query)
    target = None
    if kind.signed:
        outputs = outputs_of(spot.output, query)
        target = int(outputs.argmax()) if wanted.target is None else wanted.target
        if not 0 <= target < len(outputs):
            raise SettingError(f"target={target}: the network has outputs 0 to {len(outputs) - 1}.")
    layers, left_out = spot.influence_layers() if kind.estimate else ([wanted.layer], [])
    if not layers:
        raise UnsupportedError(f"There is no estimate of influence through {', '.join(left_out)}.")
    rows = max(len(spot[name].queries) for name in layers)
    made = [_part(explorer, query, wanted, kind, spot, name, target) for name in layers]
    whole, parts = zip(*made, strict=True)
    contributions = whole[0] if isinstance(whole[0], Contributions) and not kind.estimate else None
    return Measured(
        kind,
        parts,
        target,
        exact=not kind.estimate and (contributions is None or contributions.exact),
        left_out=left_out,
        initial=None if contributions is None else float(contributions.initial[0]),
        rows=rows if row_of(query, rows) is None else 1,
        kernel=explorer.subject.kernel,
    )


def _part(
    explorer: Explorer, query: Query, wanted: Wanted, kind: Kind, spot: Spotlights, layer: str, target: int | None
) -> tuple[Measure, Measure]:
    """One layer's measure as the library makes it, and the same with its values held, for the wanted steps."""
    opened = explorer.opened
    view = opened.memory._view if wanted.steps is None else opened.memory.where(step=range(*wanted.steps))._view
    key = "values", query.name, query.position, layer, kind.name if kind.signed else "score", target
    measure, values = opened.values.get(key) or (None, None)
    if measure is None:
        attention = spot[layer]
        chosen: Any = None if target is None else target_of(query, spot.output, target)
        measure = measure_of(kind, attention, row_of(query, len(attention.queries)), chosen)
        values = hold(measure)
        if values is not None:
            opened.values.put(key, (measure, values), values.nbytes)
    if values is None:
        measure.view = view  # too many slots to keep their values: they are computed again, in this stretch only
    found = measure if values is None else Held(measure, values, view)
    return measure, Absolute(found) if kind.name == "absolute" else found
