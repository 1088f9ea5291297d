"""`Attention`: one layer's spotlights for some queries; `Contributions`: what they add to an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.by_input import by_matrix, group_products
from spotlights.attention.forward import ForwardPass, Target
from spotlights.attention.grouping import Grouping
from spotlights.attention.key_sums import quick_totals
from spotlights.attention.measure import Measure, View, ask
from spotlights.attention.pairs import Directed
from spotlights.attention.passage_results import Passages
from spotlights.attention.passages import find_passages
from spotlights.attention.products import Products, error_products
from spotlights.attention.questions import AskTotals, Question
from spotlights.attention.reducers import LogSumReducer
from spotlights.attention.results import Top, Totals
from spotlights.attention.scan import Job, SweptValues, Values, scan
from spotlights.attention.unrolled import Unrolled
from spotlights.errors import SettingError, UnknownNameError, UnsupportedError
from spotlights.memory.blocks import Block
from spotlights.memory.layer_reader import LayerReader
from spotlights.optimizers import rule_named

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spotlights.attention.influence import Influence, LayerInfluence
    from spotlights.attention.whole import WholeContributions, WholeScores

KERNELS = ("dot", "cosine", "cosine-parts", "softmax")


class Attention(Measure):
    """One layer's attention over its training slots, for some queries; made by `Memory.attend`."""

    what = "score"

    def __init__(
        self,
        view: View,
        layer: LayerReader,
        forward: ForwardPass,
        kernel: str,
        *,
        part: str | None = None,
        chosen: Sequence[int] | None = None,
        use: str | None = None,
    ) -> None:
        """`use`: the name of a module that uses the layer's weight the other way round, if it is about that one."""
        self.use = use or layer.name
        self.turned = use is not None
        rows = forward.calls[self.use].rows.cpu()
        super().__init__(view, layer, rows if chosen is None else rows[list(chosen)])
        self.kernel = kernel
        self.part = part
        if part is not None:
            self.parts = [[part]]
        elif kernel == "cosine-parts":
            self.parts = [[name] for name in layer.entry.stretches]
        else:
            self.parts = [list(layer.entry.stretches)]
        self._forward = forward
        self._chosen = chosen

    def at(self, query: int | Sequence[int]) -> Attention:
        """The attention of one query alone, or of some: of one input, or of positions of a text."""
        wanted = [query] if isinstance(query, int) else list(query)
        if any(not 0 <= each < len(self.queries) for each in wanted):
            raise SettingError(f"at({query}): there are queries 0 to {len(self.queries) - 1}.")
        rows = range(len(self._forward.calls[self.use].rows)) if self._chosen is None else self._chosen
        chosen = [rows[each] for each in wanted]
        use = self.use if self.turned else None
        return Attention(self.view, self.layer, self._forward, self.kernel, part=self.part, chosen=chosen, use=use)

    def whole(self) -> WholeScores:
        """The attention of a whole input that this layer sees as many rows: added up over them (docs/layers.md)."""
        from spotlights.attention.whole import WholeScores

        return WholeScores(self)

    def passages(
        self,
        text: Sequence[str],
        *,
        prompt: Sequence[str] | None = None,
        tokens: Sequence[int] = (-1,),
        k: int = 10,
        around: int | None = None,
        target: Target | None = None,
    ) -> Passages:
        """The k passages of the training text that tokens of a prompt attend to most, or that add most to an answer.

        For a memory whose examples are the positions of a text: `recorder.batch(example=positions)`. The scores of a
        position are added up over its visits.

        Args:
            text: the training text: a string of characters, or a list of words.
            prompt: the tokens that the network was run on, to be shown.
            tokens: which of them to ask about; the last one by default. Each passage counts the best of its
                positions for each of them.
            k: how many passages.
            around: show at most so many tokens on either side of one that is attended to.
            target: a number of interest, as for `contributions`: passages are then found by what they add to it
                through these tokens, not by their scores.
        """
        return find_passages(self, text, prompt=prompt, tokens=tokens, k=k, around=around, target=target)

    @property
    def note(self) -> str | None:
        notes = [super().note]
        if self.kernel != "dot":
            notes.append(f'kernel "{self.kernel}": for looking; contributions use the plain product')
        if self.part is not None:
            notes.append(f'the part "{self.part}" of the keys alone')
        return "; ".join(note for note in notes if note) or None

    def values(self, chosen: slice) -> Values:
        return self._values_of(self.queries[chosen])

    def _values_of(self, queries: Float[Tensor, "queries in_features"]) -> Values:
        if self.turned:
            if self.kernel != "dot":
                raise UnsupportedError(
                    f'"{self.use}" uses the weight of "{self.layer.name}" the other way round: it has the plain '
                    f'product alone, not kernel="{self.kernel}".'
                )
            directions = queries.to(self.layer.storage.compute_dtype)
            return lambda block: error_products(block, directions)
        products = Products(self.layer, queries, parts=self.parts, cosine=self.kernel.startswith("cosine"))
        return _softmax(self, products, queries) if self.kernel == "softmax" else products

    def scores(self) -> Float[Tensor, "queries slots"]:
        """The score of every slot of the view, in the order of their numbers."""
        return self._all("The scores")[0]

    def totals(self, column: str, *, absolute: bool = False, bins: int | None = None) -> Totals:
        question = AskTotals(column, absolute, bins)
        question.check(self)
        if self.kernel == "dot" and self.part is None and not self.turned and self.sample is None:
            quick = quick_totals(
                self.layer,
                self.view.selection,
                self.queries,
                self.grouping(column, bins),
                absolute=absolute,
            )
            if quick is not None:
                return question.totals(self, *quick)
        return self.ask(question)[0]

    totals.__doc__ = Measure.totals.__doc__

    def contributions(self, target: Target) -> Contributions:
        """What each slot adds to a number of interest: signed, and adding up.

        Args:
            target: a class (the logit of that class), one class for each input, or a function of the model's
                output that gives one number for each input.
        """
        self._need_plain("Contributions are")
        directions = self._forward.directions(self.use, target)
        exact = self._forward.adds_up(self.use, target, directions)
        pair = self.queries, directions.cpu() if self._chosen is None else directions.cpu()[list(self._chosen)]
        # gᵀ Wᵀ q is qᵀ W g: seen from the other side, queries and directions change places.
        return Contributions(self.view, self.layer, *(pair[::-1] if self.turned else pair), exact=exact)

    def owners(self, target: Target) -> tuple[Int64[Tensor, "queries"], int]:
        """Which input each query belongs to, and how many inputs there are: those the target has numbers for."""
        return self._forward.inputs_of(self.use, target)

    def influence(self, target: Target, *, damping: float | None = None) -> Influence:
        """An estimate of what leaving examples out would do to a number of interest, through this layer alone.

        The sum over all layers, `memory.attend(model, x).influence(…)`, is the better estimate.

        Args:
            target: as for `contributions`.
            damping: λ of the whitening. The measured default is in docs/truth.md; the larger, the more like
                contributions.
        """
        from spotlights.attention.influence import Influence

        owners, inputs = self.owners(target)
        return Influence([self._influence_part(target, damping)], [owners], inputs=inputs)

    def _influence_part(self, target: Target, damping: float | None) -> LayerInfluence:
        from spotlights.attention.influence import DAMPING, LayerInfluence  # it builds on Contributions, below

        self._need_plain("Influence is")
        if self.turned or self.layer.entry.turned:
            raise UnsupportedError(
                f'The weight of "{self.layer.name}" is shared by two kinds of layers: there is no estimate of '
                "influence through it. Its contributions are exact."
            )
        if self.layer.entry.groups > 1:
            raise UnsupportedError(
                f'Layer "{self.layer.name}" maps {self.layer.entry.groups} parts of its keys apart from each other: '
                "there is no estimate of influence through such a layer. Its contributions are exact."
            )
        owners, inputs = self.owners(target)
        return LayerInfluence(
            self.view,
            self.layer,
            self.queries,
            self._forward.directions(self.layer.name, target).cpu(),
            damping=DAMPING if damping is None else damping,
            rows=len(owners) / inputs,
        )

    def _need_plain(self, what: str) -> None:
        if self.kernel != "dot":
            raise UnsupportedError(f'{what} about the plain product, not about kernel="{self.kernel}".')
        if self.part is not None:
            raise UnsupportedError(f'{what} about the whole key, not about part="{self.part}" of it.')

    def plot(self, query: int = 0, **options: Any) -> Figure:
        """The top 500 scores per label and their totals, side by side."""
        from spotlights import figures

        return figures.plot_attention(self, query, **options)

    def __repr__(self) -> str:
        return f"Attention({self.layer.name}: {len(self.queries)} queries over {self.layer.slots:,} slots)"


