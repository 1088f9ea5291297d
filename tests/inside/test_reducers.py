"""Every reducer is a monoid: empty is neutral, merging is associative and commutative in its result, and how
the slots were cut into blocks does not matter. That is all that threads, processes or machines rely on."""

from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memories import mlp
from spotlights.memory.blocks import in_blocks
from spotlights.query import (
    Attention,
    columns,
    example_gradients,
    joint,
    kronecker,
    reducers,
    suspects,
)
from spotlights.query.coefficients import Coefficient, StepNumbers, unroll
from spotlights.query.example_gradients import VisitNumbers
from spotlights.query.plan import Measure
from spotlights.query.reducers import Reducer

few = settings(max_examples=6, deadline=None)


@cache
def attention(layer: str) -> Attention:
    run = mlp()
    return run.memory.attend(run.model, run.queries)[layer]


@cache
def blocks(layer: str, rows: int) -> list:
    a = attention(layer)
    return list(in_blocks(a.recorded, a.view.selection, rows))


class ReducerContract(ABC):
    """What an engine relies on."""

    layer = "2"

    @abstractmethod
    def make(self) -> Reducer:
        """An empty reducer."""

    @abstractmethod
    def result(self, reducer: Reducer) -> tuple[torch.Tensor, ...]:
        """What it has found."""

    def fed(self, reducer: Reducer, some: list) -> Reducer:
        values = self.measure().bind(attention(self.layer).view.reader, self.layer)
        for block in some:
            reducer.update(block, values(block))
        return reducer

    def measure(self) -> Measure:
        return attention(self.layer).measure(slice(0, 3))

    def whole(self) -> Reducer:
        return self.fed(self.make(), blocks(self.layer, 1000))

    def assert_same(self, one: Reducer, other: Reducer, claim: str) -> None:
        for a, b in zip(self.result(one), self.result(other), strict=True):
            assert a.shape == b.shape, f"{type(one).__name__}: {claim}"
            close = torch.allclose(a.double(), b.double(), rtol=1e-10, atol=1e-12, equal_nan=True)
            assert close, f"{type(one).__name__}: {claim}"

    def test_merging_an_empty_one_changes_nothing(self):
        whole = self.whole()
        whole.merge(whole.fresh())
        self.assert_same(whole, self.whole(), "an empty reducer must be neutral on the right")
        empty = self.make()
        empty.merge(self.whole())
        self.assert_same(empty, self.whole(), "an empty reducer must be neutral on the left")

    def test_a_fresh_one_is_empty_and_shares_nothing(self):
        whole = self.whole()
        fresh = whole.fresh()
        assert type(fresh) is type(whole)
        self.fed(fresh, blocks(self.layer, 1000))
        self.assert_same(whole, self.whole(), "fresh() must not share what it holds")
        self.assert_same(fresh, self.whole(), "fresh() must start empty")

    def test_the_size_of_blocks_does_not_matter(self):
        for rows in (7, 50):
            self.assert_same(
                self.fed(self.make(), blocks(self.layer, rows)), self.whole(), f"blocks of {rows} rows differ"
            )

    def test_the_order_of_blocks_does_not_matter(self):
        backwards = self.fed(self.make(), blocks(self.layer, 30)[::-1])
        self.assert_same(backwards, self.whole(), "it must not depend on the order of the blocks")

    def test_the_order_of_merging_does_not_matter(self):
        pieces = blocks(self.layer, 30)
        assert len(pieces) >= 6

        @few
        @given(
            owners=st.lists(st.integers(0, 2), min_size=len(pieces), max_size=len(pieces)),
            order=st.permutations(range(3)),
        )
        def claim(owners: list[int], order: list[int]) -> None:
            owned = list(zip(owners, pieces, strict=True))
            shares = [[block for owner, block in owned if owner == who] for who in range(3)]
            a, b, c = (self.fed(self.make(), shares[who]) for who in order)
            a.merge(b)
            a.merge(c)  # (a + b) + c
            self.assert_same(a, self.whole(), "merging must be associative and commutative")
            a, b, c = (self.fed(self.make(), shares[who]) for who in order)
            b.merge(c)
            a.merge(b)  # a + (b + c)
            self.assert_same(a, self.whole(), "merging must be associative and commutative")

        claim()


