"""`History`: what each slot added to a number of interest during training, through all layers of the network.

    f(x; initial weights) + Σ over slots + decay + rest = f(x; trained weights)

The equation is checked whenever a history is made (`History.error`). A history is an account of what happened, not a
forecast of what would have happened without an example; that is `influence`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from spotlights.errors import SettingError, UnsupportedError
from spotlights.memory.blocks import OneOf
from spotlights.query.coefficients import rule_of
from spotlights.query.columns import Cells, Grouping, few_groups, top_groups
from spotlights.query.engine import Progress, View
from spotlights.query.forward import Target
from spotlights.query.history_sweep import (
    DECAY,
    MOVED,
    OTHER_MODEL,
    OUTSIDE,
    ROUNDING,
    UNEXPLAINED,
    Course,
    HistoryCourse,
)
from spotlights.query.measured import LayerMeasured, OverLayers, add_up, all_groups
from spotlights.query.measures import Known
from spotlights.query.plan import Measure
from spotlights.query.reducers import TotalsReducer
from spotlights.results.answers import Label, Totals, check_query
from spotlights.results.histories import Curve, Forgetting, Lost, Rest
from spotlights.results.tables import Printable, build, frame

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from spotlights.api import Memory
    from spotlights.figures import HistoryPanel

Targets = Target | Mapping[str, Target]
"""A number of interest, or several by name."""

UNKNOWN = "parameters without an adapter"
_SHOWN_NUMBERS = 6
_LARGE_KAPPA = 10.0


@dataclass(frozen=True)
class AskedNetwork:
    """A network and what it is asked about."""

    view: View
    model: nn.Module
    inputs: Any


def find_history(asked: AskedNetwork, target: Targets, progress: Progress) -> History:
    """Sweeps back over all of training once; `Spotlights.history` says what the arguments are."""
    view, reader = asked.view, asked.view.reader
    rule = rule_of(reader)  # refuses memories without errors, without visits, or of an optimizer without a rule
    if rule.lazy:
        raise UnsupportedError(
            f"There is no history under {reader.manifest.optimizer}, which leaves tokens alone that a step does not "
            "use. Contributions, weights, masks and verify work."
        )
    reader.need_recording("A history needs")
    reader.need_all_slots("A history is made of", "Ask for top, totals or influence")
    targets: Mapping[str, Target] = target if isinstance(target, Mapping) else {_name_of(target): target}
    if not targets:
        raise SettingError("target={}: give at least one number of interest.")
    first = next(iter(reader.layers))
    sweep = HistoryCourse(asked.model, asked.inputs, targets, view.selection, view.until, progress)
    (course,) = view.values((first, sweep))
    return History(view, targets, course)


class History(OverLayers, Printable):
    """What each slot added to some numbers of interest during training, through all layers; for each number.

    Numbers are ordered by target, then by input. Made by `Spotlights.history`.
    """

    what = "history"
    signed = True

    def __init__(self, view: View, targets: Mapping[str, Target], course: Course) -> None:
        self.view = view
        self._targets = targets
        self._course = course
        parts = [_LayerHistory(view, name, course.slots[name]) for name in view.reader.layers if name in course.slots]
        if course.carrier is not None and course.carried is not None:
            parts.append(_LayerHistory(view, course.carrier, course.carried, UNKNOWN))
        super().__init__(parts)
        self._parts: Sequence[_LayerHistory] = parts

    # -- the sum -----------------------------------------------------------------------------

    @property
    def initial(self) -> Float[Tensor, "numbers"]:
        """The numbers at the initial weights."""
        return self._course.curve[:, 0]

    @property
    def decay(self) -> Float[Tensor, "numbers"]:
        """What weight decay added."""
        return self._course.shares.get(DECAY, torch.zeros_like(self.initial))

    @property
    def rest(self) -> Rest:
        """What nobody taught, by name: rounding, unexplained gradients, running statistics of batch norms."""
        parts = {name: share for name, share in self._course.shares.items() if name != DECAY}
        return Rest(parts, len(self))

    def total(self) -> Float[Tensor, "numbers"]:
        """The sum over all slots of the view. With `initial`, `decay` and `rest`: the answer."""
        none = torch.zeros(len(self), dtype=torch.float64)
        return sum((part.sum_of_all() for part in self._parts), start=none)

    @property
    def answer(self) -> Float[Tensor, "numbers"]:
        """The numbers as the network has them; those of the rebuilt weights where the view ends before training did."""
        course = self._course
        return course.curve[:, -1] if course.answer is None else course.answer

    @cached_property
    def error(self) -> Float[Tensor, "numbers"]:
        """`|initial + slots + decay + rest − answer|`, relative to the answer or to its change, if that is larger."""
        apart = (self.initial + self.total() + self.decay + self.rest - self.answer).abs()
        return apart / self._scale

    @property
    def exact(self) -> bool:
        """Whether the sum is the answer within rounding, and nothing but rounding error is unaccounted for."""
        return bool((self.error <= self._tolerance).all() and (self._unaccounted <= self._tolerance).all())

    @property
    def _unaccounted(self) -> Float[Tensor, "numbers"]:
        """The share of the number whose cause is unknown."""
        lost = [self.rest[name].abs() for name in (ROUNDING, UNEXPLAINED, MOVED, OTHER_MODEL) if name in self.rest]
        return sum(lost, start=torch.zeros(len(self), dtype=torch.float64)) / self._scale

    @property
    def _scale(self) -> Float[Tensor, "numbers"]:
        size = torch.maximum(self.answer.abs(), (self.answer - self.initial).abs())
        return size.clamp_min(torch.finfo(torch.float64).tiny)

    @property
    def _tolerance(self) -> float:
        layers = self.view.reader.manifest.layers.values()
        doubles = all(entry.dtype == entry.storage == "float64" for entry in layers)
        return 1e-9 if doubles else 1e-4

    @property
    def residual(self) -> Float[Tensor, "numbers"]:
        """What the gradients at the midpoints of steps missed before their correction, as a share of all movement."""
        movement = self._course.curve.diff(dim=1).abs().sum(dim=1)
        return torch.as_tensor(self._course.missed) / movement.clamp_min(torch.finfo(torch.float64).tiny)

    @cached_property
    def kappa(self) -> Float[Tensor, "numbers"]:
        """`κ = Σ|share| / |Σ share|` over the slots: how much of what they added cancels."""
        none = torch.zeros(len(self), dtype=torch.float64)
        sizes = sum((part.sum_of_all(absolute=True) for part in self._parts), start=none)
        return sizes / self.total().abs().clamp_min(torch.finfo(torch.float64).tiny)

    # -- questions ---------------------------------------------------------------------------

    @property
    def layer(self) -> str:
        return "all layers"

    @property
    def inputs(self) -> int:
        """How many inputs there are."""
        return len(self) // len(self._targets)

    @property
    def names(self) -> list[str]:
        """What each number is: its target, and its input if there are several."""
        several = self.inputs > 1
        return [f"{name} (input {i})" if several else name for name in self._targets for i in range(self.inputs)]

    def __len__(self) -> int:
        return len(self._course.curve)

    def _of_layers(self, column: str, bins: int | None) -> list[Totals]:
        if not self._parts:
            raise SettingError("There are no slots yet: nothing was added to the initial number.")
        return [part.totals(column, bins=bins) for part in self._parts]

    def by_layer(self) -> Totals:
        """What the slots of each layer added."""
        values = [part.sum_of_all() for part in self._parts]
        counts = torch.tensor([self.view.count(part.layer) for part in self._parts], dtype=torch.int64)
        stacked = torch.stack(values, dim=1) if values else torch.zeros(len(self), 0, dtype=torch.float64)
        names: list[Label] = [part.through for part in self._parts]
        return Totals(self.layer, self.what, "layer", stacked, counts, names, note=self.note)

    def curve(self) -> Curve:
        """The numbers before the first step, and after every step."""
        return Curve(self._course.curve, self.names)

    @property
    def says(self) -> Int64[Tensor, "inputs steps_and_one"] | None:
        """The class that the network said before the first step and after every step; None if it is no classifier."""
        return self._course.said

    def during(self, steps: range) -> History:
        """The same history with the slots of some steps alone: who added what meanwhile."""
        return History(self.view.where(OneOf("step", steps)), self._targets, self._course)

    def forgetting(self, k: int = 3, *, longest: int = 5) -> Forgetting:
        """The steps at which a right answer was lost, and the k examples that took most of it.

        An answer is right while the target is the largest output; for a difference of outputs, or a function, while the
        number is positive. Who took the answer is looked for among the visits since the number was last nearer to its
        best than to what was left: a visit counts with all that it added, also through momentum in later steps.

        Args:
            k: how many examples for each loss.
            longest: how many losses for each number: those that lasted longest.
        """
        lost = []
        for number, right in enumerate(self._right()):
            losses = sorted(_losses(right, self._course.curve[number]), key=lambda loss: loss[1] - (loss[2] or 1 << 60))
            lost += [self._lost(number, *loss, k) for loss in sorted(losses[:longest])]
        return Forgetting(lost, None if len(lost) == 0 else "taken by: examples whose visits in between took most away")

    def _lost(self, number: int, since: int, at: int, regained: int | None, k: int) -> Lost:
        view = self.view.where(OneOf("step", range(since, at + 1)))
        parts = [part.of(view) for part in self._parts]
        takers: list[tuple[Label, Label, float]] = []
        if "example" in self.view.reader.manifest.columns:
            totals = add_up([part.totals("example") for part in parts])
            of_number = replace(totals, values=totals.values[number : number + 1])
            ranked = top_groups([(part.view, part.recorded) for part in parts], of_number, k, largest=False)
            takers = [
                (row["example"], row.get("label"), row[self.what]) for row in ranked.rows(0) if row[self.what] < 0
            ]
        said = self._course.said
        says = None if said is None else int(said[number % self.inputs, at + 1])
        curve = self._course.curve[number]
        return Lost(self.names[number], since, at, float(curve[since]), float(curve[at + 1]), says, regained, takers)

    def _right(self) -> list[Bool[Tensor, "steps_and_one"]]:
        """Of each number: after which steps the answer was right."""
        right, said = [], self._course.said
        for place, target in enumerate(self._targets.values()):
            wanted: Any = int(target) if isinstance(target, str) and target.strip().isdecimal() else target
            for i in range(self.inputs):
                if said is None or callable(wanted) or isinstance(wanted, str):
                    right.append(self._course.curve[place * self.inputs + i] > 0.0)
                else:
                    own = torch.as_tensor(wanted).reshape(-1)
                    right.append(said[i] == int(own[i if len(own) > 1 else 0]))
        return right

    # -- pictures and tables -----------------------------------------------------------------

    def panel(self, query: int = 0, *, by: str | None = None, bins: int = 200) -> HistoryPanel:
        """One number as the functions of `spotlights.figures` take it; arguments as for `plot`."""
        from spotlights.figures import HistoryPanel

        check_query(query, len(self), "numbers")
        column = next(iter(few_groups(self.view, 64)), None) if by is None else by
        curve, name = self._course.curve[query].numpy(), self.names[query]
        what = f"output {name}" if name[0].isdigit() else name  # a label may have the same name
        title = f"how {what} came about"
        if column is None or not self.view.until:
            return HistoryPanel(curve, what, title=title)
        labels, sums = self._over_time(column, min(bins, self.view.until))
        start = np.zeros((len(labels), 1))
        areas = np.concatenate([start, sums[query].cumsum(dim=1).numpy()], axis=1)
        edges = np.linspace(0, self.view.until, areas.shape[1])
        note = (
            "areas: what the visits up to a step added, each with what it added later through the optimizer's momentum"
        )
        return HistoryPanel(curve, what, edges, areas, labels, column, note=note, title=f"{title}, by {column}")

    def plot(self, query: int = 0, *, by: str | None = None, bins: int = 200, **options: Any) -> Figure:
        """The number after every step, with an area for each group of slots: who taught it, who erased it, when.

        Args:
            query: which number.
            by: the column, such as "label" or "source"; one that has few values by default.
            bins: so many ranges of steps.
            options: those of `spotlights.figures.plot_history`.
        """
        from spotlights import figures

        return figures.plot_history(self.panel(query, by=by, bins=bins), **options)

    def _over_time(self, column: str, bins: int) -> tuple[list[Label], Float[Tensor, "numbers groups bins"]]:
        steps = Grouping("step", "int", [], np.arange(self.view.until), bins)
        groups = [part.grouping(column) for part in self._parts]
        labels, places = all_groups([own.labels for own in groups])
        sums = torch.zeros(len(self), len(labels), bins, dtype=torch.float64)
        for part, own, where in zip(self._parts, groups, places, strict=True):
            reducer = TotalsReducer(len(self), Cells([own, steps]))
            filled = self.view.reduce(part.layer, reducer, part.measure(slice(0, len(self))))
            sums[:, where] += filled.sums.unflatten(1, (len(own), bins))
        return labels, sums

    def rows(self, query: int = 0) -> list[dict[str, Any]]:
        """The terms of one number's sum."""
        check_query(query, len(self), "numbers")
        terms = {"initial": self.initial, "slots": self.total(), DECAY: self.decay, **self.rest, "answer": self.answer}
        return [{"term": name, self.names[query]: float(value[query])} for name, value in terms.items()]

    def table(self) -> Any:
        shown = range(min(len(self), _SHOWN_NUMBERS))
        columns = [[list(row.values()) for row in self.rows(query)] for query in shown]
        rows = [[terms[0][0], *(term[1] for term in terms)] for terms in zip(*columns, strict=True)]
        more = f" (the first {len(shown)} of {len(self)})" if len(self) > len(shown) else ""
        names = ["term", *(self.names[query] for query in shown)]
        return build(f"how {'an answer' if len(self) == 1 else 'answers'} came about{more}", names, rows, self.note)

    def to_pandas(self) -> pandas.DataFrame:
        """One row for each number, one column for each term."""
        numbers = ({row["term"]: row[self.names[q]] for row in self.rows(q)} for q in range(len(self)))
        return frame({"number": name, **terms} for name, terms in zip(self.names, numbers, strict=True))

    @property
    def note(self) -> str | None:
        reader = self.view.reader
        manifest, worst = reader.manifest, float(self.error.max()) if len(self) else 0.0
        exactly = f"{'exact' if self.exact else 'not exact'}: adds up within {worst:.0e}"
        if (self._unaccounted > self._tolerance).any():
            exactly += f", but {float(self._unaccounted.max()):.1%} is nobody's"
        notes = [f"an account of what happened in training, not a forecast; {exactly}"]
        for name in (UNEXPLAINED, MOVED, OTHER_MODEL):
            if name in self.rest:
                notes.append(f"{name}: see the rest")
        rule = rule_of(reader)
        if rule.note:
            notes.append(rule.note)
        if len(self) and float(self.kappa.max()) >= _LARGE_KAPPA:
            notes.append(f"κ = {float(self.kappa.max()):.0f}: large shares cancel")
        if manifest.uncovered:
            covered, trained = manifest.covered_numbers or 0, manifest.trained_numbers or 1
            names = ", ".join(manifest.uncovered[:3]) + (" …" if len(manifest.uncovered) > 3 else "")
            notes.append(
                f"{1.0 - covered / trained:.1%} of the trained parameters are not recorded; they have their final "
                f"values at every step: {names}"
            )
        lossy = {part.recorded.storage.name for part in self._parts if part.recorded.storage.lossy}
        if lossy:
            notes.append(f"keys and errors were stored as {', '.join(sorted(lossy))}: values are approximate")
        return "; ".join(filter(None, [*notes, manifest.slots_note, *self._course.notes]))

    # -- what the other measures have --------------------------------------------------------

    def keep(self) -> History:
        """The values of all slots are known already."""
        return self

    def within(self, memory: Memory) -> History:
        """The same history, asked about the slots of another view; all others are part of the rest."""
        history = History(memory.view, self._targets, self._course)
        others = self._course.shares.get(OUTSIDE, torch.zeros_like(self.initial)) + self.total() - history.total()
        shares = {**self._course.shares, OUTSIDE: others}
        return History(memory.view, self._targets, replace(self._course, shares=shares))


