"""`recorder.batch`: who is in a batch, matched to the rows of each layer."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spotlights as sl
from training import column, examples, fill, network, sgd, slots

X, Y = examples()


def _record(path, model, *steps, layers=None):
    """One recorded step for each (inputs, columns); columns None calls `batch` not at all."""
    optimizer = sgd(model)
    with sl.record(model, optimizer, path, dtype="float64", layers=layers) as recorder:
        for inputs, columns in steps:
            if columns is not None:
                recorder.batch(**columns)
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    return sl.open(path)


@pytest.mark.parametrize(
    ("given_values", "found"),
    [
        ([3, 1, 2, 3], [3, 1, 2, 3]),
        ((3, 1, 2, 3), [3, 1, 2, 3]),
        (torch.tensor([3, 1, 2, 3]), [3, 1, 2, 3]),
        (torch.tensor([3, 1, 2, 3], dtype=torch.uint8), [3, 1, 2, 3]),
        (np.array([3, 1, 2, 3], dtype=np.int16), [3, 1, 2, 3]),
        (range(4), [0, 1, 2, 3]),
        ([True, False, True, True], [1, 0, 1, 1]),
        ([0.5, 1.5, -2.0, 1e300], [0.5, 1.5, -2.0, 1e300]),
        (torch.tensor([0.5, 1.5, -2.0, 4.0], dtype=torch.bfloat16), [0.5, 1.5, -2.0, 4.0]),
        (torch.ones(4, requires_grad=True), [1.0] * 4),
        (["cat", "dog", "cat", "é “ß”"], ["cat", "dog", "cat", "é “ß”"]),
        (np.array(["cat", "dog", "cat", ""]), ["cat", "dog", "cat", ""]),
        (np.array(["cat", "dog", "cat", "x"], dtype=object), ["cat", "dog", "cat", "x"]),
        (7, [7] * 4),
        (-(2**62), [-(2**62)] * 4),
        (2.5, [2.5] * 4),
        ("web", ["web"] * 4),
        (torch.tensor(7), [7] * 4),
        (np.float32(0.5), [0.5] * 4),
    ],
    ids=repr,
)
def test_a_column_holds_numbers_strings_tensors_lists_or_one_value_for_all(tmp_path, given_values, found):
    model = network()
    memory = _record(tmp_path / "m", model, (X[:4], {"what": given_values}))
    for layer in memory.layers:
        assert column(memory, model, layer, X[:1], "what") == found


class Sequences(nn.Module):
    """(B, L, 5) → (B, L, 4) → (B, 3): per position, then per example."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.whole = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(torch.tanh(self.each(x)).mean(dim=1))


def test_one_value_per_example_holds_for_all_its_positions(tmp_path):
    model = fill(Sequences().double())
    inputs = torch.randn(2, 3, 5, dtype=torch.float64)
    memory = _record(tmp_path / "m", model, (inputs, {"example": [7, 9], "source": ["a", "b"]}))
    assert column(memory, model, "each", inputs, "example") == [7, 7, 7, 9, 9, 9]
    assert column(memory, model, "each", inputs, "source") == list("aaabbb")
    assert column(memory, model, "each", inputs, "position") == [0, 1, 2, 0, 1, 2]
    assert column(memory, model, "whole", inputs, "example") == [7, 9]
    assert column(memory, model, "whole", inputs, "position") == [None, None]


def test_one_value_per_position_holds_for_its_row_and_is_left_out_where_rows_are_examples(tmp_path):
    model = fill(Sequences().double())
    inputs = torch.randn(2, 3, 5, dtype=torch.float64)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    memory = _record(tmp_path / "m", model, (inputs, {"example": [7, 9], "token": tokens}))
    assert column(memory, model, "each", inputs, "token") == [1, 2, 3, 4, 5, 6]
    assert column(memory, model, "whole", inputs, "token") == [None, None]
    assert column(memory, model, "whole", inputs, "example") == [7, 9]


def test_rows_flattened_from_sequences_are_matched(tmp_path):
    model = network()
    tokens = [["a", "b", "c"], ["d", "e", "f"]]
    memory = _record(tmp_path / "m", model, (X[:6], {"token": tokens}))
    assert column(memory, model, "0", X[:1], "token") == list("abcdef")
    assert column(memory, model, "0", X[:1], "position") == [0, 1, 2, 0, 1, 2]


