"""The same questions as on the page, for the command line: a run's folder, a query, a layer, a measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import spotlights as sl
from spotlights.attention import Spotlights
from spotlights.attention.influence import Influence
from spotlights.attention.measure import Measure
from spotlights.errors import SettingError
from spotlights.web.explorer import groups_of
from spotlights.web.masks import Mask
from spotlights.web.measures import KINDS, Absolute, measure_of
from spotlights.web.parameters import parse_mask
from spotlights.web.queries import Query, answer, described, outputs_of, read_query, row_of, target_of
from spotlights.web.runs import subject_of
from spotlights.web.subject import Subject


@dataclass(frozen=True, eq=False)
class Asked:
    """A run and one query."""

    subject: Subject
    memory: sl.Memory
    model: nn.Module
    query: Query
    spot: Spotlights

    def measure(self, layer: str | None, measure: str, target: int | None) -> Measure | Influence:
        """One layer's contribution, score or |score| ("absolute"), the last layer's if none is named; or influence."""
        if measure not in KINDS:
            raise SettingError(f'No measure "{measure}". There are: {", ".join(KINDS)}.')
        kind = KINDS[measure]
        if kind.signed and target is None:
            target = int(outputs_of(self.spot.output, self.query).argmax())
        chosen = None if target is None or not kind.signed else target_of(self.query, self.spot.output, target)
        if kind.estimate:
            assert chosen is not None  # it is signed
            return self.spot[layer].influence(chosen) if layer else self.spot.influence(chosen)
        attention = self.spot[layer or list(self.spot)[-1]]
        found = measure_of(kind, attention, row_of(self.query, len(attention.queries)), chosen)
        return Absolute(found) if measure == "absolute" else found

    def answers(self, mask: Mask) -> dict[str, Any]:
        """What the network says, with and without what the mask leaves out."""
        masked = mask.view(self.memory).primal(self.model, layers=mask.layers) if mask else self.model
        pair = {"with": answer(self.model, self.query), "without": answer(masked, self.query)}
        return {name: described(self.subject, self.query, logits, self.spot) for name, logits in pair.items()}

    def mask(self, left_out: str, layers: str | None) -> Mask:
        """`label:3,5;steps:0-300;example:12`, as in the page's address."""
        return parse_mask(left_out, layers, self.memory, groups_of(self.memory))


def ask(run: Path, query: str, at: int | None = None) -> Asked:
    """Opens a run and asks its network; a bare number is the id of a test input."""
    subject = subject_of(run)
    memory = subject.reopen()
    model = subject.network(memory).eval()
    found = read_query(subject, query if ":" in query else f"test:{query}", at)
    return Asked(subject, memory, model, found, memory.attend(model, found.batch))