class _LayerHistory(LayerMeasured):
    """One layer's share of a history: its values are known."""

    what = "history"
    signed = True

    def __init__(self, view: View, layer: str, values: Float[Tensor, "numbers _"], through: str = "") -> None:
        super().__init__(view, view.reader.layer(layer), values.new_zeros(len(values), 0))
        self._kept = values
        self.through = through or layer
        """What the shares went through."""

    def of(self, view: View) -> _LayerHistory:
        """The same for the slots of another view."""
        assert self._kept is not None
        return _LayerHistory(view, self.layer, self._kept, self.through)

    def measure(self, some: slice) -> Measure:
        assert self._kept is not None
        return Known(self._kept[some])

    def sum_of_all(self, *, absolute: bool = False) -> Float[Tensor, "numbers"]:
        """Over the slots of the view."""
        return self.totals("step", absolute=absolute, bins=1).values.sum(dim=1)


def _losses(
    right: Bool[Tensor, "steps_and_one"], curve: Float[Tensor, "steps_and_one"]
) -> list[tuple[int, int, int | None]]:
    """When an answer was lost: since which step it fell, which step lost it, and which one regained it."""
    flags, losses, since = right.tolist(), [], 0
    for s, (now, then) in enumerate(itertools.pairwise(flags)):
        if then and not now:
            since = s + 1
        if now and not then:
            half = (curve[since : s + 1].max() + curve[s + 1]) / 2
            above = (curve[since : s + 1] >= half).nonzero().flatten().tolist()
            falls = since + above[-1] if above else s  # another output may have risen instead
            regained = next((later for later in range(s + 1, len(flags) - 1) if flags[later + 1]), None)
            losses.append((falls, s, regained))
    return losses


def _name_of(target: Target) -> str:
    if isinstance(target, str | int):
        return str(target)
    if callable(target):
        name = getattr(target, "__name__", "")
        return name if name.isidentifier() else "the number"
    return "each input's class"
