"""`spotlights retrain-check`: what happens without a group of examples? The estimate, the mask and the truth.

The subject trains its network again without the group's examples. The margins of the retrained network are compared
with the memory's estimate (influence) and with the margins of the network with the group's slots masked. A mask is no
forecast. It removes the group's slots, but keeps those of other examples as they are, although without the group these
examples would have taught something else.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

import spotlights as sl
from spotlights.errors import SettingError
from spotlights.results import Printable, build
from spotlights.selections import parse_selections
from spotlights_paper.experiments.progress import stage
from spotlights_paper.experiments.truth.data import margins
from spotlights_paper.experiments.truth.scoring import spearman

TESTS = 500
"""Test inputs of each source that are asked about."""
_OF_VISITS = {"step", "position", "first_step", "last_step"}
"""What differs between the visits of an example: training again leaves out whole examples."""


@dataclass(frozen=True)
class Line:
    """One group of test inputs."""

    tests: str
    """A source and class, or all."""
    inputs: int
    before: float
    """Mean margin of the recorded network."""
    retrained: float
    """The same, of the network that was really trained without the group: the truth."""
    masked: float
    """The same, of the network without the group's slots."""
    estimate: float
    """Mean influence of the group, in units of its own: how much of the margin would go."""


@dataclass(frozen=True, repr=False)
class RetrainCheck(Printable):
    """Estimate, mask and truth side by side."""

    subject: str
    without: str
    examples: int
    """Training examples that were left out."""
    lines: list[Line]
    influence_agreement: float
    """Rank correlation, over test inputs, of the estimated with the true loss of margin."""
    mask_agreement: float

    def table(self) -> Any:
        names = ["test inputs", "number", "margin before", "truth: retrained", "masked", "estimated loss"]
        rows = [[x.tests, x.inputs, x.before, x.retrained, x.masked, x.estimate] for x in self.lines]
        note = (
            f"{self.examples:,} training examples left out. Rank correlation with the true loss of margin over all "
            f"test inputs: influence {self.influence_agreement:.2f}, mask {self.mask_agreement:.2f}. The estimate has "
            "no unit: compare its order and sign."
        )
        return build(f"{self.subject} without {self.without}", names, rows, note)


def retrain_check(subject: sl.Subject, without: str | sl.Decisions) -> RetrainCheck:
    """Trains again without a group, and compares.

    Args:
        subject: has labels, and says how to train again (`retrain`).
        without: a selection: "label=3", "source=fashion-mnist", "example=17,42"; or decisions of an audit. Of these the
            dropped examples are left out; so are the relabelled ones, if `retrain` takes no new labels.
    """
    labelled: dict[int, int] = {}
    if isinstance(without, sl.Decisions):
        changed = [*without.dropped, *without.relabelled]
        if not changed:
            raise SettingError("These decisions drop and relabel nothing: there is nothing to retrain without.")
        if subject.retrain is not None and len(inspect.signature(subject.retrain).parameters) > 1:
            labelled = without.relabelled
        without = f"example={','.join(map(str, changed))}"
    selections = parse_selections(without)
    if len(selections) != 1:
        raise SettingError(f"--without {without!r}: give one selection, such as label=3 or source=mnist label=3,5.")
    group = selections[0]
    memory, inputs = subject.open(), subject.inputs
    view = memory.where(**group)
    if _OF_VISITS & group.keys():
        raise SettingError("Cannot retrain without some visits of an example. Give label=, example= or another column.")
    if subject.retrain is None or inputs.labels is None:
        raise SettingError(
            "This subject does not say how to train again. Give sl.Subject(…, labels=…, retrain=function): from the "
            "ids of the training examples to leave out to the network trained without them."
        )
    model, where = subject.network(memory), _some_of_each_source(inputs.sources, len(inputs))
    batch, labels = inputs.batch(where), torch.tensor(inputs.labels)[where]

    def margin(output: Any) -> Float[Tensor, "inputs"]:
        return margins(output if subject.target is None else subject.target(output), labels)

    with stage("estimating"):
        influence = view.attend(model, batch).influence(margin)
        by_example, estimate = influence.totals("example"), influence.total().double()
    counted = zip(by_example.groups, by_example.counts.tolist(), strict=True)
    left_out = [example for example, slots in counted if slots and isinstance(example, int)]
    if not left_out:
        raise SettingError(f"No training example is in this group ({without}): there is nothing to leave out.")
    with stage("masking"):
        masked_model = memory.without(**group).primal(model)
    gone = [example for example in left_out if example not in labelled]
    networks = [model, subject.retrain(gone, labelled) if labelled else subject.retrain(gone), masked_model]
    with torch.no_grad():
        before, after, masked = (margin(_answer(network.eval(), batch)).double() for network in networks)
    sources = inputs.sources or [""] * len(inputs)
    names = [f"{sources[i]} {subject.class_name(inputs.labels[i], sources[i])}".strip() for i in where]
    lines = []
    for name in ("all", *sorted(set(names))):
        rows = torch.tensor([name in ("all", own) for own in names])
        lines.append(Line(name, int(rows.sum()), *(float(x[rows].mean()) for x in (before, after, masked, estimate))))
    losses = torch.stack([estimate, before - masked], dim=1)
    agreement = spearman(losses, (before - after)[:, None].expand_as(losses))
    return RetrainCheck(subject.title, without, len(left_out), lines, *agreement.tolist())


def _answer(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _some_of_each_source(sources: list[str] | None, count: int) -> list[int]:
    places: dict[str, list[int]] = {}
    for place, source in enumerate(sources or [""] * count):
        places.setdefault(source, []).append(place)
    return sorted(place for some in places.values() for place in some[:TESTS])
