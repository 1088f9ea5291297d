"""Masks and the audit on the explorer's API: the answers of the library's own masked networks and suspects."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from explorers import digits, first, get, speller
from spotlights.selections import parse_selections


@pytest.mark.parametrize(
    "mask",
    ["label=1,3", "step=0-13", "label=1; step=4-9,20-30; example=1700000", "label=1,2 step=0-20; label=3 step=5-30"],
)
@pytest.mark.parametrize(
    ("within", "layers"), [({}, ["layers.2"]), ({"in": "all"}, None), ({"in": "layers.0"}, ["layers.0"])]
)
def test_a_masked_answer_is_the_library_s_by_default_in_the_layer_that_answers(mask: str, within: dict, layers):
    opened = digits().opened
    example = get("layer", q=f"test:{first()}")["top"][0]["example"]
    mask = mask.replace("1700000", str(example))
    found = get("mask", q=f"test:{first()}", mask=mask, **within)
    view = opened.memory
    for selection in parse_selections(mask):
        view = view.without(**selection)
    expected = view.primal(opened.model, layers=layers)(digits().subject.inputs.batch([0]))[0]
    assert [o["logit"] for o in found["without"]["outputs"]] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)
    assert found["without"]["said"] == int(expected.argmax())


def test_the_accuracy_under_a_mask_is_that_of_the_masked_network():
    opened, inputs = digits().opened, digits().subject.inputs
    found = get("accuracy", mask="label=1")
    masked = opened.memory.without(label=1).primal(opened.model, layers=["layers.2"])
    right = (masked(inputs.data).argmax(dim=1) == torch.tensor(inputs.labels)).double().mean()
    assert found["without"]["all"] == pytest.approx(float(right))
    assert found["without"]["by_label"]["1"] == 0.0


def test_masks_and_queries_at_the_same_time_do_not_see_each_other():
    inputs = digits().subject.inputs
    alone = {label: get("mask", q=f"test:{first()}", mask=f"label={label}")["without"]["outputs"] for label in range(4)}

    def ask(number: int) -> bool:
        query = get("query", q=f"test:{inputs.ids[5 + number]}")
        expected = digits().opened.model(inputs.batch([5 + number]))[0].tolist()
        masked = get("mask", q=f"test:{first()}", mask=f"label={number % 4}")["without"]["outputs"]
        return masked == alone[number % 4] and [o["logit"] for o in query["outputs"]] == pytest.approx(
            expected, abs=1e-5
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(40)))


def test_masks_that_are_not_ready_say_how_far_they_are():
    explorer = digits()
    assert explorer.opened.masks is not None
    explorer.opened.masks.progress = 0.25
    try:
        found = get("mask", code=202, q=f"test:{first()}", mask="label=1")
    finally:
        explorer.opened.masks.progress = 1.0
    assert found == {"progress": 0.25}


def test_the_test_inputs_that_a_mask_changes_most_are_named():
    opened, inputs = digits().opened, digits().subject.inputs
    found = get("accuracy", mask="label=1")
    labels = torch.tensor(inputs.labels)[:, None]
    before, after = (
        model(inputs.data).detach().double().softmax(dim=1).gather(1, labels)[:, 0]
        for model in (opened.model, opened.memory.without(label=1).primal(opened.model, layers=["layers.2"]))
    )
    assert found["worse"]
    assert found["better"]
    for row in [*found["worse"], *found["better"]]:
        place = inputs.ids.index(row["id"])
        assert row["right"] == pytest.approx(float(before[place]), abs=1e-3)
        assert row["right_now"] == pytest.approx(float(after[place]), abs=1e-3)
    assert found["worse"][0]["right_now"] - found["worse"][0]["right"] == pytest.approx(
        float((after - before).min()), abs=1e-3
    )


# -- the audit --------------------------------------------------------------------------------


def test_the_audit_lists_the_library_s_suspects():
    found, suspects = get("audit", top=8), digits().opened.memory.suspects(8)
    rows = found["suspects"]
    assert [row["example"] for row in rows] == suspects.examples
    assert [row["says"] for row in rows] == suspects.answers
    assert [row["label"] for row in rows] == suspects.columns["label"]
    assert rows[0]["says_name"] == str(suspects.answers[0])
    assert rows[0]["shown"]["kind"] == "image"
    assert "not a verdict" in found["note"]


def test_a_text_has_no_label_to_be_wrong_but_its_suspects_are_shown():
    rows = get("audit", speller(), top=3)["suspects"]
    assert [row["says"] for row in rows] == [None] * 3
    assert rows[0]["shown"]["kind"] == "text"
