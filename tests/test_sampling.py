"""A memory may keep a sample of the slots: answers are then estimates, right on average, with a standard error."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spotlights as sl
from training import examples, network, same, state, train

STEPS, SEEDS = 20, 30


def record(path: Path, seed: int = 0, optimizer: type = torch.optim.SGD, **settings: Any) -> nn.Module:
    """Always the same run; torch's seed chooses the sample alone."""
    model = network(dtype=torch.float64)
    torch.manual_seed(seed)
    options = {"lr": 0.1, "momentum": 0.9} if optimizer is torch.optim.SGD else {"lr": 0.01}
    trainer = optimizer(model.parameters(), **options)

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)

    with sl.record(model, trainer, path, dtype="float64", **settings) as recorder:
        train(model, trainer, STEPS, recorder, size=8, before_step=clip)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, sl.Memory]:
    path = tmp_path_factory.mktemp("whole") / "run.memory"
    return record(path), sl.open(path)


QUERIES = examples()[0][:3]


def _measures(memory: sl.Memory, model: nn.Module) -> Iterator[tuple[str, Any]]:
    spot = memory.attend(model, QUERIES)
    yield "hidden scores", spot["2"].totals("label")
    yield "sizes of scores", spot["0"].totals("label", absolute=True)
    yield "all contributions", spot["2"].contributions(1).totals("step", bins=1)
    yield "contributions by label", spot["0"].contributions(1).totals("label")


def test_estimates_are_right_on_average_and_as_far_off_as_they_say(whole: tuple[nn.Module, sl.Memory], tmp_path: Path):
    model, memory = whole
    truths = dict(_measures(memory, model))
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in truths}
    for seed in range(SEEDS):
        record(tmp_path / f"{seed}.memory", seed, sample=0.5, sample_steps=0.6)
        for name, totals in _measures(sl.open(tmp_path / f"{seed}.memory"), model):
            columns = [0] if totals.binned else [totals.groups.index(group) for group in truths[name].groups]
            found[name].append((totals.values[:, columns], totals.standard_errors[:, columns]))
    for name, truth in truths.items():
        values, errors = (torch.stack(each) for each in zip(*found[name], strict=True))
        actual = values.std(dim=0)
        bias = (values.mean(dim=0) - truth.values) / (actual / SEEDS**0.5)
        assert float(bias.abs().max()) < 4.0, name  # of some dozen numbers: 4 standard errors of the mean
        ratio = errors.square().mean(dim=0).sqrt() / actual
        assert float(ratio.min()) > 0.65, name
        assert float(ratio.max()) < 1.5, name
        inside = ((values - truth.values).abs() <= 2 * errors).double().mean()
        assert float(inside) > 0.8, name  # a dozen steps are too few for 95 %


def test_what_is_stated_is_the_standard_error_of_horvitz_and_thompson(tmp_path: Path):
    model = record(tmp_path / "run.memory", sample=0.5, sample_steps=0.6)
    memory = sl.open(tmp_path / "run.memory")
    attention = memory.attend(model, QUERIES)["2"]
    scores, top = attention.scores(), attention.top(1000)
    steps = {row["slot"]: row["step"] for row in top.rows()}
    by_step = torch.zeros(3, STEPS, dtype=torch.float64)
    by_step.index_add_(1, torch.tensor([steps[slot] for slot in range(scores.shape[1])]), scores)
    totals = attention.totals("step", bins=1)
    variance = (1 - 0.5) / (0.6 * 0.5**2) * scores.square().sum(1) + (1 - 0.6) / 0.3**2 * by_step.square().sum(1)
    assert torch.allclose(totals.values[:, 0], scores.sum(1) / 0.3, atol=1e-12)
    assert torch.allclose(totals.standard_errors[:, 0], variance.sqrt(), atol=1e-12)


def test_factors_and_unexplained_shares_come_from_all_slots(whole: tuple[nn.Module, sl.Memory], tmp_path: Path):
    record(tmp_path / "run.memory", sample=0.2, sample_steps=0.5)
    mine, theirs = (memory.view.reader.log("2") for memory in (sl.open(tmp_path / "run.memory"), whole[1]))
    assert torch.equal(mine.factor["weight"], theirs.factor["weight"])
    assert float(mine.factor["weight"].min()) < 1.0, "some step was clipped"
    assert float(mine.residual.max()) < 1e-12


def test_training_and_its_random_numbers_are_untouched(tmp_path: Path):
    plain, recorded = network(dropout=0.3), network(dropout=0.3)
    torch.manual_seed(5)
    losses = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 5)
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(recorded.parameters(), lr=0.1)
    with sl.record(recorded, optimizer, tmp_path / "run.memory", sample=0.5, sample_steps=0.5) as recorder:
        assert train(recorded, optimizer, 5, recorder) == losses
    assert same(state(plain), state(recorded))


def test_a_sample_of_everything_is_the_ordinary_memory(whole: tuple[nn.Module, sl.Memory], tmp_path: Path):
    record(tmp_path / "run.memory", sample=1.0, sample_steps=1.0)
    for name in ("segments/000000-rank0.safetensors", "initial.safetensors", "final.safetensors"):
        assert (tmp_path / "run.memory" / name).read_bytes() == (whole[1].path / name).read_bytes()
    assert json.loads((tmp_path / "run.memory" / "memory.json").read_text())["sample"] is None
    assert sl.open(tmp_path / "run.memory").verify().ok