def _softmax(measure: Attention, products: Products, queries: Tensor) -> Values:
    """Normalises over all slots of the view: one scan to find what to divide by."""
    measure.view.reader.need_visits("the score of each visit, which a softmax takes one by one", "Use another kernel")
    measure.view.reader.need_all_slots("A softmax divides by the sum over", "Use another kernel")
    stretches = measure.layer.entry.stretches
    scale = sum(stretches[name].stop - stretches[name].start for part in measure.parts for name in part) ** -0.5

    def scaled(block: Block) -> Tensor:
        return products(block).mul_(scale)

    total = LogSumReducer(len(queries))
    scan([Job(measure.layer, measure.view.selection, len(queries), scaled, [total])])
    shift = total.total[:, None]
    return lambda block: scaled(block).double().sub_(shift).exp_().to(queries.dtype)


# -- contributions ----------------------------------------------------------------------------


class Contributions(Measure):
    """What each slot adds to a number of interest, through one layer; made by `Attention.contributions`.

    In the last layer the number is the layer's own output and the sum is exact. In a hidden layer each
    contribution is first order: what it adds to the layer's output, times how the number of interest changes
    with that output.
    """

    what = "contribution"

    def __init__(
        self,
        view: View,
        layer: LayerReader,
        queries: Float[Tensor, "queries in_features"],
        directions: Float[Tensor, "queries out_features"],
        *,
        exact: bool,
        unrolled: Unrolled | None = None,
    ) -> None:
        super().__init__(view, layer, queries)
        self.exact = exact and self.sample is None
        self._first_order = not exact
        self._directions = directions
        self._bias_queries = torch.ones(len(queries))
        self._unrolled = unrolled or view.unrolled(layer.name)

    @property
    def note(self) -> str | None:
        order = "first order: a hidden layer's share, through the gradient of the target" if self._first_order else None
        rule = rule_named(self.view.reader.manifest.rule)
        rounding = None if rule is None else rule.note
        return "; ".join(n for n in (order, rounding, super().note) if n) or None

    def values(self, chosen: slice) -> Values | SweptValues:
        return self._unrolled.contributions(self.directed(chosen))

    def directed(self, chosen: slice = slice(None)) -> Directed:
        """The queries, or some of them, with their directions."""
        return Directed(self.queries[chosen], self._directions[chosen], self._bias_queries[chosen])

    def totals_by_input(
        self, grouping: Grouping, owners: Int64[Tensor, "queries"], inputs: int
    ) -> tuple[Float[Tensor, "inputs groups"], Int64[Tensor, "groups"]] | None:
        """Sums over the slots of each group and the rows of each input; None where asking slot by slot is cheaper."""
        queries, groups = len(self.queries), len(grouping)
        if self.sample is not None:
            return None  # it has to be seen how the slots vary
        if not by_matrix(self.layer, self._unrolled, queries=queries, inputs=inputs, groups=groups):
            return None
        parts = self._unrolled.group_parts(self.view.selection, grouping)
        found = group_products(parts, self.directed(), owners, inputs=inputs)
        return found, parts.counts

    def whole(self) -> WholeContributions:
        """Added up over the queries: the contributions to a whole input that this layer sees as many rows."""
        from spotlights.attention.whole import WholeContributions

        return WholeContributions(self)

    @property
    def initial(self) -> Float[Tensor, "queries"]:
        """The part of the number that the initial weights make up."""
        return (self._unrolled.initial.output(self.queries) * self._directions.double()).sum(dim=1)

    def total(self) -> Float[Tensor, "queries"]:
        """The sum over all slots of the view. With `initial`: the number itself, if nothing is masked.

        Of a sample it is an estimate; `totals("step", bins=1)` has its standard error too.
        """
        return self.totals("step", bins=1).values[:, 0] if self.layer.slots else torch.zeros(len(self.queries))

    def bottom(self, k: int = 10, *, by: str | None = None, per: str | None = None) -> Top:
        """The k slots that speak most against the number; arguments as in `top`."""
        return self._top(k, by=by, per=per, largest=False)

    def numpy(self) -> Any:
        """The contribution of every slot, of shape (queries, slots)."""
        return self._all("The contributions")[0].numpy()

    def __repr__(self) -> str:
        kind = "first order" if self._first_order else "exact" if self.exact else "estimates"
        return f"Contributions({self.layer.name}: {len(self.queries)} queries, {kind})"


