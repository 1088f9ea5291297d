"""`Attention`: one layer's attention over its training slots, for some queries; `Spotlights`: that of all layers."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.dual_form import linear_map
from spotlights.errors import SettingError, TooLargeError, UnknownNameError, UnsupportedError
from spotlights.memory.layer_reader import LayerReader
from spotlights.query import kronecker
from spotlights.query.columns import Grouping
from spotlights.query.contraction import DirectedQueries
from spotlights.query.contributions import Contributions, rows_note
from spotlights.query.distinct_keys import VisitedKeyTotals
from spotlights.query.engine import Progress, View
from spotlights.query.example_gradients import LayerQueries
from spotlights.query.forecast import forecast
from spotlights.query.forward import ForwardPass, InputRows, Target, parts_of
from spotlights.query.history import AskedNetwork, History, Targets, find_history
from spotlights.query.influence import RULES, Influence, LayerInfluence, unsupported_influence
from spotlights.query.joint import (
    MOST,
    MOST_UNASKED,
    JointInfluence,
    answering_layer,
    find_joint,
    joint_layers,
    unsupported_joint,
)
from spotlights.query.measured import AskTop, AskTotals, LayerMeasured, Question, ask
from spotlights.query.measures import Score
from spotlights.query.passages import find_passages
from spotlights.query.plan import Measure
from spotlights.query.reducers import KeySumsReducer, KeyVisitsReducer, LogSumReducer
from spotlights.results.answers import Totals
from spotlights.results.forecasts import Forecast
from spotlights.results.pages import table_page
from spotlights.results.tables import build
from spotlights.sparse_rows import Numbers, dense, scaled_rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KERNELS = ("dot", "cosine", "cosine-parts", "softmax")
MANY_QUERIES, FEW_GROUPS = 16, 256
"""From that many queries on, and up to that many groups, it pays to add up the keys of each group first."""
QUERIES_AT_ONCE = 512


class Attention(LayerMeasured):
    """One layer's attention over its training slots, for some queries; made by `Memory.attend`."""

    what = "score"

    def __init__(
        self,
        view: View,
        recorded: LayerReader,
        forward: ForwardPass,
        kernel: str,
        *,
        part: str | None = None,
        use: str | None = None,
        differs: str | None = None,
    ) -> None:
        """`use`: a module that uses the layer's transposed weight, whose attention this is; `differs`: how the model
        differs from the memory, which contributions say."""
        self.use = use or recorded.name
        self.transposed = use is not None
        super().__init__(view, recorded, forward.calls[self.use].rows.cpu())
        self.kernel = kernel
        self.part = part
        self._differs = differs
        self._forward = forward
        self._rows: list[int] | None = None
        """Which of the layer's rows in the pass; None for all."""
        self._summed = self._weighted = False

    def __len__(self) -> int:
        return 1 if self._summed else len(self.queries)

    def at(self, query: int | Sequence[int]) -> Attention:
        """The attention of one query alone, or of some: of one input, or of positions of a text."""
        wanted = [query] if isinstance(query, int) else list(query)
        if any(not 0 <= number < len(self.queries) for number in wanted):
            raise SettingError(f"at({query}): there are queries 0 to {len(self.queries) - 1}.")
        rows = wanted if self._rows is None else [self._rows[number] for number in wanted]
        return self._with(queries=self.queries[wanted], _rows=rows)

    def whole(self) -> Attention:
        """The attention of an input that this layer sees as many rows: added up over them (docs/layers.md).

        Of several inputs, scores add up over the rows of all of them; contributions are one for each input.
        """
        return self._with(_summed=True)

    def weighted(self) -> Attention:
        """Scores times the norm of the error: a slot that taught nothing has no weight, however similar its key."""
        self._need_plain("Weighted scores are")
        if self.transposed:
            raise UnsupportedError(f'Weighted scores are about "{self.layer}", not about "{self.use}".')
        reader = self.view.reader
        reader.need_visits("the error of each visit to weight by", "Ask for plain scores")
        reader.need_errors("Weighted scores need")
        return self._with(what="weighted score", _weighted=True)

    passages = find_passages

    @property
    def note(self) -> str | None:
        notes = [super().note]
        if self.kernel != "dot":
            notes.append(f'kernel "{self.kernel}": for looking; contributions use the plain product')
        if self.part is not None:
            notes.append(f'the part "{self.part}" of the keys alone')
        if self._summed:
            notes.append(rows_note([len(self.queries)]))
        return "; ".join(note for note in notes if note) or None

    def measure(self, some: slice) -> Measure:
        queries = self.queries if self._summed else self.queries[some]
        if self.transposed:
            if self.kernel != "dot":
                raise UnsupportedError(
                    f'"{self.use}" uses the transposed weight of "{self.layer}": it has the plain product alone, '
                    f'not kernel="{self.kernel}".'
                )
            return Score(queries, transposed=True, summed=self._summed)
        if self.kernel == "softmax":
            return self._softmax(queries)
        parts = self._key_parts
        cosine = self.kernel.startswith("cosine")
        return Score(queries, cosine, parts, weighted=self._weighted, summed=self._summed)

    @property
    def _key_parts(self) -> tuple[tuple[str, ...], ...] | None:
        if self.part is not None:
            return ((self.part,),)
        if self.kernel == "cosine-parts":
            return tuple((name,) for name in self.recorded.entry.stretches)
        return None

    def _softmax(self, queries: Numbers) -> Score:
        """One pass over all slots of the view finds what to divide by."""
        reader = self.view.reader
        reader.need_visits("the score of each visit, which a softmax takes one by one", "Use another kernel")
        reader.need_all_slots("A softmax divides by the sum over", "Use another kernel")
        columns = self.recorded.entry.stretches
        names = columns if self.part is None else [self.part]
        width = sum(columns[name].stop - columns[name].start for name in names)
        scaled = scaled_rows(queries, torch.full((len(queries),), width**-0.5, dtype=torch.float64))
        logits = Score(scaled, key_parts=self._key_parts)
        total = self.view.reduce(self.layer, LogSumReducer(len(queries)), logits).total
        return replace(logits, shift=total[:, None], summed=self._summed)

    def scores(self) -> Float[Tensor, "queries slots"]:
        """The score of every slot of the view, in the order of their numbers."""
        return self._values_and_slots()[0]

    def totals(self, column: str, *, absolute: bool = False, bins: int | None = None) -> Totals:
        question = AskTotals(column, absolute, bins)
        question.check(self)
        plain = self.kernel == "dot" and self.part is None and self.sample is None
        special = self.transposed or self._summed or self._weighted or self._magnitudes or self._kept is not None
        if plain and not special:
            groups = self.grouping(column, bins)
            if len(self.queries) >= MANY_QUERIES and len(groups) <= FEW_GROUPS:
                added_up = self._from_added_up_keys(groups, absolute=absolute)
                if added_up is not None:
                    return question.totals(self, *added_up)
        return self.ask(question)[0]

    totals.__doc__ = LayerMeasured.totals.__doc__

    def _from_added_up_keys(
        self, groups: Grouping, *, absolute: bool
    ) -> tuple[Float[Tensor, "queries groups"], Int64[Tensor, "groups"]] | None:
        """Totals and numbers of slots without a score for each slot; None where each |score| is needed.

        Where keys are stored once, each distinct key is scored once and counted as often as each group visited it.
        Elsewhere the sum of a group's scores is the product of the query with the sum of the group's keys. Where
        neither keys nor queries are negative (a layer behind a ReLU), the same holds for |score|.
        """
        recorded = self.recorded
        if not recorded.entry.indexed:
            keys = self.view.reduce(self.layer, KeySumsReducer(recorded.entry.in_features, groups))
            if absolute and min(keys.smallest, float(self.queries.min())) < 0:
                return None
            return linear_map(self.queries.double(), keys.sums), keys.counts
        visits = self.view.reduce(self.layer, KeyVisitsReducer(recorded.distinct_keys, groups)).visits
        queries = dense(self.queries).to(recorded.storage.compute_dtype)
        some_at_once = queries.split(QUERIES_AT_ONCE)
        totals = self.view.values(*((self.layer, VisitedKeyTotals(some, visits, absolute)) for some in some_at_once))
        return torch.cat(totals), visits.sum(dim=1)

    def contributions(
        self, target: Target | None = None, *, unit: int | None = None, rows: bool = False
    ) -> Contributions:
        """What each slot adds to a number of interest: signed, and adding up.

        Where the layer sees an input as several rows (tokens, positions of a convolution), they are added up: the
        answer is about inputs.

        Args:
            target: a class (the logit of that class), "7-9" (the logit of 7 minus that of 9), one class for each input,
                or a function of the model's output that gives one number for each input.
            unit: instead of a target: an output unit of this layer, whatever follows it.
            rows: an answer for each row of an input.
        """
        self._need_plain("Contributions are")
        if (target is None) == (unit is None):
            raise SettingError("Give a target (a class, or a function of the model's output) or unit=, and not both.")
        asked = self._forward.rows_of_inputs(self.use, target, unit=unit)
        adds_up = self._forward.adds_up(self.use, target, asked)
        inputs = None
        if rows or self._rows is not None:
            own = self._forward.directions(self.use, target, unit).cpu()
            queries, own = self.queries, own if self._rows is None else own[self._rows]
        else:
            asked, inputs = asked.by_input()
            queries, own = self.queries[asked.rows], asked.directions
        # gᵀ Wᵀ q is qᵀ W g: under the transposed weight, queries and directions swap roles.
        pair = (own, dense(queries)) if self.transposed else (queries, own)
        directed = DirectedQueries(*pair, own.new_ones(len(own)))
        options: dict[str, Any] = {"adds_up": adds_up, "differs": self._differs, "inputs": inputs}
        contributions = Contributions(self.view, self.recorded, directed, **options)
        return contributions.whole() if self._summed and self._rows is not None else contributions

    def rows_of_inputs(self, target: Target) -> InputRows:
        """The rows of this layer that each input's number of interest depends on."""
        return self._forward.rows_of_inputs(self.use, target)

    def influence(self, target: Target, *, damping: float | None = None, balance: bool = True) -> Influence:
        """An estimate of what leaving examples out would do to a number of interest, through this layer alone.

        The sum over all layers, `memory.attend(model, x).influence(…)`, is the better estimate.

        Args:
            target: as for `contributions`.
            damping: λ of the whitening. The measured default is in docs/truth.md; the larger, the more like
                contributions.
            balance: as for the influence over all layers.
        """
        return Influence([self.layer_influence(self.rows_of_inputs(target), damping, balance=balance)])

    def layer_influence(self, asked: InputRows, damping: float | None, *, balance: bool) -> LayerInfluence:
        """This layer's share of an influence."""
        self._need_influence()
        asked, inputs = asked.by_input()
        options: dict[str, Any] = {"inputs": inputs, "damping": damping, "differs": self._differs, "balance": balance}
        return LayerInfluence(self.view, self.recorded, self.queries[asked.rows], asked.directions, **options)

    def _need_influence(self) -> None:
        self._need_plain("Influence is")
        reason = unsupported_influence(self.recorded.entry)
        if self.transposed or reason is not None:
            raise UnsupportedError(
                f'There is no estimate of influence through "{self.use}": {reason or "its weight is shared"}. '
                "Its contributions are exact."
            )

    def layer_queries(self, asked: InputRows) -> LayerQueries:
        """The gradient of a number of interest with respect to this layer's weights, as the joint estimate needs it."""
        self._need_influence()
        directions = asked.directions
        queries = DirectedQueries(self.queries[asked.rows], directions, directions.new_ones(len(directions)))
        return LayerQueries(queries, asked.owners, asked.inputs)

    @property
    def gives_output(self) -> bool:
        """Whether the model's output is this layer's."""
        return self._forward.gives(self.use, parts_of(self._forward.output).values())

    def _need_plain(self, what: str) -> None:
        if self.kernel != "dot":
            raise UnsupportedError(f'{what} about the plain product, not about kernel="{self.kernel}".')
        if self.part is not None:
            raise UnsupportedError(f'{what} about the whole key, not about part="{self.part}" of it.')

    def plot(self, query: int = 0, *, per: str = "label", k: int = 500, **options: Any) -> Figure:
        """The top k scores of each group and the totals of the groups, side by side; one scan for both."""
        from spotlights import figures

        top, totals = self.ask(AskTop(k, per), AskTotals(per))
        return figures.plot_attention(top.panel(query), totals.panel(query), **options)

    def __repr__(self) -> str:
        queries = "1 query" if len(self) == 1 else f"{len(self)} queries"
        return f"Attention({self.layer}: {queries} over {self.recorded.slots:,} slots)"

    def _repr_html_(self) -> str:
        return _as_html([self])


