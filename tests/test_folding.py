"""Folded memories: the sum of each example's keys answers as all of its visits together do, and says what it cannot."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spotlights as sl
from spotlights.memory.reader import MemoryReader
from spotlights.memory.store import store_at
from training import examples, network, sgd, state
from training import train as train_examples

LENGTH, VOCABULARY = 61, 7
Batch = tuple[Any, Tensor, dict[str, Any]]


class Reader(nn.Module):
    """A tiny language model: embedding, a hidden layer, one row for each token."""

    def __init__(self, *, batch_first: bool = True, recurrent: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.hidden = nn.LSTM(4, 6, batch_first=batch_first) if recurrent else nn.Linear(4, 6)
        self.head = nn.Linear(6, VOCABULARY)
        self.batch_first = batch_first

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.embedding(tokens if self.batch_first else tokens.T)
        rows = self.hidden(rows)[0] if isinstance(self.hidden, nn.LSTM) else torch.tanh(self.hidden(rows))
        found = self.head(rows)
        return found if self.batch_first else found.transpose(0, 1)


def text() -> Tensor:
    return torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(4))


def windows(epochs: int, *, lanes: int = 3, length: int = 5, shift: int = 2) -> Iterator[Batch]:
    """A stream cut into lanes, read window by window; each epoch begins somewhat later, so windows never agree."""
    tokens = text()
    for epoch in range(epochs):
        start, lane = epoch * shift, (LENGTH - 1 - epoch * shift) // lanes
        for at in range(0, lane, length):
            width = min(length, lane - at)
            first = start + at + lane * torch.arange(lanes)
            positions = first[:, None] + torch.arange(width)
            yield tokens[positions], tokens[positions + 1], {"example": positions, "token": tokens[positions]}


def run(model: nn.Module, batches: Iterable[Batch], **options: Any) -> sl.Memory:
    """Trains a copy of the model, with the same result whatever is recorded."""
    torch.manual_seed(0)
    path = Path(tempfile.mkdtemp()) / "run.memory"
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with sl.record(model, optimizer, path, **{"segment_bytes": 2000, "dtype": "float64", **options}) as recorder:
        for inputs, targets, columns in batches:
            recorder.batch(**columns)
            optimizer.zero_grad()
            output = model(inputs)
            F.cross_entropy(output.reshape(-1, output.shape[-1]), targets.reshape(-1)).backward()
            optimizer.step()
    return sl.open(path)


def test_no_growth_is_announced_for_a_memory_that_does_not_grow(caplog):
    with caplog.at_level("INFO", logger="spotlights"):
        run(Reader(), windows(1), fold="example")
    assert "per 1,000 steps" not in caplog.text
    with caplog.at_level("INFO", logger="spotlights"):
        run(Reader(), windows(1))
    assert "per 1,000 steps" in caplog.text


def both(model: nn.Module, batches: list[Batch], **options: Any) -> tuple[nn.Module, sl.Memory, sl.Memory]:
    """The same run folded and unfolded; and its network."""
    trained = copy.deepcopy(model)
    folded = run(trained, batches, fold="example", **options)
    again = copy.deepcopy(model)
    full = run(again, batches, dtype=options.get("dtype", "float64"), segment_bytes=50_000)
    assert all(torch.equal(a, b) for a, b in zip(state(trained).values(), state(again).values(), strict=True))
    return trained, folded, full


def assert_same_totals(
    model: nn.Module, folded: sl.Memory, full: sl.Memory, inputs: Any, columns: Iterable[str], tolerance: float
) -> None:
    ours, theirs = folded.attend(model, inputs), full.attend(model, inputs)
    assert list(ours) == list(theirs)
    for layer in ours:
        for column in columns:
            got, wanted = ours[layer].totals(column), theirs[layer].totals(column)
            assert got.groups == wanted.groups
            assert torch.equal(got.counts, wanted.counts), "visits are not the number of slots that were folded"
            close = {"rtol": tolerance, "atol": tolerance * float(wanted.values.abs().max())}
            torch.testing.assert_close(got.values, wanted.values, **close)


# -- the same totals --------------------------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [True, False], ids=["lstm", "linear"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "sequence first"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=str)
def test_folded_totals_equal_unfolded_totals_of_a_text(batch_first, recurrent, dtype, tolerance):
    """Windows of 5 tokens in 3 lanes, shifted in every epoch: no window comes twice."""
    torch.manual_seed(1)
    model = Reader(batch_first=batch_first, recurrent=recurrent).to(dtype)
    storage = str(dtype).removeprefix("torch.")
    model, folded, full = both(model, list(windows(4)), dtype=storage)
    queries = text()[:6].reshape(2, 3)
    assert_same_totals(model, folded, full, queries, ["example", "token"], tolerance)
    assert len(folded) == len(full.attend(model, queries)["head"].totals("example").groups)
    assert ("hidden.l0" in folded.layers) == recurrent
    if recurrent:  # `h` is what came before a token, `x` the token: those of one part add up to the whole
        parts = [folded.attend(model, queries, part=part)["hidden.l0"].scores() for part in ("x", "h")]
        whole = folded.attend(model, queries)["hidden.l0"].scores()
        torch.testing.assert_close(parts[0] + parts[1], whole, rtol=tolerance, atol=tolerance)
    assert "position" not in folded.columns, "where a token is in its window is nothing about the token"


def test_scores_of_a_folded_memory_are_the_totals_by_example():
    torch.manual_seed(1)
    model, folded, full = both(Reader().double(), list(windows(3)))
    queries = text()[:4].reshape(1, 4)
    ours, theirs = (memory.attend(model, queries)["head"] for memory in (folded, full))
    totals = theirs.totals("example")
    found = {row["example"]: row["slot"] for row in ours.top(LENGTH).rows(0)}
    in_order = torch.tensor([found[example] for example in totals.groups])
    torch.testing.assert_close(ours.scores()[:, in_order], totals.values, rtol=1e-10, atol=1e-10)
    for kind in ({}, {"by": "example"}):
        rows = list(ours.top(5, **kind).rows(2))
        wanted = list(theirs.top(5, by="example").rows(2))
        assert [(r["example"], r["visits"]) for r in rows] == [(r["example"], r["visits"]) for r in wanted]
        assert [r["score"] for r in rows] == pytest.approx([r["score"] for r in wanted], rel=1e-10)


def test_examples_of_several_rows_are_folded_by_position():
    """Sequences with one id each: a slot is an example and a position in it."""
    torch.manual_seed(2)
    sequences = text()[:60].reshape(10, 6)
    batches: list[Batch] = []
    for step in range(12):
        ids = torch.tensor([step % 10, (3 * step + 1) % 10])
        batches.append((sequences[ids], sequences[ids].roll(-1, 1), {"example": ids + 1000, "label": ids % 2}))
    model, folded, full = both(Reader().double(), batches)
    assert_same_totals(model, folded, full, sequences[:2], ["example", "position", "label"], 1e-10)
    assert folded.layers["head"].slots == 6 * len({int(i) for b in batches for i in b[2]["example"]})


@st.composite
def visits(draw: st.DrawFn) -> list[list[int]]:
    numbers = st.one_of(st.integers(-3, 40), st.integers(-(2**62), 2**62))
    known = draw(st.lists(numbers, min_size=1, max_size=12, unique=True))
    return draw(st.lists(st.lists(st.sampled_from(known), min_size=1, max_size=9), min_size=1, max_size=6))


@settings(max_examples=12, deadline=None)
@given(batches=visits(), segment_bytes=st.sampled_from([100, 5000]))
def test_any_examples_in_any_order_are_folded(batches, segment_bytes):
    """Far apart, negative, several times in one batch, in sums of any size."""
    generator = torch.Generator().manual_seed(5)
    fed: list[Batch] = []
    for ids in batches:
        inputs = torch.randn(len(ids), 5, generator=generator, dtype=torch.float64)
        fed.append((inputs, torch.zeros(len(ids), dtype=torch.int64), {"example": ids, "parity": [i % 2 for i in ids]}))
    model, folded, full = both(network(), fed, segment_bytes=segment_bytes)
    assert_same_totals(model, folded, full, examples()[0][:3], ["example", "parity"], 1e-10)


@pytest.mark.parametrize("fold_from", [1, 7, 15, 16])
def test_only_the_last_steps_can_be_folded(fold_from):
    torch.manual_seed(1)
    batches = list(windows(4))
    model, folded, full = both(Reader().double(), batches, fold_from=fold_from)
    queries = text()[:3].reshape(1, 3)
    assert folded.steps == len(batches) == 16
    if fold_from == 16:
        assert len(folded) == 0
        assert "no steps yet" in str(folded.info)
        return
    part = full.where(step=range(fold_from, 16))
    for layer in ("hidden", "head"):
        ours = folded.attend(model, queries)[layer].totals("example")
        theirs = part.attend(model, queries)[layer].totals("example")
        values = dict(zip(theirs.groups, theirs.values.T, strict=True))
        for group, value in zip(ours.groups, ours.values.T, strict=True):
            torch.testing.assert_close(value, values[group], rtol=1e-10, atol=1e-12)
    assert f"steps {fold_from} to 15" in str(folded.info)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float16", 2e-3)])
def test_sums_can_be_stored_smaller(dtype, tolerance):
    torch.manual_seed(1)
    batches = list(windows(3))
    model, folded, full = both(Reader().double(), batches, dtype=dtype)
    exact = run(copy.deepcopy(Reader().double()), batches)  # only its size is looked at
    queries = text()[:3].reshape(1, 3)
    for layer, attention in folded.attend(model, queries).items():
        wanted = full.attend(model, queries)[layer].totals("example").values
        off = (attention.totals("example").values - wanted).abs().max() / wanted.abs().max()
        assert off < tolerance
        assert ("approximate" in (attention.note or "")) == (dtype == "float16")
    kinds = {str(t.dtype) for s in MemoryReader(store_at(folded.path)).segments for n in s.layout if (t := s.layout[n])}
    assert f"torch.{dtype}" in kinds
    assert folded.info.as_dict()["bytes"] < exact.info.as_dict()["bytes"]


# -- what is known of a slot -------------------------------------------------------------------------


def test_a_column_is_kept_where_all_visits_agree():
    inputs, labels = examples()
    batches: list[Batch] = []
    for step in range(4):
        ids = torch.tensor([0, 1, 2])
        columns = {"example": ids, "label": labels[ids], "loss": [float(step)] * 3, "turn": [step, 0, 0]}
        columns["source"] = ["a", "b", "c" if step < 3 else "d"]
        columns["note"] = "x"
        if step == 2:
            del columns["note"]  # not said once: not the same at every visit
        batches.append((inputs[ids], labels[ids], columns))
    model = network()
    folded = run(model, batches, fold="example")
    assert set(folded.columns) == {"example", "visits", "first_step", "last_step", "label", "source", "turn"}
    rows = sorted(folded.attend(model, inputs[:1])["2"].top(3).rows(0), key=lambda row: row["example"])
    assert [row["visits"] for row in rows] == [4, 4, 4]
    assert [(row["first_step"], row["last_step"]) for row in rows] == [(0, 3)] * 3
    assert [row["label"] for row in rows] == labels[:3].tolist()
    assert [row["source"] for row in rows] == ["a", "b", None]
    assert [row["turn"] for row in rows] == [None, 0, 0]
    assert len(folded.where(source="a")) == 1
    assert len(folded.where(first_step=range(1, 4))) == 0


def test_the_memory_says_that_it_is_folded_and_over_which_steps():
    model = network()
    optimizer = sgd(model)
    path = Path(tempfile.mkdtemp()) / "m"
    with sl.record(model, optimizer, path, fold="example", fold_from=2) as recorder:
        train_examples(model, optimizer, 10, recorder)
    info = sl.open(path).info
    assert info.as_dict()["folded"] == "by example over steps 2 to 9"
    assert "folded by example over steps 2 to 9" in str(info)
    assert "sum over its visits in steps 2 to 9" in str(
        sl.open(path).attend(model, examples()[0][:1])["0"].top(2)
    ).replace("\n", " ")
    full = network()
    with sl.record(full, sgd(full), path, overwrite=True) as recorder:
        pass
    assert sl.open(path).info.as_dict()["folded"] is None


# -- what it cannot answer ----------------------------------------------------------------------------

REFUSED = {
    "sums of |score|": lambda memory, model, x: memory.attend(model, x)["2"].totals("label", absolute=True),
    "many sums of |score|": lambda memory, model, x: memory.attend(model, x.expand(20, -1))["2"].totals(
        "label", absolute=True
    ),
    "totals by step": lambda memory, model, x: memory.attend(model, x)["2"].totals("step", bins=5),
    "some steps": lambda memory, model, x: memory.where(step=range(3)),
    "an earlier network": lambda memory, model, x: memory.as_of(3),
    "contributions": lambda memory, model, x: memory.attend(model, x)["2"].contributions(target=1),
    "influence": lambda memory, model, x: memory.attend(model, x).influence(target=1),
    "suspects": lambda memory, model, x: memory.suspects(3),
    "weights": lambda memory, model, x: memory.weights("2"),
    "a masked network": lambda memory, model, x: memory.without(label=1).primal(model),
    "a dual network": lambda memory, model, x: memory.dual(model)(x),
    "verify": lambda memory, model, x: memory.verify(model),
    "verify without files": lambda memory, model, x: memory.verify(files=False),
    "softmax": lambda memory, model, x: memory.attend(model, x, kernel="softmax")["2"].top(3),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[sl.Memory, nn.Module]:
    model, path = network(), tmp_path_factory.mktemp("folded") / "m"
    optimizer = sgd(model)
    with sl.record(model, optimizer, path, dtype="float64", fold="example") as recorder:
        train_examples(model, optimizer, 10, recorder)
    return sl.open(path), model


@pytest.mark.parametrize("question", REFUSED.values(), ids=REFUSED.keys())
def test_what_a_folded_memory_cannot_answer_is_refused_with_what_to_do(small, question):
    memory, model = small
    with pytest.raises(sl.UnsupportedError, match=r"is folded: .* over steps 0 to 9, not .*\. .*, or record without"):
        question(memory, model, examples()[0][:1])


def test_verify_still_finds_damaged_files(tmp_path):
    model = network()
    optimizer = sgd(model)
    with sl.record(model, optimizer, tmp_path / "m", fold="example") as recorder:
        train_examples(model, optimizer, 5, recorder)
    file = sorted((tmp_path / "m" / "segments").iterdir())[-1]
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(sl.MemoryFormatError, match="has changed since it was written"):
        sl.open(tmp_path / "m").verify()


@pytest.mark.parametrize(
    "damage",
    [
        {"by": "label"},
        {"from_step": -1},
        {"steps": 3},
        {"steps": "many"},
        {"earlier": {"steps": 1, "asked": True}},
        {"earlier": {"steps": 1, "asked": True, "segments": [{"file": "../../secret"}]}},
        {"colour": "red"},
        7,
    ],
    ids=str,
)
def test_a_damaged_fold_entry_is_named(small, tmp_path, damage):
    memory, _ = small
    shutil.copytree(memory.path, tmp_path / "m")
    manifest = json.loads((tmp_path / "m" / "memory.json").read_text())
    del manifest["checksum"]
    manifest["fold"] = {**manifest["fold"], **damage} if isinstance(damage, dict) else damage
    (tmp_path / "m" / "memory.json").write_text(json.dumps(manifest))
    with pytest.raises(sl.MemoryFormatError, match=r"memory\.json is damaged"):
        sl.open(tmp_path / "m")


# -- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fold": "label"}, 'give "example"'),
        ({"fold_from": 3}, "together with fold"),
        ({"fold": "example", "fold_from": -1}, "0 or later"),
        ({"fold": "example", "dtype": "int8"}, "float16"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, options, message):
    model = network()
    with pytest.raises(sl.SettingError, match=message):
        sl.record(model, sgd(model), tmp_path / "m", **options)


@pytest.mark.parametrize("columns", [{}, {"label": [1, 2]}, {"example": [0.5, 1.5]}], ids=str)
def test_a_batch_without_examples_stops_recording(tmp_path, columns):
    model = network()
    with sl.record(model, sgd(model), tmp_path / "m", fold="example") as recorder:
        if columns:
            recorder.batch(**columns)
        with pytest.warns(sl.RecordingStoppedWarning, match=r"recorder.batch\(example=ids\)"):
            model(examples()[0][:2])


def test_a_layer_that_sees_whole_sequences_cannot_be_folded_by_token(tmp_path):
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.last = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.each(x)[:, -1])

    model = Last()
    with sl.record(model, sgd(model), tmp_path / "m", fold="example") as recorder:
        recorder.batch(example=torch.arange(6).reshape(2, 3))
        with pytest.warns(sl.RecordingStoppedWarning, match='"last" has one row for each sequence'):
            model(torch.randn(2, 3, 5))


@pytest.mark.parametrize("name", ["visits", "first_step", "last_step"])
def test_the_columns_of_folding_cannot_be_given(tmp_path, name):
    model = network()
    with (
        sl.record(model, sgd(model), tmp_path / "m", fold="example") as recorder,
        pytest.raises(sl.SettingError, match="Spotlights writes that one itself"),
    ):
        recorder.batch(**{name: [1, 2]})