def test_one_value_per_example_holds_for_its_flattened_rows(tmp_path):
    """A (B,) column beside a (B, L) one says how many rows each example has."""
    model = network()
    columns = {"token": [[1, 2, 3], [4, 5, 6]], "example": [7, 9], "row": range(6)}
    memory = _record(tmp_path / "m", model, (X[:6], columns))
    assert column(memory, model, "0", X[:1], "example") == [7, 7, 7, 9, 9, 9]
    assert column(memory, model, "0", X[:1], "row") == [0, 1, 2, 3, 4, 5]
    assert column(memory, model, "0", X[:1], "position") == [0, 1, 2, 0, 1, 2]


def test_sequence_first_inputs_are_matched(tmp_path):
    model = fill(nn.Sequential(nn.Linear(5, 2)).double())
    inputs = torch.randn(3, 2, 5, dtype=torch.float64)  # (L, B, F)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    memory = _record(tmp_path / "m", model, (inputs, {"example": [7, 9], "token": tokens}))
    assert column(memory, model, "0", inputs, "token") == [1, 4, 2, 5, 3, 6]
    assert column(memory, model, "0", inputs, "example") == [7, 9, 7, 9, 7, 9]
    assert column(memory, model, "0", inputs, "position") == [0, 0, 1, 1, 2, 2]


def test_images_with_rows_and_columns_are_matched_per_example(tmp_path):
    model = fill(nn.Sequential(nn.Linear(5, 2)).double())
    inputs = torch.randn(2, 3, 2, 5, dtype=torch.float64)
    memory = _record(tmp_path / "m", model, (inputs, {"example": [7, 9]}))
    assert column(memory, model, "0", inputs, "example") == [7] * 6 + [9] * 6
    assert column(memory, model, "0", inputs, "position") == [0, 1, 2, 3, 4, 5] * 2


@pytest.mark.parametrize("values", [[1, 2, 3], torch.ones(5), [["a", "b"], ["c", "d"], ["e", "f"]]], ids=repr)
def test_a_wrong_size_leaves_the_column_out_with_one_warning_of_both_shapes(tmp_path, values):
    model = network()
    shape = tuple(np.shape(values))
    with pytest.warns(sl.SpotlightsWarning) as said:
        memory = _record(tmp_path / "m", model, *[(X[:4], {"label": values, "example": [3, 1, 2, 0]})] * 2)
    (message,) = (str(warning.message) for warning in said)
    assert "gave label with" in message
    assert str(shape) in message
    assert "(4,)" in message
    assert 'Layer "0"' in message
    assert 'recorder.batch(label=…, layer="0")' in message
    assert column(memory, model, "0", X[:1], "label") == [None] * 8
    assert column(memory, model, "0", X[:1], "example") == [3, 1, 2, 0] * 2
    assert memory.verify(model).ok


def test_forgetting_batch_leaves_slots_with_only_their_step(tmp_path):
    model = network()
    memory = _record(tmp_path / "m", model, (X[:2], None), (X[:2], {}))
    assert [set(row) for row in slots(memory, model, "0", X[:1])] == [{"rank", "slot", "score", "step"}] * 4
    assert column(memory, model, "0", X[:1], "step") == [0, 0, 1, 1]


def test_columns_do_not_leak_into_the_next_step(tmp_path):
    model = network()
    memory = _record(
        tmp_path / "m",
        model,
        (X[:2], {"label": [1, 2], "weight": 0.5, "source": "a"}),
        (X[:2], None),
        (X[:2], {"label": [3, 4]}),
    )
    assert column(memory, model, "2", X[:1], "label") == [1, 2, None, None, 3, 4]
    assert column(memory, model, "2", X[:1], "source") == ["a", "a"] + [None] * 4
    assert column(memory, model, "2", X[:1], "weight") == [0.5, 0.5] + [None] * 4
    assert len(memory.where(source="a")) == 2
    assert len(memory.without(source="a")) == 4