class Spotlights(Mapping[str, Attention]):
    """The attention of every layer, by name; made by `Memory.attend`."""

    def __init__(self, attentions: dict[str, Attention], output: Any) -> None:
        self._attentions = attentions
        self.output = output.detach() if isinstance(output, Tensor) else output
        """What the model answered."""

    def __getitem__(self, layer: str) -> Attention:
        if layer not in self._attentions:
            known = ", ".join(self._attentions)
            raise UnknownNameError(f'No layer "{layer}" in this memory. It has: {known}.')
        return self._attentions[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._attentions)

    def __len__(self) -> int:
        return len(self._attentions)

    def influence(self, target: Target, *, damping: float | None = None) -> Influence:
        """An estimate of what leaving examples out would do to a number of interest, over all layers.

        Layers that map parts of their keys apart (grouped convolutions, normalisations) are left out of the estimate.
        Positive: without the example the number would be smaller. Groups: `.totals("label")`. The estimate and
        its limits are in docs/truth.md; what an answer is made of, exactly, is `contributions`.

        Args:
            target: a class (the logit of that class), one class for each input, or a function of the model's
                output that gives one number for each input.
            damping: λ of the whitening; None for the measured default.
        """
        from spotlights.attention.influence import Influence

        estimated, left_out = self.influence_layers()
        attentions = [self._attentions[name] for name in estimated]
        parts = [attention._influence_part(target, damping) for attention in attentions]
        rows = [attention.owners(target) for attention in attentions]
        return Influence(
            parts,
            [owners for owners, _ in rows],
            inputs=max((count for _, count in rows), default=0),
            left_out=left_out,
        )

    def influence_layers(self) -> tuple[list[str], list[str]]:
        """The layers through which influence is estimated, and those which it leaves out."""
        entries = {name: each.layer.entry for name, each in self._attentions.items()}
        apart = [name for name, entry in entries.items() if entry.groups > 1 or entry.turned]
        return [name for name in self._attentions if name not in apart], apart

    def ask(self, *questions: Question) -> dict[str, list[Any]]:
        """Answers several questions about all layers in one scan."""
        answers = ask(list(self._attentions.values()), questions)
        return dict(zip(self._attentions, answers, strict=True))

    def __repr__(self) -> str:
        return "\n".join(repr(attention) for attention in self._attentions.values())
