"""Claims about subjects: what users may give, when it is read, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

import spotlights as sl
from spotlights.explorer.data import overview
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.queries import read_query
from spotlights.explorer.views import as_json, pixels
from tables import CLASSES, network, regression, rows, trained


def subject(**changes) -> sl.Subject:
    path, model = trained()
    given = {"model": model, "inputs": rows(6, seed=2)[0], **changes}
    return sl.Subject(path, **given)


# -- the network ------------------------------------------------------------------------------


def test_a_model_may_be_a_module_or_a_function_of_nothing_or_of_the_memory():
    memory = subject().open()
    expected = trained()[1](subject().inputs.data)
    for model in (trained()[1], lambda: trained()[1], lambda memory: memory.primal(network())):
        given = subject(model=model).network(memory)
        assert not given.training
        torch.testing.assert_close(given(subject().inputs.data), expected)


def test_the_user_s_own_module_is_copied():
    given = subject().network(subject().open())
    with torch.no_grad():
        given[0].weight.zero_()
    assert trained()[1][0].weight.abs().sum() > 0


def test_a_network_that_was_not_trained_is_refused():
    with pytest.raises(sl.SettingError, match="not the network that"):
        subject(model=network).network(subject().open())


@pytest.mark.parametrize("model", [3, "model.pt", lambda: 3])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(sl.SettingError, match="torch module"):
        subject(model=model).network(subject().open())


def test_nothing_is_read_before_it_is_needed():
    def explode():
        raise AssertionError("read too early")

    sl.Subject("nowhere.memory", model=explode, inputs=explode, text=explode, labels=explode)


# -- the inputs -------------------------------------------------------------------------------


class Pairs:
    """A dataset as torch has them."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int):
        inputs, labels = rows(6, seed=2)
        return inputs[place], int(labels[place])


@pytest.mark.parametrize(
    "given",
    [
        rows(6, seed=2)[0],
        rows(6, seed=2)[0].numpy(),
        list(rows(6, seed=2)[0]),
        rows(6, seed=2)[0].tolist(),
        lambda: rows(6, seed=2)[0],
        Pairs(),
    ],
    ids=["tensor", "array", "list", "numbers", "function", "dataset"],
)
def test_inputs_may_come_in_many_forms(given):
    inputs = subject(inputs=given).inputs
    torch.testing.assert_close(inputs.batch([0, 2]), rows(6, seed=2)[0][[0, 2]])
    assert inputs.ids == [0, 1, 2, 3, 4, 5]
    assert (inputs.labels == [0, 1, 2, 0, 1, 2]) is isinstance(given, Pairs)


def test_inputs_may_be_several_arguments_or_of_several_shapes():
    pair = subject(inputs=(torch.zeros(4, 3), torch.ones(4, 2))).inputs
    assert [part.shape for part in pair.batch([1])] == [(1, 3), (1, 2)]
    named = subject(inputs={"a": torch.zeros(4, 3), "b": torch.ones(4)}).inputs
    assert named.batch([1, 2])["b"].tolist() == [1, 1]
    ragged = subject(inputs=[torch.zeros(3), torch.zeros(5)]).inputs
    assert [batch.shape for batch in ragged.batches(512)] == [(1, 3), (1, 5)]


def test_a_missing_id_gives_the_range_that_exists():
    with pytest.raises(sl.UnknownNameError, match=r"No test input has the id 7\. The ids are 0 to 5\."):
        subject().inputs.place(7)
    with pytest.raises(sl.UnknownNameError, match="The ids are 6 values from 10 to 60"):
        subject(ids=[10, 20, 30, 40, 50, 60]).inputs.place(7)
    with pytest.raises(sl.UnknownNameError, match=r"The ids in the memory are 0 to 89; .*IndexError"):
        subject(show=lambda example: rows(90, seed=1)[0][example]).show_example(500)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"inputs": None}, "inputs= are the test inputs"),
        ({"inputs": torch.zeros(0, 3)}, "at least one"),
        ({"labels": [1, 2]}, "6 inputs, but 2 labels"),
        ({"ids": range(7)}, "6 inputs, but 7 ids"),
        ({"labels": [0.5] * 6}, "leave labels= out"),
        ({"inputs": (torch.zeros(4, 3), torch.ones(3, 2))}, "one row for each input"),
    ],
)
def test_what_does_not_fit_is_refused(changes, sentence: str):
    with pytest.raises(sl.SettingError, match=sentence):
        subject(**changes).inputs  # noqa: B018


