"""Engines: the answers do not depend on who runs a plan, nor on how a pass is cut into blocks, threads and batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spotlights as sl
from memories import LAYERS, Run, brute_top, mlp
from spotlights.query import engine, measured


def answers(run: Run, memory: sl.Memory, layer: str) -> list[torch.Tensor]:
    a = memory.attend(run.model, run.queries)[layer]
    top, per, example = a.top(9), a.top(4, per="label"), a.top(6, by="example")
    contributions = a.contributions(target=1)
    kernels = [memory.attend(run.model, run.queries, kernel=kernel)[layer].scores() for kernel in ("cosine", "softmax")]
    return [
        a.scores(), *kernels,
        top.values, top.slots, per.values, per.slots, example.values, example.slots,
        a.totals("rating").values, a.totals("step", bins=4).values, a.totals("label", absolute=True).values,
        contributions.top(5).values, contributions.bottom(5).slots, contributions.total(),
        memory.weights(layer), memory.dual(run.model)(run.queries),
    ]  # fmt: skip


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], cause: str) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        same = torch.allclose(one.double(), other.double(), rtol=1e-11, atol=1e-11, equal_nan=True)
        assert one.shape == other.shape, f"answer {number} depends on {cause}"
        assert same, f"answer {number} depends on {cause}"


@pytest.mark.parametrize("layer", ["0", "4"])
@pytest.mark.parametrize("rows", [7, 64])
def test_answers_do_not_depend_on_block_size(layer: str, rows: int):
    run = mlp()
    small = run.memory.on(engine.Threads(rows=rows))
    assert_same(answers(run, small, layer), answers(run, run.memory, layer), "the block size")


@pytest.mark.parametrize("layer", ["0", "4"])
@pytest.mark.parametrize("threads", [2, 3])
def test_answers_do_not_depend_on_the_number_of_threads(layer: str, threads: int, monkeypatch: pytest.MonkeyPatch):
    run = mlp()
    expected = answers(run, run.memory, layer)
    monkeypatch.setattr(engine, "SMALL", 0)
    before = torch.get_num_threads()
    found = answers(run, run.memory.on(engine.Threads(threads, rows=23)), layer)
    assert torch.get_num_threads() == before, "an engine must leave torch's thread count as it was"
    assert_same(found, expected, "the number of threads")


@pytest.mark.parametrize("layer", ["0", "4"])
def test_answers_do_not_depend_on_how_queries_are_batched(layer: str, monkeypatch: pytest.MonkeyPatch):
    from spotlights import dual

    run = mlp()
    expected = answers(run, run.memory, layer)
    monkeypatch.setattr(measured, "QUERIES_AT_ONCE", 2)
    monkeypatch.setattr(dual, "QUERIES_AT_ONCE", 2)
    assert_same(answers(run, run.memory, layer), expected, "the batches of queries")


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(4, 200), threads=st.integers(1, 3), k=st.integers(1, 200))
def test_exact_scores_give_the_same_slots_for_any_cut(rows: int, threads: int, k: int):
    run = mlp()
    cut = run.memory.on(engine.Threads(threads, rows=rows))
    a = cut.attend(run.model, run.queries)["0"]  # whole numbers: no rounding, many ties
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "SMALL", 0)
        top, totals = a.ask(sl.AskTop(k), sl.AskTotals("label"))
    for query, scores in enumerate(a.scores().tolist()):
        assert top.slots[query, 0].tolist() == brute_top(scores, k)
    assert torch.equal(totals.values, a.totals("label").values)


def test_several_questions_of_all_layers_share_one_pass_and_answer_the_same():
    run = mlp()
    spots = run.memory.attend(run.model, run.queries)
    together = spots.ask(sl.AskTop(4, per="label"), sl.AskTotals("source"))
    assert list(together) == list(LAYERS)
    for layer, (top, totals) in together.items():
        assert torch.equal(top.slots, spots[layer].top(4, per="label").slots)
        assert torch.equal(totals.values, spots[layer].totals("source").values)


@pytest.mark.parametrize("column", ["label", "source", "rating", "example"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("layer", ["0", "2", "4"])
def test_totals_of_many_queries_take_a_short_cut_to_the_same_answer(column: str, absolute: bool, layer: str):
    run = mlp()
    many = torch.randn(20, 5, dtype=torch.float64)
    a = run.memory.without(label=3).attend(run.model, many)[layer]
    quick, slow = a.totals(column, absolute=absolute), a.ask(sl.AskTotals(column, absolute))[0]
    assert quick.groups == slow.groups
    assert torch.equal(quick.counts, slow.counts)
    torch.testing.assert_close(quick.values, slow.values, rtol=1e-10, atol=1e-10)