def _as_html(attentions: Iterable[Attention]) -> str:
    """In a notebook: which layers can be asked, and how."""
    rows = [[one.layer, len(one), f"{one.recorded.slots:,}"] for one in attentions]
    note = "ask a layer with .top(), .totals(column), .contributions(target)"
    return table_page(build("attention over training slots", ["layer", "queries", "slots"], rows, note), None).html


class Spotlights(dict[str, Attention]):
    """The attention of every layer, by name; made by `Memory.attend`."""

    def __init__(self, attentions: dict[str, Attention], output: Any, asked: AskedNetwork) -> None:
        super().__init__(attentions)
        self.asked = asked
        """The view, the model and the inputs."""
        self.output = output.detach() if isinstance(output, Tensor) else output
        """What the model answered."""

    def __missing__(self, layer: str) -> Attention:
        raise UnknownNameError(f'No layer "{layer}" in this memory. It has: {", ".join(self)}.')

    def influence(
        self,
        target: Target,
        *,
        rule: str | None = None,
        loss: str | None = None,
        layers: str | Sequence[str] | None = None,
        damping: float | None = None,
        balance: bool = True,
    ) -> Influence:
        """An estimate of what leaving examples out would do to a number of interest, over all layers.

        Layers that map parts of their keys apart (grouped convolutions, normalisations) are left out of the estimate.
        Positive: without the example the number would be smaller. Groups: `.totals("label")`. The estimate and
        its limits are in docs/truth.md; what an answer is made of, exactly, is `contributions`.

        Args:
            target: a class (the logit of that class), one class for each input, or a function of the model's
                output that gives one number for each input.
            rule: "whitened" (contributions with whitened keys, layer by layer), "joint" (Gauss-Newton over all layers
                at once, in the space of examples) or "both" (their sum, the second scaled to the spread of the first
                over the training examples). None: "both" for classes, "joint" for a squared loss and for texts;
                "whitened" where a joint estimate is not possible or would take more than some minutes.
            loss: "classes" (a cross-entropy), "squared" or "tokens" (a cross-entropy at each of many positions, as of
                a language model: the inverse is then that of K-FAC, in the space of weights, and `target` is also asked
                of the networks after each quarter of training); None to tell by the recorded errors. What is not a
                cross-entropy over several outputs counts as squared.
            layers: names or patterns (`"transformer.h.*"`) of the layers to go through; all by default.
            damping: λ; None for the measured defaults, 0.3 for "whitened", 1 for "joint", 0.02 for texts.
            balance: divide each layer's share by the mean square of its errors ("whitened") or of its examples'
                gradients ("joint"), so that no layer counts by its scale alone. False adds the shares up as they are.
        """
        if rule is not None and rule not in RULES:
            raise SettingError(f'rule="{rule}": there are {", ".join(RULES)}.')
        estimated, left_out = self.influence_layers()
        if layers is not None:
            estimated, left_out = self._named(layers), []
        attentions = [self[name] for name in estimated]
        asked = {attention.layer: attention.rows_of_inputs(target) for attention in attentions}
        joint, too_large = None, False
        if rule != "whitened" and attentions:
            try:
                joint = self._joint(target, asked, attentions, loss=loss, damping=damping, balance=balance, rule=rule)
            except (TooLargeError, UnsupportedError) as error:
                if rule is not None:
                    raise
                too_large = isinstance(error, TooLargeError)
        if joint is not None and (rule == "joint" or (rule is None and joint.loss != "classes")):
            left_out += [name for name in estimated if name not in joint.layers]
            return Influence([joint], left_out=left_out)
        parts = [
            attention.layer_influence(asked[attention.layer], damping, balance=balance) for attention in attentions
        ]
        whitened = Influence(parts, left_out=left_out, too_large=too_large)
        if joint is None:
            return whitened
        return Influence([*parts, joint.scaled_to(whitened.spread())], left_out=left_out)

    def _named(self, layers: str | Sequence[str]) -> list[str]:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        unknown = [pattern for pattern in patterns if not fnmatch.filter(self, pattern)]
        if unknown or not patterns:
            raise UnknownNameError(f"No layer matches {unknown}. The memory has: {', '.join(self)}.")
        return [name for name in self if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]

    def forecast(self, target: Target, *, without: Mapping[str, Any], curvature: float = 2.0) -> Forecast:
        """The number of interest after retraining without a group, in its own unit, with an interval of 95 %.

        Retraining means from fresh initial weights, on the other examples. Under a squared loss one run is enough; for
        classes `Memory.calibrate` has to retrain a few times first. How often the intervals hold is in docs/truth.md.

        Args:
            target: as for `influence`.
            without: the examples to leave out, by their columns: `{"label": 3}`, `{"example": [4, 8]}`.
            curvature: of a squared loss: the second derivative of an example's loss with respect to the output. 2 for
                `F.mse_loss`, 1 for half of it.
        """
        return forecast(self, target, without, curvature=curvature)

    def _joint(
        self,
        target: Target,
        asked: Mapping[str, InputRows],
        attentions: Sequence[Attention],
        *,
        loss: str | None,
        damping: float | None,
        balance: bool,
        rule: str | None,
    ) -> JointInfluence | None:
        """The joint estimate; None where nobody asked for it and it is not possible."""
        view = attentions[0].view
        names = joint_layers(view.reader, [attention.layer for attention in attentions])
        if rule is None and (not names or unsupported_joint(view.reader) is not None):
            return None
        outputs = [name for name, attention in self.items() if not attention.transposed and attention.gives_output]
        most = MOST_UNASKED if rule is None else MOST
        answering = answering_layer(view.reader, outputs)
        joint = find_joint(view, names, answering, loss, balance=balance, most=most)
        used = [attention for attention in attentions if attention.layer in joint.layers]
        networks = [{attention.layer: attention.layer_queries(asked[attention.layer]) for attention in used}]
        if joint.visits.loss == "tokens":
            for model in kronecker.earlier_networks(view, self.asked.model):
                forward = ForwardPass(model, self.asked.inputs, view.reader.manifest.layers)
                earlier = [Attention(view, attention.recorded, forward, "dot") for attention in used]
                networks.append({own.layer: own.layer_queries(own.rows_of_inputs(target)) for own in earlier})
        return joint.influence(view, networks, damping=damping)

    def history(self, target: Targets, *, progress: Progress = lambda share: None) -> History:
        """What each slot added to a number of interest during training, through all layers: exact, and checked.

        Takes about as long as training did: the weights of every step are rebuilt from the slots, and the sweep goes
        back over them. An account of what happened, not a forecast (docs/history.md).

        Args:
            target: a class (the logit of that class); "7-9" (the logit of 7 minus that of 9); one class for each input;
                a function of the model's output that gives one number for each input, such as a loss; or several of
                these by name: `{"7": 7, "why 7, not 9": "7-9"}`.
            progress: is told the share that is done.
        """
        return find_history(self.asked, target, progress)

    def influence_layers(self) -> tuple[list[str], list[str]]:
        """The layers through which influence is estimated, and those which it leaves out."""
        entries = {name: attention.recorded.entry for name, attention in self.items()}
        left_out = [name for name, entry in entries.items() if unsupported_influence(entry) is not None]
        return [name for name in self if name not in left_out], left_out

    def ask(self, *questions: Question) -> dict[str, list[Any]]:
        """Answers several questions about all layers in one pass."""
        answers = ask(list(self.values()), questions)
        return dict(zip(self, answers, strict=True))

    def __repr__(self) -> str:
        return "\n".join(repr(attention) for attention in self.values())

    def _repr_html_(self) -> str:
        return _as_html(self.values())