def grouping(layer: str, column: str):
    return attention(layer).grouping(column)


def unrolled(layer: str) -> StepNumbers:
    found = unroll(attention(layer).view.reader, layer, attention(layer).view.until)
    assert isinstance(found, StepNumbers)
    return found


class WithResult:
    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.result()


class TestLargest(WithResult, ReducerContract):
    layer = "0"  # whole numbers: many ties

    def make(self) -> Reducer:
        return reducers.TopReducer(3, 9, None)


class TestLargestPerGroup(WithResult, ReducerContract):
    layer = "0"

    def make(self) -> Reducer:
        return reducers.TopReducer(3, 4, grouping("0", "label"))


class TestSmallest(WithResult, ReducerContract):
    layer = "0"

    def make(self) -> Reducer:
        return reducers.TopReducer(3, 9, None, largest=False)


class TestAllValues(WithResult, ReducerContract):
    def make(self) -> Reducer:
        return reducers.AllValuesReducer(3)


class TestTotals(ReducerContract):
    column, absolute = "label", False

    def make(self) -> Reducer:
        return reducers.TotalsReducer(3, grouping("2", self.column), absolute=self.absolute)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.sums, reducer.counts


class TestAbsoluteTotals(TestTotals):
    column, absolute = "rating", True


class TestSampledTotals(TestTotals):
    def make(self) -> Reducer:
        return reducers.SampledTotalsReducer(3, grouping("2", "label"), absolute=False)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.sums, reducer.counts, reducer.squares

    def test_blocks_of_any_number_of_whole_steps_give_the_same_squares_of_their_sums(self):
        steps = self.fed(self.make(), blocks(self.layer, 30))  # five steps each
        torch.testing.assert_close(steps.step_squares, self.whole().step_squares, rtol=1e-10, atol=1e-12)
        assert bool((steps.step_squares > 0).any())


class TestLogSum(ReducerContract):
    def make(self) -> Reducer:
        return reducers.LogSumReducer(3)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.total,)


class TestWeights(ReducerContract):
    def measure(self) -> Measure:
        return Coefficient(unrolled(self.layer))

    def make(self) -> Reducer:
        return reducers.WeightsReducer(attention(self.layer).recorded.entry)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.weights, reducer.biases, reducer.counts


class TestWeightsOfIndexedKeys(TestWeights):
    layer = "0"


class TestGroupWeights(TestWeights):
    def make(self) -> Reducer:
        found = attention("2")
        cells = columns.cells(found.view, found.recorded, ["label"])
        return reducers.WeightsReducer(found.recorded.entry, cells)


class TestOutput(ReducerContract):
    def make(self) -> Reducer:
        return reducers.OutputReducer(3, 6, unrolled("2").weight, unrolled("2").bias)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.output,)


class TestKeySums(ReducerContract):
    def make(self) -> Reducer:
        return reducers.KeySumsReducer(7, grouping("2", "label"))

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.sums, reducer.counts, torch.tensor([reducer.smallest])


class TestKeyVisits(ReducerContract):
    layer = "0"

    def make(self) -> Reducer:
        return reducers.KeyVisitsReducer(attention("0").recorded.distinct_keys, grouping("0", "label"))

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.visits,)


class TestKeyMoments(ReducerContract):
    def make(self) -> Reducer:
        layer = attention(self.layer).recorded
        return reducers.KeyMomentsReducer(
            layer.entry.moments_shape, layer.distinct_keys if layer.entry.indexed else None
        )

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.result(), reducer.visits


class TestKeyMomentsOfIndexedKeys(TestKeyMoments):
    layer = "0"


class TestErrorSize(ReducerContract):
    def make(self) -> Reducer:
        return reducers.ErrorSizeReducer(attention("2").view.reader.log("2").factor["weight"])

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return torch.tensor(reducer.sum), torch.tensor(reducer.count)


