"""Masks and the audit on the explorer's API: the answers of the library's own masked networks and suspects."""

import csv
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from explorers import client, digits, first, get, speller


@pytest.mark.parametrize("mask", ["label:1,3", "steps:0-13", "label:1;steps:4-9,20-30;example:1700000"])
def test_a_masked_answer_is_the_library_s(mask: str):
    opened = digits().opened
    example = get("layer", q=f"test:{first()}")["top"][0]["example"]
    mask = mask.replace("1700000", str(example))
    found = get("mask", q=f"test:{first()}", mask=mask)
    view = opened.memory
    for part in mask.split(";"):
        column, listed = part.split(":")
        for each in listed.split(","):
            low, _, high = each.partition("-")
            view = (
                view.without(step=range(int(low), int(high)))
                if column == "steps"
                else view.without(**{column: int(each)})
            )
    expected = view.primal(opened.model)(digits().subject.inputs.tensors[:1])[0]
    assert [o["logit"] for o in found["without"]["outputs"]] == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-3)
    assert found["without"]["said"] == int(expected.argmax())


def test_the_accuracy_under_a_mask_is_that_of_the_masked_network():
    opened, inputs = digits().opened, digits().subject.inputs
    found = get("accuracy", mask="label:1")
    masked = opened.memory.without(label=1).primal(opened.model)
    right = (masked(inputs.tensors).argmax(dim=1) == torch.tensor(inputs.labels)).double().mean()
    assert found["without"]["all"] == pytest.approx(float(right))
    assert found["without"]["by_label"]["1"] == 0.0


def test_masks_and_queries_at_the_same_time_do_not_see_each_other():
    inputs = digits().subject.inputs
    alone = {label: get("mask", q=f"test:{first()}", mask=f"label:{label}")["without"]["outputs"] for label in range(4)}

    def ask(number: int) -> bool:
        query = get("query", q=f"test:{inputs.ids[5 + number]}")
        expected = digits().opened.model(inputs.tensors[5 + number : 6 + number])[0].tolist()
        masked = get("mask", q=f"test:{first()}", mask=f"label:{number % 4}")["without"]["outputs"]
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
        found = get("mask", code=202, q=f"test:{first()}", mask="label:1")
    finally:
        explorer.opened.masks.progress = 1.0
    assert found == {"progress": 0.25}


def test_the_test_inputs_that_a_mask_changes_most_are_named():
    opened, inputs = digits().opened, digits().subject.inputs
    found = get("accuracy", mask="label:1")
    labels = torch.tensor(inputs.labels)[:, None]
    before, after = (
        model(inputs.tensors).detach().double().softmax(dim=1).gather(1, labels)[:, 0]
        for model in (opened.model, opened.memory.without(label=1).primal(opened.model))
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


@pytest.mark.parametrize("measure", ["contribution", "influence"])
def test_the_audit_lists_the_library_s_suspects_with_what_they_do_to_the_query(measure: str):
    opened = digits().opened
    found = get("audit", q=f"test:{first()}", target=3, measure=measure, top=8)
    suspects = opened.memory.suspects(8)
    rows = found["suspects"]
    assert [row["example"] for row in rows] == suspects.examples
    assert [row["says"] for row in rows] == suspects.answers
    assert [row["label"] for row in rows] == suspects.columns["label"]
    assert rows[0]["says_name"] == str(suspects.answers[0])
    assert rows[0]["shown"]["kind"] == "image"
    spot = opened.memory.attend(opened.model, digits().subject.inputs.tensors[:1])
    asked = spot["layers.2"].contributions(3) if measure == "contribution" else spot.influence(3)
    totals = asked.totals("example")
    value = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
    assert [row["value"] for row in rows] == pytest.approx([value[e] for e in suspects.examples], rel=1e-3, abs=1e-6)
    assert found["caution"] == ("estimate" if measure == "influence" else None)
    assert "not a verdict" in found["note"]


def test_the_audit_needs_no_query_and_can_be_taken_away_as_csv():
    assert get("audit", top=3)["suspects"][0]["value"] is None
    text = client(digits()).get("/api/audit.csv", params={"q": f"test:{first()}", "top": 4}).text
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [int(row["example"]) for row in rows] == digits().opened.memory.suspects(4).examples
    assert "contribution" in rows[0]


def test_a_text_has_no_label_to_be_wrong_but_its_suspects_are_shown():
    rows = get("audit", speller(), top=3)["suspects"]
    assert [row["says"] for row in rows] == [None] * 3
    assert rows[0]["shown"]["kind"] == "text"
