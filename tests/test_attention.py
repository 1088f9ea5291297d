"""Scores, top and totals: what a plain loop over all slots says."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spotlights as sl
import training
from memories import LAYERS, Run, attend, brute_top, brute_totals, mlp, sequence, train, twice, whole_numbers


def plain_scores(run: Run, layer: str, queries: torch.Tensor | None = None) -> torch.Tensor:
    """key·query in a loop, the queries found by an independent hook."""
    seen = []
    hook = run.model.get_submodule(layer).register_forward_hook(
        lambda module, args, output: seen.append(args[0].detach().reshape(-1, args[0].shape[-1]))
    )
    with torch.no_grad():
        run.model(run.queries if queries is None else queries)
    hook.remove()
    rows = torch.cat(seen)
    return torch.stack([torch.stack([slot.key @ q for slot in run.slots[layer]]) for q in rows])


# -- scores ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
def test_scores_equal_a_plain_loop_over_all_slots(layer: str):
    run = mlp()
    scores = attend(run, layer).scores()
    assert scores.dtype == torch.float64
    torch.testing.assert_close(scores, plain_scores(run, layer), rtol=1e-12, atol=1e-12)


def test_first_layer_keys_are_stored_once_and_hidden_ones_are_not():
    layers = mlp().memory.layers
    assert layers["0"].distinct_keys < layers["0"].slots, "repeated inputs were not stored once"
    assert layers["2"].distinct_keys == layers["2"].slots


@pytest.mark.parametrize(
    ("storage", "tolerance"), [("float64", 1e-6), ("float32", 1e-6), ("float16", 2e-3), ("int8", 2e-2)]
)
@pytest.mark.parametrize("layer", LAYERS)
def test_scores_of_every_storage_type_are_within_its_rounding(storage: str, tolerance: float, layer: str):
    run = mlp(storage, torch.float32)
    a = attend(run, layer)
    truth = plain_scores(run, layer)
    error = (a.scores() - truth).abs().max() / truth.abs().max()
    assert error <= tolerance, f"{storage} scores are off by {error:.1e}: is a row's scale applied once?"
    assert ("approximate" in str(a.note)) == (storage in ("float16", "int8"))


@pytest.mark.parametrize("layer", ["0", "2"])
def test_layers_with_several_rows_per_input_have_one_query_per_row(layer: str):
    run = sequence()
    scores = attend(run, layer).scores()
    assert scores.shape == (4, len(run.slots[layer])), "2 inputs of 2 positions each are 4 queries"
    torch.testing.assert_close(scores, plain_scores(run, layer), rtol=1e-12, atol=1e-12)


def test_a_layer_called_twice_has_the_queries_of_both_calls():
    run = twice()
    scores = attend(run, "inner").scores()
    assert scores.shape == (2 * len(run.queries), len(run.slots["inner"]))
    torch.testing.assert_close(scores, plain_scores(run, "inner"), rtol=1e-12, atol=1e-12)


def test_one_query_answers_as_it_does_among_many():
    run = mlp()
    together = attend(run, "2").scores()
    for index in range(len(run.queries)):
        alone = run.memory.attend(run.model, run.queries[index : index + 1])["2"].scores()
        torch.testing.assert_close(alone[0], together[index], rtol=1e-12, atol=1e-12)


def test_a_view_has_the_scores_of_its_own_slots_in_order():
    run = mlp()
    kept = [slot for slot, label in enumerate(run.column("2", "label")) if label == 1]
    scores = run.memory.where(label=1).attend(run.model, run.queries)["2"].scores()
    assert torch.equal(scores, attend(run, "2").scores()[:, kept])


def test_scores_refuse_politely_when_they_would_not_fit(monkeypatch: pytest.MonkeyPatch):
    run = mlp()
    monkeypatch.setattr("spotlights.query.measured.MAX_VALUES_BYTES", 3 * 180 * 8 - 1)
    with pytest.raises(sl.TooLargeError, match=r"3 queries and 180 slots .* top\(\) or totals\(\)"):
        attend(run, "2").scores()
    assert len(attend(run, "2").top(3)) == 3, "top needs no table of scores"


def test_scores_of_a_small_enough_view_of_a_large_memory_are_given(monkeypatch: pytest.MonkeyPatch):
    run = mlp()
    small = run.memory.where(step=range(2))
    monkeypatch.setattr("spotlights.query.measured.MAX_VALUES_BYTES", 3 * 12 * 8)
    scores = small.attend(run.model, run.queries)["2"].scores()
    assert scores.shape == (3, 12), "the error recommends a smaller view, so a smaller view must help"


# -- top --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("k", [1, 7, 180, 1000])
def test_top_are_the_largest_scores_and_the_lowest_slot_wins_a_tie(layer: str, k: int):
    run = mlp()
    a = attend(run, layer)
    top, scores = a.top(k), a.scores()
    assert top.numpy().shape == (3, min(k, 180))
    for query in range(3):
        expected = brute_top(scores[query].tolist(), k)
        assert top.slots[query, 0].tolist() == expected, "ties must go to the lowest slot"
        assert top.values[query, 0].tolist() == scores[query][expected].tolist()


def test_the_first_layer_has_ties_worth_testing():
    scores = attend(mlp(), "0").scores()
    assert len(scores[0].unique()) < 40


@pytest.mark.parametrize("column", ["label", "source", "rating", "step", "example"])
def test_top_per_group_is_top_of_the_group_alone(column: str):
    run = mlp()
    a = attend(run, "0")
    top, scores, held = a.top(4, per=column), a.scores(), run.column("0", column)
    assert set(top.groups) == set(held), "slots without a value form the group None"
    assert len(top.groups) == len(set(held))
    for query in range(3):
        for number, group in enumerate(top.groups):
            members = [slot for slot, value in enumerate(held) if value == group]
            expected = brute_top(scores[query].tolist(), 4, members)
            found = top.slots[query, number].tolist()
            assert found == expected + [-1] * (len(found) - len(expected))
            assert torch.isnan(top.values[query, number, len(expected) :]).all()


@pytest.mark.parametrize("layer", ["0", "4"])
@pytest.mark.parametrize("k", [1, 5, 1000])
def test_top_by_example_adds_up_its_visits(layer: str, k: int):
    run = mlp()
    a = attend(run, layer)
    held = run.column(layer, "example")
    sums = brute_totals(a.scores(), held)
    top = a.top(k, by="example")
    for query in range(3):
        expected = sorted(sums, key=lambda e: (-round(float(sums[e][query]), 9), held.index(e)))[:k]
        rows = list(top.rows(query))
        assert [row["example"] for row in rows] == expected, "equal sums: the one seen first comes first"
        for row in rows:
            assert row["visits"] == held.count(row["example"])
            assert row["score"] == pytest.approx(float(sums[row["example"]][query]), abs=1e-9)


def test_top_by_example_of_a_view_has_only_examples_of_that_view():
    run = mlp()
    a = run.memory.where(label=2).attend(run.model, -run.queries)["4"]
    examples = {s.columns["example"] for s in run.slots["4"] if s.columns.get("label") == 2}
    for query in range(3):
        shown = [row["example"] for row in a.top(1000, by="example").rows(query)]
        assert set(shown) == examples, "an example without slots in the view has no total, not a total of 0"


def test_top_by_example_shows_a_column_only_where_all_visits_agree():
    run = mlp()
    for row in attend(run, "4").top(25, by="example").rows():
        visits = [s for s in run.slots["4"] if s.columns.get("example") == row["example"]]
        for column in ("label", "source", "rating"):
            held = {s.columns.get(column) for s in visits}
            if column in row and row[column] is not None:
                assert held == {row[column]}, f"one visit's {column} is shown as if it held for all"


def test_by_and_per_together_are_refused():
    with pytest.raises(sl.SettingError, match="not both"):
        attend(mlp(), "0").top(3, by="example", per="label")


@pytest.mark.parametrize("by", [None, "example"])
@pytest.mark.parametrize("k", [0, -1])
def test_top_of_less_than_one_is_refused(by: str | None, k: int):
    with pytest.raises(sl.SettingError, match="at least one"):
        attend(mlp(), "0").top(k, by=by)


def test_rows_of_top_carry_the_columns_of_their_slots():
    run = mlp()
    for row in attend(run, "2").top(180).rows(1):
        slot = run.slots["2"][row["slot"]]
        assert row["step"] == slot.step
        for column in ("example", "label", "source", "rating"):
            assert row[column] == slot.columns.get(column)


# -- totals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["label", "source", "rating", "step", "example"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("layer", ["0", "2"])
def test_totals_are_sums_over_the_slots_of_each_group(column: str, absolute: bool, layer: str):
    run = mlp()
    a = attend(run, layer)
    scores, held = a.scores(), run.column(layer, column)
    expected = brute_totals(scores.abs() if absolute else scores, held)
    totals = a.totals(column, absolute=absolute)
    assert set(totals.groups) == set(expected), "slots without a value form the group None"
    assert len(totals.groups) == len(expected)
    for number, group in enumerate(totals.groups):
        torch.testing.assert_close(totals.values[:, number], expected[group], rtol=1e-12, atol=1e-12)
        assert totals.counts[number] == held.count(group)


def test_totals_by_position_are_those_of_each_row_of_an_input():
    run = sequence()
    a = attend(run, "2")
    expected = brute_totals(a.scores(), run.column("2", "position"))
    totals = a.totals("position")
    assert totals.groups == [0, 1]
    for number, group in enumerate(totals.groups):
        torch.testing.assert_close(totals.values[:, number], expected[group], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("column", ["step", "rating", "example"])
@pytest.mark.parametrize("bins", [1, 4, 50])
def test_bins_divide_the_range_of_a_column_and_lose_no_slot(column: str, bins: int):
    run = mlp()
    a = attend(run, "2")
    scores, held = a.scores(), run.column("2", column)
    totals = a.totals(column, bins=bins)
    edges = [edge for edge in totals.groups if edge is not None]
    assert len(edges) == bins
    assert edges[0] == min(value for value in held if value is not None)
    binned = [None if v is None else max(e for e in edges if e <= v) for v in held]
    expected = brute_totals(scores, binned)
    assert (None in totals.groups) == (None in held), "missing values belong to no range"
    for number, group in enumerate(totals.groups):
        total = expected.get(group, torch.zeros(3, dtype=torch.float64))
        torch.testing.assert_close(totals.values[:, number], total, rtol=1e-12, atol=1e-12)
        assert totals.counts[number] == binned.count(group)


def test_bins_of_a_column_without_any_value_are_one_group_of_missing_ones(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "run.memory") as recorder:
        recorder.batch(rating=[float("nan")] * 4)
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    totals = sl.open(tmp_path / "run.memory").attend(model, torch.randn(1, 3))["linear"].totals("rating", bins=3)
    assert totals.groups == [None]
    assert totals.counts.tolist() == [4]


def test_bins_of_strings_and_no_bins_are_refused():
    a = attend(mlp(), "0")
    with pytest.raises(sl.SettingError, match="needs a column of numbers"):
        a.totals("source", bins=2)
    with pytest.raises(sl.SettingError, match="at least one"):
        a.totals("step", bins=0)


@pytest.mark.parametrize("apart", [1, 3, 10**12])
def test_groups_do_not_depend_on_how_far_apart_their_values_lie(apart: int, tmp_path: Path):
    model, (inputs, labels) = training.network(), training.examples()
    optimizer = training.sgd(model)
    with sl.record(model, optimizer, tmp_path / "gaps.memory") as recorder:
        for step in range(6):
            ids = training.chosen(step)
            recorder.batch(example=ids, number=-5 + apart * ids)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[ids]), labels[ids]).backward()
            optimizer.step()
    contributions = sl.open(tmp_path / "gaps.memory").attend(model, inputs[:2])["2"].contributions(0)
    by_example, by_number = contributions.totals("example"), contributions.totals("number")
    assert by_number.groups == [-5 + apart * int(example) for example in by_example.groups]
    assert torch.equal(by_number.values, by_example.values)


def test_totals_of_a_view_are_zero_for_groups_outside_it():
    run = mlp()
    totals = run.memory.where(label=1).attend(run.model, run.queries)["2"].totals("label")
    whole = attend(run, "2").totals("label")
    for number, group in enumerate(totals.groups):
        expected = whole.values[:, whole.groups.index(group)] * (group == 1)
        torch.testing.assert_close(totals.values[:, number], expected, rtol=1e-12, atol=1e-12)


# -- empty ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kernel", ["dot", "cosine", "softmax"])
def test_an_empty_view_gives_empty_answers(layer: str, kernel: str):
    run = mlp()
    empty = run.memory.where(label=1).where(label=2)
    assert len(empty) == 0
    a = empty.attend(run.model, run.queries, kernel=kernel)[layer]
    assert a.scores().shape == (3, 0)
    assert a.top(5).numpy().shape == (3, 0)
    assert list(a.top(5, by="example").rows()) == []
    assert list(a.top(5, per="label").rows(2)) == []
    assert not a.totals("label").values.any()
    assert str(a.top(5))
    assert len(a.top(5).to_pandas()) == 0


@pytest.mark.parametrize("layer", LAYERS)
def test_no_queries_give_answers_of_no_rows(layer: str):
    run = mlp()
    a = run.memory.attend(run.model, run.queries[:0])[layer]
    assert a.scores().shape == (0, 180)
    assert a.top(5).numpy().shape[0] == 0
    assert a.top(5, by="example").numpy().shape[0] == 0
    assert a.totals("label").numpy().shape == (0, 5)


def test_a_memory_without_steps_answers_with_nothing():
    run = train(nn.Sequential(nn.Linear(5, 4)).double(), [])
    a = run.memory.attend(run.model, whole_numbers(2, 5))["0"]
    assert len(run.memory) == 0
    assert a.scores().shape == (2, 0)
    assert list(a.top(5).rows()) == []
    assert torch.equal(run.memory.dual(run.model)(whole_numbers(2, 5) * 0), run.model[0].bias.expand(2, -1))


# -- other kernels ----------------------------------------------------------------------------


def test_answers_of_another_kernel_say_that_they_are_for_looking():
    assert "for looking" in str(attend(mlp(), "0", kernel="cosine").top(2))
    assert "for looking" not in str(attend(mlp(), "0").top(2))


def test_a_diverged_network_still_prints():
    run = mlp()
    queries = run.queries.clone()
    queries[0, 0] = math.nan
    a = run.memory.attend(run.model, queries)["0"]
    assert "nan" in str(a.totals("label"))
    assert str(a.top(3))
