"""Answers print as readable tables and convert to plain data, with the shapes they promise."""

import dataclasses

import numpy as np
import pytest
import torch

import spotlights as sl
from memories import LAYERS, mlp


def attention(layer: str = "2") -> sl.Attention:
    run = mlp()
    return run.memory.attend(run.model, run.queries)[layer]


def words(text: object) -> str:
    return " ".join(str(text).split())


# -- tables -----------------------------------------------------------------------------------


def test_top_prints_its_rows_with_the_columns_of_their_slots():
    top = attention().top(4)
    text = str(top)
    assert repr(top) == text
    assert words(text).startswith("top slots by score in layer 2 (query 0 of 3) rank slot score step example label")
    for row in top.rows(0):
        assert str(row["slot"]) in text
    assert max(map(len, text.splitlines())) <= 110


def test_long_answers_are_cut_for_the_eye_only():
    top = attention().top(100)
    assert len(str(top).splitlines()) < 20
    assert len(list(top.rows())) == 100
    totals = attention().totals("step")
    assert len(str(totals).splitlines()) < 20
    assert "30 groups" in str(totals)
    assert len(list(totals.rows())) == 30


def test_each_query_has_a_table_of_its_own():
    run = mlp()
    top = attention().top(1)
    rows = [next(iter(top.rows(query))) for query in range(len(top))]
    alone = run.memory.attend(run.model, run.queries[2:])["2"].top(1)
    assert next(iter(alone.rows()))["slot"] == rows[2]["slot"]
    assert "query" not in str(alone), "a single query needs no number"


def test_top_by_example_names_examples_and_counts_visits():
    text = words(attention().top(3, by="example"))
    assert text.startswith("top examples by score in layer 2 (query 0 of 3) rank score example visits")


def test_bottom_is_not_called_top():
    c = attention("4").contributions(target=1)
    for bottom in (c.bottom(3), c.bottom(3, by="example")):
        assert str(bottom).startswith("bottom"), "what speaks against an answer is titled as its top"


def test_totals_print_each_group_and_name_the_sum():
    totals = attention().totals("source")
    text = words(totals)
    assert text.startswith("total score by source in layer 2 (query 0 of 3) source total score slots")
    for name in ("mnist", "fashion", "kanji", "–"):
        assert name in text, "slots without a value are shown as –"
    assert "total |score|" in str(attention().totals("source", absolute=True))


def test_storage_that_rounds_is_named_under_every_answer():
    run = mlp("int8", torch.float32)
    a = run.memory.attend(run.model, run.queries)["2"]
    for answer in (a.top(2), a.totals("label"), a.top(2, by="example"), a.contributions(target=1).top(2)):
        assert "stored as int8: values are approximate" in words(answer)
    assert "approximate" not in words(attention().top(2))


def test_memory_layers_and_verification_print_as_tables():
    run = mlp()
    info = words(run.memory.info)
    assert "30 steps of SGD (contributions are exact)" in info
    assert "columns: step, example, label, source, rating" in info
    for layer in LAYERS:
        assert layer in run.memory.layers
    assert "5 → 7" in info
    assert "linear" in str(run.memory.layers["0"])
    verification = words(run.memory.verify(run.model))
    assert verification.startswith("does the memory equal the network? layer exact relative error")
    assert verification.count("yes") == 3
    assert "NO" in words(run.memory.without(label=1).verify(run.model))


def test_attention_contributions_and_memories_have_a_short_name():
    run = mlp()
    spots = run.memory.attend(run.model, run.queries)
    assert repr(spots["2"]) == "Attention(2: 3 queries over 180 slots)"
    assert repr(spots).count("\n") == 2
    assert repr(spots["4"].contributions(target=1)) == "Contributions(4: 3 queries, exact)"
    assert repr(spots["2"].contributions(target=1)) == "Contributions(2: 3 queries, first order)"
    assert "all slots, 30 steps, layers 0, 2, 4" in repr(run.memory)


# -- plain data -------------------------------------------------------------------------------


def test_numpy_has_the_shapes_that_were_asked_for():
    a = attention()
    assert a.top(6).numpy().shape == (3, 6)
    assert a.top(6, by="example").numpy().shape == (3, 6)
    assert a.top(6, per="label").numpy().shape == (3, 5, 6)
    assert a.totals("label").numpy().shape == (3, 5)
    assert a.contributions(target=1).numpy().shape == (3, 180)
    assert isinstance(a.contributions(target=1).numpy(), np.ndarray)


def test_rows_and_pandas_say_the_same():
    a = attention()
    for answer in (a.top(4), a.top(2, per="label"), a.top(3, by="example"), a.totals("source")):
        frame = answer.to_pandas()
        rows = [{"query": query, **row} for query in range(3) for row in answer.rows(query)]
        assert list(frame.columns) == list(rows[0])
        assert len(frame) == len(rows)
        for name in ("score", "total score"):
            if name in frame:
                assert frame[name].tolist() == [row[name] for row in rows]


def test_rows_hold_plain_python_values():
    for row in attention().top(20).rows():
        assert all(type(value) in (int, float, str, type(None)) for value in row.values())


def test_rows_of_groups_that_have_fewer_are_fewer():
    top = attention().top(30, per="rating")
    for number, group in enumerate(top.groups):
        held = mlp().column("2", "rating").count(group)
        assert int((top.slots[0, number] >= 0).sum()) == min(held, 30)
    assert len(list(top.rows())) == int((top.slots[0] >= 0).sum())


def test_largest_names_the_group_with_the_largest_total():
    totals = attention().totals("label")
    expected = [totals.groups[int(np.argmax(row))] for row in totals.numpy()]
    assert totals.largest() == expected


def test_results_are_frozen():
    top = attention().top(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        top.values = None
