"""Every reducer is a monoid: empty is neutral, merging is associative and commutative in its result, and how
the slots were cut into blocks does not matter. That is all that threads, processes or machines rely on."""

import importlib
import pkgutil
from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spotlights.attention
from memories import mlp
from spotlights.attention import Attention
from spotlights.attention.cell_sums import CellPartsReducer
from spotlights.attention.group_weights import Cells
from spotlights.attention.key_sums import KeySumsReducer, VisitsReducer
from spotlights.attention.means import MeansReducer
from spotlights.attention.questions import AskTop
from spotlights.attention.reducers import (
    LargestReducer,
    LogSumReducer,
    OutputReducer,
    PartsReducer,
    Reducer,
    SampledTotalsReducer,
    ScoresReducer,
    TotalsReducer,
)
from spotlights.attention.suspects import DisagreementReducer
from spotlights.attention.unrolled import UnrolledNumbers
from spotlights.attention.whitening import MomentsReducer
from spotlights.memory.blocks import in_blocks

few = settings(max_examples=6, deadline=None)


@cache
def attention(layer: str) -> Attention:
    run = mlp()
    return run.memory.attend(run.model, run.queries)[layer]


@cache
def blocks(layer: str, rows: int) -> list:
    a = attention(layer)
    return list(in_blocks(a.layer, a.view.selection, rows))


class ReducerContract(ABC):
    """What a scan relies on."""

    layer = "2"

    @abstractmethod
    def make(self) -> Reducer:
        """An empty reducer."""

    @abstractmethod
    def result(self, reducer: Reducer) -> tuple[torch.Tensor, ...]:
        """What it has found."""

    def fed(self, reducer: Reducer, some: list) -> Reducer:
        values = attention(self.layer).values(slice(0, 3))
        for block in some:
            reducer.update(block, values(block))
        return reducer

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


class WithValues:
    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.result(3)


class TestLargest(WithValues, ReducerContract):
    layer = "0"  # whole numbers: many ties

    def make(self) -> Reducer:
        return LargestReducer(9, None)


class TestLargestPerGroup(WithValues, ReducerContract):
    layer = "0"

    def make(self) -> Reducer:
        return LargestReducer(4, attention("0").grouping("label"))


class TestSmallest(WithValues, ReducerContract):
    layer = "0"

    def make(self) -> Reducer:
        return AskTop(9, None, largest=False).reducer(attention("0"), 3)


class TestScores(WithValues, ReducerContract):
    def make(self) -> Reducer:
        return ScoresReducer()


class CategoryTotals(ReducerContract):
    column, absolute = "label", False

    def make(self) -> Reducer:
        return TotalsReducer(3, attention("2").grouping(self.column), absolute=self.absolute)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.sums, reducer.counts


class TestAbsoluteTotals(CategoryTotals):
    column, absolute = "rating", True


class TestSampledTotals(CategoryTotals):
    def make(self) -> Reducer:
        return SampledTotalsReducer(3, attention("2").grouping("label"), absolute=False)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.sums, reducer.counts, reducer.squares

    def test_blocks_of_any_number_of_whole_steps_give_the_same_squares_of_their_sums(self):
        steps = self.fed(self.make(), blocks(self.layer, 30))  # five steps each
        torch.testing.assert_close(steps.step_squares, self.whole().step_squares, rtol=1e-10, atol=1e-12)
        assert bool((steps.step_squares > 0).any())


class TestLogSum(ReducerContract):
    def make(self) -> Reducer:
        return LogSumReducer(3)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.total,)


def coefficients() -> tuple[torch.Tensor, torch.Tensor]:
    unrolled = mlp().memory._view.unrolled("2")
    return unrolled.weight, unrolled.bias


class TestParts(ReducerContract):
    def make(self) -> Reducer:
        return PartsReducer((6, 7), *coefficients())

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.weight, reducer.bias


class TestPartsOfIndexedKeys(TestParts):
    layer = "0"

    def make(self) -> Reducer:
        return PartsReducer((7, 5), *coefficients())


class TestOutput(ReducerContract):
    def make(self) -> Reducer:
        return OutputReducer(3, 6, *coefficients())

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.output,)


class TestKeySums(ReducerContract):
    def make(self) -> Reducer:
        return KeySumsReducer(7, attention("2").grouping("label"))

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.sums, reducer.counts, torch.tensor([reducer.smallest])


class TestMeans(ReducerContract):
    def make(self) -> Reducer:
        return MeansReducer(3, attention("2").grouping("label"))

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.means, reducer.squares, reducer.counts


class TestVisits(ReducerContract):
    layer = "0"

    def make(self) -> Reducer:
        layer = attention("0").layer
        return VisitsReducer(layer.distinct_keys, attention("0").grouping("label"))

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.visits,)


class TestMoments(ReducerContract):
    def make(self) -> Reducer:
        return MomentsReducer(attention(self.layer).layer)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return (reducer.result(),)


class TestMomentsOfIndexedKeys(TestMoments):
    layer = "0"


class TestDisagreement(ReducerContract):
    def make(self) -> Reducer:
        found = attention("2")
        return DisagreementReducer(found.grouping("example"), 6, found.view.reader.log("2").factor["weight"])

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.errors, reducer.norms, reducer.visits


class TestCellParts(ReducerContract):
    def make(self) -> Reducer:
        found = attention("2")
        unrolled = found.view.unrolled("2")
        assert isinstance(unrolled, UnrolledNumbers)
        cells = Cells(found.view, found.layer, ["label"])
        return CellPartsReducer(found.layer, cells, unrolled.weight, unrolled.biases)

    def result(self, reducer: Any) -> tuple[torch.Tensor, ...]:
        return reducer.weights, reducer.biases, reducer.counts


def test_every_reducer_keeps_the_contract():
    for module in pkgutil.iter_modules(spotlights.attention.__path__, "spotlights.attention."):
        importlib.import_module(module.name)
    tested = {type(contract().make()) for contract in below(ReducerContract)}
    assert set(below(Reducer)) <= tested, "write a contract test for the new reducer: one small class here"


def below(base: type) -> list[type]:
    return [found for kind in base.__subclasses__() for found in (kind, *below(kind))]


@pytest.mark.parametrize("column", ["label", "source", "rating", "example"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_totals_of_many_queries_take_a_short_cut_to_the_same_answer(column: str, absolute: bool, layer: str):
    from spotlights.attention import AskTotals

    run = mlp()
    many = torch.randn(20, 5, dtype=torch.float64)
    a = run.memory.without(label=3).attend(run.model, many)[layer]
    quick, slow = a.totals(column, absolute=absolute), a.ask(AskTotals(column, absolute))[0]
    assert quick.groups == slow.groups
    assert torch.equal(quick.counts, slow.counts)
    torch.testing.assert_close(quick.values, slow.values, rtol=1e-10, atol=1e-10)
