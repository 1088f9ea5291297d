"""One scan answers every question, and the answers do not depend on how it is cut into blocks, threads and batches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memories import LAYERS, Run, attend, brute_top, mlp
from spotlights.attention import AskTop, AskTotals, measure
from spotlights.attention import scan as scanning


def answers(run: Run, layer: str) -> list[torch.Tensor]:
    a = attend(run, layer)
    top, per, example = a.top(9), a.top(4, per="label"), a.top(6, by="example")
    contributions = a.contributions(target=1)
    return [
        a.scores(),
        top.values, top.slots, per.values, per.slots, example.values, example.slots,
        a.totals("rating").values, a.totals("step", bins=4).values, a.totals("label", absolute=True).values,
        attend(run, layer, kernel="cosine").scores(), attend(run, layer, kernel="softmax").scores(),
        contributions.top(5).values, contributions.bottom(5).slots, contributions.total(),
        run.memory.weights(layer), run.memory.dual(run.model)(run.queries),
    ]  # fmt: skip


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor], cause: str) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        same = torch.allclose(one.double(), other.double(), rtol=1e-11, atol=1e-11, equal_nan=True)
        assert one.shape == other.shape, f"answer {number} depends on {cause}"
        assert same, f"answer {number} depends on {cause}"


@pytest.mark.parametrize("layer", ["0", "4"])
@pytest.mark.parametrize("rows", [7, 64])
def test_answers_do_not_depend_on_block_size(layer: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    run = mlp()
    expected = answers(run, layer)
    monkeypatch.setattr(scanning, "MIN_ROWS", rows)
    monkeypatch.setattr(scanning, "MAX_ROWS", rows)
    assert_same(answers(run, layer), expected, "the block size")


@pytest.mark.parametrize("layer", ["0", "4"])
@pytest.mark.parametrize("threads", [2, 3])
def test_answers_do_not_depend_on_the_number_of_threads(layer: str, threads: int, monkeypatch: pytest.MonkeyPatch):
    run = mlp()
    expected = answers(run, layer)
    kept = torch.get_num_threads()
    for name, value in (("MIN_ROWS", 23), ("MAX_ROWS", 23), ("_SMALL", 0)):
        monkeypatch.setattr(scanning, name, value)
    try:
        torch.set_num_threads(threads)
        found = answers(run, layer)
        assert torch.get_num_threads() == threads, "a scan must leave torch's thread count as it was"
    finally:
        torch.set_num_threads(kept)
    assert_same(found, expected, "the number of threads")


@pytest.mark.parametrize("layer", ["0", "4"])
def test_answers_do_not_depend_on_how_queries_are_batched(layer: str, monkeypatch: pytest.MonkeyPatch):
    from spotlights import dual

    run = mlp()
    expected = answers(run, layer)
    monkeypatch.setattr(measure, "_QUERIES_AT_ONCE", 2)
    monkeypatch.setattr(dual, "_QUERIES_AT_ONCE", 2)
    assert_same(answers(run, layer), expected, "the batches of queries")


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(4, 200), threads=st.integers(1, 3), k=st.integers(1, 200))
def test_exact_scores_give_the_same_slots_for_any_cut(rows: int, threads: int, k: int):
    run = mlp()
    a = attend(run, "0")  # whole numbers: no rounding, many ties
    reducers = [AskTop(k).reducer(a, 3), AskTotals("label").reducer(a, 3)]
    job = scanning.Job(a.layer, a.view.selection, 3, a.values(slice(0, 3)), reducers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "_SMALL", 0)
        scanning.scan([job], threads=threads, rows=rows)
    slots = reducers[0].result(3)[1]
    for query, scores in enumerate(a.scores().tolist()):
        assert slots[query, 0].tolist() == brute_top(scores, k)
    assert torch.equal(reducers[1].sums, a.totals("label").values)


def test_several_questions_of_all_layers_share_one_scan_and_answer_the_same():
    run = mlp()
    spots = run.memory.attend(run.model, run.queries)
    together = spots.ask(AskTop(4, per="label"), AskTotals("source"))
    assert list(together) == list(LAYERS)
    for layer, (top, totals) in together.items():
        assert torch.equal(top.slots, spots[layer].top(4, per="label").slots)
        assert torch.equal(totals.values, spots[layer].totals("source").values)


def test_a_scan_never_holds_more_than_a_block_of_values(monkeypatch: pytest.MonkeyPatch):
    run = mlp()
    monkeypatch.setattr(scanning, "MIN_ROWS", 16)
    monkeypatch.setattr(scanning, "MAX_ROWS", 16)
    sizes = []
    feed = scanning._feed

    def watched(reducers, block, values):
        sizes.append(len(block))
        feed(reducers, block, lambda block: _at_most(values(block), 3 * 16))

    def _at_most(values: torch.Tensor, bound: int) -> torch.Tensor:
        assert values.numel() <= bound
        return values

    monkeypatch.setattr(scanning, "_feed", watched)
    attend(run, "2").top(5)
    run.memory.where(label=[0, 1, 2]).attend(run.model, run.queries)["2"].totals("label")
    assert max(sizes) <= 16, "a block is larger than what the scan asked for"
    assert sum(sizes) > 180


def test_blocks_of_a_scan_shrink_when_there_are_many_queries():
    largest = max(queries * scanning._block_rows(queries) for queries in (0, 1, 10, 100, 1024))
    assert largest <= scanning.BLOCK_VALUES, "a block of values grows with the number of queries"