class TestErrorSums(ReducerContract):
    def make(self) -> Reducer:
        factor = attention("2").view.reader.log("2").factor["weight"]
        return suspects.ErrorSumsReducer(6, grouping("2", "example"), factor, torch.full((len(factor),), 4))

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.sums, reducer.sizes, reducer.counts, reducer.agreed, reducer.last, torch.tensor(reducer.largest)


class TestCountByStep(ReducerContract):
    def make(self) -> Reducer:
        return reducers.CountReducer(grouping("2", "step"))

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.counts,)


class TestDistinct(ReducerContract):
    def make(self) -> Reducer:
        return columns.DistinctReducer("example")

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.from_numpy, reducer.result()))


class TestGroupRows(ReducerContract):
    def make(self) -> Reducer:
        groups = grouping("2", "label")
        return columns.GroupRowsReducer(groups, torch.arange(len(groups)) > 1, ["step"])

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        slots, codes, read = reducer.result()
        return slots, codes, read["step"]


class TestCount(ReducerContract):
    def make(self) -> Reducer:
        return reducers.CountReducer()

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.counts,)


def visit_numbers(layer: str) -> VisitNumbers:
    """Other numbers for the visits of each example; some visits are unknown."""
    pairs = torch.cat(
        [torch.stack([block.column("example"), block.column("step").long()], dim=1) for block in blocks(layer, 1000)]
    )
    pairs = pairs[(pairs[:, 0] >= 0) & (pairs.sum(dim=1) % 5 != 0)].unique(dim=0)
    examples, places = torch.unique(pairs[:, 0], return_inverse=True)
    return VisitNumbers(examples, places * 1000 + pairs[:, 1], 1000, 1.0 + torch.arange(len(pairs)).double())


class TestVisitErrors(WithResult, ReducerContract):
    layer = "4"

    def make(self) -> Reducer:
        return joint.VisitErrorsReducer(
            attention(self.layer).recorded.entry.out_features, torch.ones(1000, dtype=torch.float64)
        )


class TestExampleGradients(ReducerContract):
    layer = "2"

    def make(self) -> Reducer:
        width = attention(self.layer).recorded.entry.in_features + 1
        numbers = visit_numbers(self.layer)
        return example_gradients.ExampleGradientsReducer(numbers, slice(1, 3), width, True, torch.float64)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.sums,)


class TestKeyPairs(ReducerContract):
    layer = "0"

    def make(self) -> Reducer:
        return example_gradients.KeyPairsReducer(visit_numbers("0"), attention("0").recorded.distinct_keys)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.pairs,)


class TestKeyErrors(ReducerContract):
    layer = "0"

    def make(self) -> Reducer:
        recorded, numbers = attention("0").recorded, visit_numbers("0")
        pairs = self.fed(TestKeyPairs().make(), blocks("0", 1000))
        assert isinstance(pairs, example_gradients.KeyPairsReducer)
        distinct, outputs = recorded.distinct_keys, recorded.entry.out_features
        return example_gradients.KeyErrorsReducer(numbers, distinct, pairs.pairs, outputs, torch.float64)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.sums,)


class TestErrorMoments(ReducerContract):
    layer = "2"

    def make(self) -> Reducer:
        outputs = attention(self.layer).recorded.entry.out_features
        return kronecker.ErrorMomentsReducer(visit_numbers(self.layer), outputs, torch.float64)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.sum, torch.tensor(reducer.count)


def test_every_reducer_keeps_the_contract():
    tested = {type(contract().make()) for contract in below(ReducerContract) if not contract.__abstractmethods__}
    of_sweeps = {reducers.LastReducer}  # takes the end of a sweep, which is one value
    assert set(below(Reducer)) - of_sweeps <= tested, "write a contract test for the new reducer: one small class here"


def below(base: type) -> list[type]:
    return [found for kind in base.__subclasses__() for found in (kind, *below(kind))]
