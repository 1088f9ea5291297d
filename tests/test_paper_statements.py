"""The statements of "The Dual Form of Neural Networks Revisited", each as a test of a recorded run."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import spotlights as sl
from memories import LAYERS, mlp, plain_layer, train, whole_numbers

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@settings(max_examples=30, deadline=None)
@given(slots=st.integers(1, 8), seed=st.integers(0, 999))
def test_lemma_2_2_a_sum_of_outer_products_applied_to_a_query_is_attention(slots: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    keys, values, query = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((slots, 4), (slots, 3), (4,))
    )
    weights = sum(torch.outer(value, key) for key, value in zip(keys, values, strict=True))
    torch.testing.assert_close(weights @ query, sl.dot_attention(keys, values, query), **EXACT)


def test_proposition_1_a_trained_linear_layer_is_its_dual():
    run = plain_layer()
    start = run.checkpoints[0]["0.weight"]
    slots = run.slots["0"]
    outer = sum(torch.outer(-run.lrs[slot.step] * slot.error, slot.key) for slot in slots)
    torch.testing.assert_close(start + outer, run.model[0].weight.detach(), **EXACT)
    torch.testing.assert_close(run.memory.weights("0"), run.model[0].weight.detach(), **EXACT)


def test_corollary_1_an_answer_is_the_initial_answer_plus_attention_over_training_patterns():
    run = plain_layer()
    keys = run.keys("0")
    values = torch.stack([-run.lrs[slot.step] * slot.error for slot in run.slots["0"]])
    x = run.queries
    made = x @ run.checkpoints[0]["0.weight"].T + sl.dot_attention(keys, values, x)
    torch.testing.assert_close(made, run.model(x).detach(), **EXACT)
    torch.testing.assert_close(run.memory.dual(run.model)(x), made, **EXACT)
    torch.testing.assert_close(
        run.memory.attend(run.model, x)["0"].scores() @ values,
        (run.model(x) - x @ run.checkpoints[0]["0.weight"].T).detach(),
        **EXACT,
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_corollary_1_holds_for_every_layer_of_a_deep_network(layer: str):
    run = mlp()
    queries = run.memory.attend(run.model, run.queries)[layer].queries
    dual = run.memory.dual(run.model).get_submodule(layer)
    torch.testing.assert_close(dual(queries), run.model.get_submodule(layer)(queries).detach(), **EXACT)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_3_1_the_order_of_slots_does_not_matter(seed: int):
    run = plain_layer()
    order = torch.randperm(len(run.slots["0"]), generator=torch.Generator().manual_seed(seed))
    keys = run.keys("0")
    values = torch.stack([-run.lrs[slot.step] * slot.error for slot in run.slots["0"]])
    one = sl.dot_attention(keys, values, run.queries)
    torch.testing.assert_close(sl.dot_attention(keys[order], values[order], run.queries), one, **EXACT)


def test_3_1_a_memory_of_shuffled_batches_is_the_same_network():
    runs = []
    for order in (torch.arange(8), torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])):
        torch.manual_seed(9)
        model = nn.Sequential(nn.Linear(5, 4)).double()
        inputs, labels = whole_numbers(8, 5), torch.arange(8) % 4
        runs.append(train(model, [(inputs[order], labels[order], {"example": order.tolist()})] * 5))
    one, other = runs
    torch.testing.assert_close(one.memory.weights("0"), other.memory.weights("0"), **EXACT)
    x = whole_numbers(3, 5)
    totals = [run.memory.attend(run.model, x)["0"].totals("example").values for run in runs]
    torch.testing.assert_close(*totals, **EXACT)


def test_3_2_softmax_attention_sums_to_one_and_cosine_lies_between_minus_one_and_one():
    run = mlp()
    for layer in LAYERS:
        dot, cosine, softmax = (
            run.memory.attend(run.model, run.queries, kernel=kernel)[layer] for kernel in ("dot", "cosine", "softmax")
        )
        keys, queries = run.keys(layer), dot.queries
        expected = torch.softmax(queries @ keys.T / queries.shape[1] ** 0.5, dim=1)
        torch.testing.assert_close(softmax.scores(), expected, **EXACT)
        torch.testing.assert_close(softmax.scores().sum(dim=1), torch.ones(3).double(), **EXACT)
        torch.testing.assert_close(cosine.scores(), F.cosine_similarity(queries[:, None], keys[None], dim=2), **EXACT)
        assert cosine.scores().abs().max() <= 1 + 1e-12


def test_3_2_softmax_of_a_view_sums_to_one_over_that_view():
    run = mlp()
    view = run.memory.where(label=2)
    softmax = view.attend(run.model, run.queries, kernel="softmax")["2"]
    torch.testing.assert_close(softmax.scores().sum(dim=1), torch.ones(3).double(), **EXACT)
    torch.testing.assert_close(softmax.totals("label").values.sum(dim=1), torch.ones(3).double(), **EXACT)


@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_3_2_cosine_does_not_depend_on_the_scale_of_a_stored_row(storage: str):
    run = mlp(storage, torch.float32)
    cosine = run.memory.attend(run.model, run.queries, kernel="cosine")["2"]
    exact = F.cosine_similarity(cosine.queries[:, None], run.keys("2")[None], dim=2)
    torch.testing.assert_close(cosine.scores(), exact, rtol=0, atol=2e-2)


def test_3_3_an_input_orthogonal_to_all_keys_gives_the_initial_answer():
    torch.manual_seed(8)
    inputs = whole_numbers(12, 5)
    inputs[:, 2] = 0
    model = nn.Sequential(nn.Linear(5, 4, bias=False)).double()
    run = train(model, [(inputs, torch.arange(12) % 4, {})] * 7, options={"lr": 0.3, "momentum": 0.9})
    unseen = torch.zeros(1, 5, dtype=torch.float64)
    unseen[0, 2] = 3.0
    initial = unseen @ run.checkpoints[0]["0.weight"].T
    a = run.memory.attend(model, unseen)["0"]
    assert not a.scores().any()
    assert torch.equal(run.memory.dual(model)(unseen), initial)
    torch.testing.assert_close(model(unseen).detach(), initial, **EXACT)
    assert not a.contributions(target=1).total().any()