def test_the_last_call_before_the_forward_pass_counts(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m") as recorder:
        recorder.batch(label=[1, 2, 3], source="a")
        recorder.batch(label=[4, 5])
        model(X[:2]).sum().backward()
        recorder.batch(label=[6, 7])  # the next micro-batch
        model(X[:2]).sum().backward()
        recorder.batch(label=[8, 9])  # too late for this step
        with pytest.warns(sl.SpotlightsWarning, match="Call it before the forward pass"):
            optimizer.step()
    memory = sl.open(tmp_path / "m")
    assert column(memory, model, "0", X[:1], "label") == [4, 5, 6, 7]
    assert "source" in memory.columns
    assert column(memory, model, "0", X[:1], "source") == [None] * 4


@pytest.mark.parametrize("name", ["step", "position", "slot", "score", "contribution"])
def test_reserved_names_are_refused(tmp_path, name):
    with pytest.raises(sl.SettingError, match=f'"{name}".*Choose another name'):
        _record(tmp_path / "m", network(), (X[:2], {name: [1, 2]}))


@pytest.mark.parametrize("name", ["a b", "a/b", "", "../x"])
def test_names_that_are_no_names_are_refused(tmp_path, name):
    with pytest.raises(sl.SettingError, match="name"):
        _record(tmp_path / "m", network(), (X[:2], {name: [1, 2]}))


@pytest.mark.parametrize(
    ("first", "then"),
    [([1, 2], ["a", "b"]), (["a", "b"], [1, 2]), ([1, 2], [0.5, 1.5]), ([0.5, 1.5], ["a", "b"])],
    ids=repr,
)
def test_a_column_keeps_its_type(tmp_path, first, then):
    with pytest.raises(sl.SettingError, match=r'The column "label" has held .* Use one type per column'):
        _record(tmp_path / "m", network(), (X[:2], {"label": first}), (X[:2], {"label": then}))


def test_whole_numbers_may_follow_fractions(tmp_path):
    model = network()
    memory = _record(tmp_path / "m", model, (X[:2], {"loss": [0.5, 1.5]}), (X[:2], {"loss": [1, 2]}))
    assert column(memory, model, "0", X[:1], "loss") == [0.5, 1.5, 1.0, 2.0]


UNSTORABLE = {
    "too large": [2**63, 1],
    "what stands for missing values": [-(2**63), 1],
    "what stands for missing values, in a tensor": torch.tensor([-(2**63), 1]),
    "too large, unsigned": np.array([2**64 - 1, 1], dtype=np.uint64),
    "a number and a string": [1, "1"],
    "bytes": [b"ab", b"c"],
    "bytes in an array": np.array([b"ab", b"c"]),
    "half a character": ["a\ud800", "b"],
    "half a character for all": "a\ud800",
}
"""These became None, -1, one group, "b'ab'", and text that nobody can print."""


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("what", UNSTORABLE)
def test_values_that_would_come_back_as_others_are_refused(tmp_path, what, earlier):
    is_number = what.startswith("too")
    steps = [(X[:2], {"label": [1, 2] if is_number else ["a", "b"]})] if earlier else []
    with pytest.raises(sl.SettingError, match='"label"'):
        _record(tmp_path / "m", network(), *steps, (X[:2], {"label": UNSTORABLE[what]}))


def test_strings_come_back_as_they_are(tmp_path):
    given_strings = ["", "a\0", "é", "\U0001f600", " a", "nul\0l"]
    model = network()
    memory = _record(tmp_path / "m", model, (X[:6], {"label": given_strings}))
    assert column(memory, model, "0", X[:1], "label") == given_strings


@pytest.mark.parametrize("values", [[None, None], [[1, 2], [3]], [1j, 2j], torch.ones(2, 2, 2)], ids=str)
def test_what_is_no_column_is_refused_by_name(tmp_path, values):
    with pytest.raises(sl.SettingError, match='"label"'):
        _record(tmp_path / "m", network(), (X[:2], {"label": values}))


def test_batch_outside_the_block_is_refused(tmp_path):
    model = network()
    recorder = sl.record(model, sgd(model), tmp_path / "m")
    with pytest.raises(sl.SettingError, match="outside its `with` block"):
        recorder.batch(label=1)


@pytest.mark.filterwarnings("ignore:.*examples may be counted along")
@settings(max_examples=25, deadline=None)
@given(
    lead=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    depth=st.integers(0, 2),
)
def test_columns_spread_like_numpy_broadcasting_from_the_left(tmp_path_factory, lead, depth):
    """A column of shape `lead[:depth]` gives each row the value at the row's leading indices."""
    shape = lead[: min(depth, len(lead))]
    values = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    rows = np.broadcast_to(values.reshape(shape + (1,) * (len(lead) - len(shape))), lead).reshape(-1)
    model = fill(nn.Sequential(nn.Linear(5, 2)).double())
    inputs = torch.ones(*lead, 5, dtype=torch.float64)
    memory = _record(tmp_path_factory.mktemp("columns") / "m", model, (inputs, {"label": values}))
    assert column(memory, model, "0", inputs, "label") == rows.tolist()