def test_slots_that_were_kept_are_those_of_the_whole_memory(whole: tuple[nn.Module, sl.Memory], tmp_path: Path):
    model = record(tmp_path / "run.memory", sample=0.4)
    memory = sl.open(tmp_path / "run.memory")
    assert 0.25 * len(whole[1]) < len(memory) < 0.55 * len(whole[1])
    assert memory.info.as_dict()["bytes"] < whole[1].info.as_dict()["bytes"]
    for measure in ("score", "contribution"):
        every, some = (
            {
                (row["step"], row["example"]): row[measure]
                for row in (a if measure == "score" else a.contributions(0)).top(1000).rows()
            }
            for a in (each.attend(model, QUERIES)["2"] for each in (whole[1], memory))
        )
        assert set(some) < set(every)
        assert all(abs(value - every[slot]) < 1e-12 for slot, value in some.items()), "slots themselves are not scaled"


def test_whole_steps_are_kept_or_left_out(tmp_path: Path):
    model = record(tmp_path / "run.memory", sample_steps=0.5)
    memory = sl.open(tmp_path / "run.memory")
    for layer in ("0", "2"):
        totals = memory.attend(model, QUERIES)[layer].totals("step")
        assert 0 < len(totals.groups) < STEPS
        assert set(totals.counts.tolist()) == {8}
    assert memory.steps == STEPS, "the log has all of them"


def test_it_is_said_wherever_numbers_are_shown(tmp_path: Path):
    model = record(tmp_path / "run.memory", sample=0.5)
    memory = sl.open(tmp_path / "run.memory")
    assert memory.info.as_dict()["sampled"] == "50 % of the slots"
    assert not memory.info.as_dict()["exact"]
    assert "a sample: 50 % of the slots" in str(memory.info)
    attention = memory.attend(model, QUERIES)["2"]
    contributions = attention.contributions(1)
    assert not contributions.exact
    for answer in (attention.totals("label"), contributions.top(3, by="example"), contributions.totals("label")):
        assert "±" in str(answer)
        assert "sample" in answer.note
        assert "±" in next(answer.rows())
    influence = memory.attend(model, QUERIES).influence(1)
    assert "sample" in influence.note
    assert bool((influence.totals("label").standard_errors > 0).all())
    figure = attention.totals("label").plot()
    assert any("sample" in text.get_text() for text in figure.texts)


def test_what_a_sample_cannot_answer_is_refused(tmp_path: Path):
    model = record(tmp_path / "run.memory", sample=0.5)
    memory = sl.open(tmp_path / "run.memory")
    for question in (
        memory.verify,
        lambda: memory.verify(model, files=False),
        lambda: memory.weights("0"),
        lambda: memory.dual(model),
        lambda: memory.without(label=1).primal(model),
        memory.suspects,
        lambda: memory.attend(model, QUERIES, kernel="softmax")["0"].top(1),
    ):
        with pytest.raises(sl.UnsupportedError, match=r"is a sample: it has 50 % of the slots\. .* all of them"):
            question()


def test_contributions_under_a_preconditioner_are_refused(tmp_path: Path):
    model = record(tmp_path / "run.memory", optimizer=torch.optim.Adam, sample=0.5)
    spot = sl.open(tmp_path / "run.memory").attend(model, QUERIES)
    with pytest.raises(sl.UnsupportedError, match="What Adam makes of a slot depends on the others"):
        spot["2"].contributions(1)
    assert spot["2"].totals("label").standard_errors is not None
    assert spot.influence(1).totals("label").standard_errors is not None


def test_wrong_shares_are_refused(tmp_path: Path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong in ({"sample": 0.0}, {"sample": 1.5}, {"sample_steps": -1.0}, {"sample": 0.5, "fold": "example"}):
        with pytest.raises(sl.SettingError):
            sl.record(model, optimizer, tmp_path / "run.memory", **wrong)


def test_a_resumed_sample_goes_on_and_another_share_is_refused(tmp_path: Path):
    model = record(tmp_path / "run.memory", sample=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(sl.ResumeError), sl.record(model, optimizer, tmp_path / "run.memory", resume=True, sample=0.4):
        pass
    settings: dict[str, Any] = {"resume": True, "sample": 0.5, "dtype": "float64"}
    with sl.record(model, optimizer, tmp_path / "run.memory", **settings) as recorder:
        assert recorder.step == STEPS
        train(model, optimizer, range(STEPS, STEPS + 2), recorder)
    assert sl.open(tmp_path / "run.memory").steps == STEPS + 2


def test_a_manifest_with_an_impossible_share_is_damaged(tmp_path: Path):
    record(tmp_path / "run.memory", sample=0.5)
    manifest = tmp_path / "run.memory" / "memory.json"
    raw = json.loads(manifest.read_text())
    del raw["checksum"]
    manifest.write_text(json.dumps(raw).replace('"rows": 0.5', '"rows": 2.0'))
    with pytest.raises(sl.MemoryFormatError, match="sample"):
        sl.open(tmp_path / "run.memory")


@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_positions_of_a_convolution_are_sampled_in_any_storage(storage: str, tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(30, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs, labels = torch.randn(6, 2, 12), torch.randint(2, (6,))
    with sl.record(model, optimizer, tmp_path / "run.memory", dtype=storage, sample=0.3) as recorder:
        for _ in range(8):
            recorder.batch(example=torch.arange(6))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
    memory = sl.open(tmp_path / "run.memory")
    assert 0.2 < memory.layers["0"].slots / (8 * 6 * 10) < 0.4
    contributions = memory.attend(model, inputs)["3"].contributions(0)
    totals = contributions.totals("step", bins=1)
    truth = model(inputs).detach()[:, 0] - contributions.initial
    assert bool(((totals.values[:, 0] - truth).abs() < 4 * totals.standard_errors[:, 0]).all())
    assert dataclasses.asdict(memory.view.reader.manifest.sample) == {"rows": 0.3, "steps": 1.0}