def test_class_names_may_depend_on_the_source():
    assert subject(classes=CLASSES).class_names("any") == CLASSES
    named = subject(classes={"digits": range(10), "letters": "abc"})
    assert named.class_names("letters") == ["a", "b", "c"]
    assert named.class_names(None)[:2] == ["0", "1"]
    assert subject().class_names() == []


# -- how things look --------------------------------------------------------------------------


class Picture:
    """As PIL has them."""

    mode = "RGBA"

    def convert(self, mode: str) -> np.ndarray:
        assert mode == "RGB"
        return np.zeros((4, 5, 3), np.uint8)


@pytest.mark.parametrize(
    ("shown", "kind"),
    [
        (np.zeros((4, 5)), "image"),
        (torch.zeros(3, 4, 5), "image"),
        (Picture(), "image"),
        ("a text", "text"),
        (sl.MarkedText("a text", 2, 6), "text"),
        ({"stem": 1.23456}, "table"),
        ([1.0, 2.0], "table"),
        (torch.zeros(3), "table"),
    ],
)
def test_an_image_a_text_or_a_row_can_be_shown(shown, kind: str):
    assert as_json(shown)["kind"] == kind
    if kind == "image":
        assert pixels(shown).shape[:2] == (4, 5)
    if isinstance(shown, dict):
        assert as_json(shown)["rows"] == [["stem", "1.235"]]


def test_a_position_of_a_text_is_shown_in_its_sentence():
    shown = subject(text="One hen. Two hens sat. Three.").show_example(13)
    assert (shown.text.strip(), shown.text[shown.start : shown.end]) == ("Two hens sat.", "h")
    words = subject(text=["One", "hen", ".", "Two", "hens", "sat", "."]).show_example(4)
    assert words.text[words.start : words.end] == "hens"
    with pytest.raises(sl.UnknownNameError, match="0 to 6"):
        subject(text=["One", "hen", ".", "Two", "hens", "sat", "."]).show_example(7)


# -- the explorer on a subject ----------------------------------------------------------------


def test_a_regression_is_a_number_and_not_a_class():
    path, model = regression()
    explorer = Explorer(sl.Subject(path, model, rows(5, seed=3)[0]), prepare=False)
    about, answer = overview(explorer), explorer.answer(read_query(explorer.subject, "test:2"))
    assert (about["groups"], about["classes"], about["labelled"]) == ({}, [], False)
    assert float(answer["said_name"]) == pytest.approx(answer["outputs"][0]["logit"], rel=1e-3)
    assert answer["outputs"][0]["share"] is None


class Wrapped(nn.Module):
    """Takes two arguments and gives a dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, left, right):
        return {"logits": self.model(torch.cat([left, right], dim=1))}


def test_a_target_makes_numbers_of_any_output(tmp_path):
    inputs, labels = rows(90, seed=1)
    model = Wrapped(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "wrapped.memory") as recorder:
        for _ in range(5):
            recorder.batch(label=labels)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[:, :1], inputs[:, 1:])["logits"], labels).backward()
            optimizer.step()
    given = (inputs[:4, :1], inputs[:4, 1:])
    settings = {"labels": labels[:4], "target": lambda output: output["logits"]}
    explorer = Explorer(sl.Subject(tmp_path / "wrapped.memory", model, given, **settings), prepare=False)
    explorer.prepare(explorer.opened)
    query = read_query(explorer.subject, "test:3")
    expected = model(*(part[3:4] for part in given))["logits"][0]
    logits = [output["logit"] for output in explorer.answer(query)["outputs"]]
    assert logits == pytest.approx(expected.tolist(), rel=1e-5)
    plain = sl.Subject(tmp_path / "wrapped.memory", model, given)
    with pytest.raises(sl.SettingError, match="Give the subject a target="):
        Explorer(plain, prepare=False).answer(read_query(plain, "test:3"))
