"""Suspects: the examples that the network kept disagreeing with, and what it would have said."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spotlights as sl
from memories import mlp


def flipped_run(
    path: Path, *, loss_scale: float = 1.0, recorder_flush: bool = False
) -> tuple[sl.Memory, list[int], list[int]]:
    """Four well separated clusters with a few wrong labels; returns the memory, who is wrong, and the true labels."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.arange(80) % 4
    inputs = 3 * torch.eye(4)[truth] + 0.3 * torch.randn(80, 4, generator=generator)
    wrong = torch.tensor([3, 17, 42, 64])
    labels = truth.clone()
    labels[wrong] = (labels[wrong] + 1) % 4
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, path) as recorder:
        for _ in range(10):
            for batch in torch.randperm(80, generator=generator).split(16):
                recorder.batch(example=batch + 100, label=labels[batch])
                optimizer.zero_grad()
                (loss_scale * F.cross_entropy(model(inputs[batch]), labels[batch])).backward()
                for parameter in model.parameters():
                    parameter.grad /= loss_scale
                optimizer.step()
        if recorder_flush:
            recorder.flush()
            return sl.open(path), (wrong + 100).tolist(), truth.tolist()
    return sl.open(path), (wrong + 100).tolist(), truth.tolist()


@pytest.mark.parametrize("while_recording", [False, True])
def test_wrong_labels_come_first_with_the_label_the_network_would_give(tmp_path: Path, while_recording: bool):
    memory, wrong, truth = flipped_run(tmp_path / "a.memory", recorder_flush=while_recording)
    suspects = memory.suspects(4)
    assert sorted(suspects.examples) == wrong
    assert suspects.answers == [truth[int(example) - 100] for example in suspects.examples]
    assert suspects.columns["label"] != suspects.answers
    assert suspects.visits.tolist() == [10] * 4
    assert (suspects.scores.diff() <= 0).all()
    assert "network says" in str(suspects)


def test_suspicion_is_the_sum_of_the_norms_of_the_last_layer_s_errors():
    run = mlp()
    suspects = run.memory.suspects(100)
    truth: dict[int, float] = {}
    for slot in run.slots["4"]:
        if "example" in slot.columns:
            example = slot.columns["example"]
            truth[example] = truth.get(example, 0.0) + float(slot.error.norm()) * run.factors[slot.step]
    assert set(suspects.examples) == set(truth), "slots without an example are nobody's"
    found = dict(zip(suspects.examples, suspects.scores.tolist(), strict=True))
    assert found == pytest.approx(truth, rel=1e-6)


def test_an_example_learned_down_to_rounding_does_not_hide_what_the_network_says(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.tensor([[30.0, 0.0], [0.0, 30.0], [29.0, 0.0]]), torch.tensor([0, 1, 1])
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.6, 0.0], [0.0, 0.6], [0.1, 0.1]]))
    with sl.record(model, optimizer, tmp_path / "a.memory") as recorder:
        for _ in range(200):
            recorder.batch(example=[0, 1, 2], label=labels)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
    assert sl.open(tmp_path / "a.memory").suspects(1).answers == [0]


def test_a_scaled_loss_changes_nothing(tmp_path: Path):
    plain, scaled = (flipped_run(tmp_path / str(s), loss_scale=s)[0].suspects(20) for s in (1.0, 1024.0))
    assert plain.examples == scaled.examples
    torch.testing.assert_close(plain.scores, scaled.scores, rtol=1e-4, atol=1e-6)


def test_suspects_of_a_view_and_as_csv_and_pandas(tmp_path: Path):
    memory, wrong, _ = flipped_run(tmp_path / "a.memory")
    some = memory.without(example=wrong[:2]).suspects(2)
    assert sorted(some.examples) == wrong[2:]
    with some.to_csv(tmp_path / "audit.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["example"]) for row in rows] == some.examples
    assert some.to_pandas()["network says"].tolist() == some.answers


def test_errors_that_are_not_of_classes_name_no_class(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "a.memory") as recorder:
        recorder.batch(example=[0, 1])
        model(torch.randn(2, 3)).square().sum().backward()
        optimizer.step()
    assert sl.open(tmp_path / "a.memory").suspects(2).answers == [None, None]


def test_what_cannot_be_told_is_refused_in_a_sentence(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "a.memory"):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
    with pytest.raises(sl.UnknownNameError, match=r"recorder\.batch"):
        sl.open(tmp_path / "a.memory").suspects()
    with pytest.raises(sl.SettingError, match="at least one"):
        mlp().memory.suspects(0)
    with pytest.raises(sl.UnknownNameError, match="It has: 0, 2, 4"):
        mlp().memory.suspects(layer="5")


def test_suspects_say_why(tmp_path: Path):
    """Agreement and the nearest of other classes, against the same training followed by hand."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(30, 4, generator=generator), torch.arange(30) % 3
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    agreed, visits, keys = torch.zeros(30), torch.zeros(30), torch.zeros(30, 6)
    with sl.record(model, optimizer, tmp_path / "a.memory") as recorder:
        for _ in range(6):
            for batch in torch.randperm(30, generator=generator).split(7):  # the last batch is smaller
                recorder.batch(example=batch + 100)
                output = model(inputs[batch])
                agreed[batch] += (output.argmax(dim=1) == labels[batch]).float()
                visits[batch] += 1
                weight, bias = (parameter.detach() for parameter in model[0].parameters())
                keys[batch] = (inputs[batch] @ weight.T + bias).tanh()
                optimizer.zero_grad()
                F.cross_entropy(output, labels[batch]).backward()
                optimizer.step()
    memory = sl.open(tmp_path / "a.memory")
    suspects = memory.suspects(30)
    for place, example in enumerate(suspects.examples):
        own = int(example) - 100
        assert suspects.agreement[place] == pytest.approx(float(agreed[own] / visits[own]))
        alike = torch.where(labels == labels[own], -2.0, F.cosine_similarity(keys[own][None], keys))
        assert suspects.rivals[place] == (alike.topk(3).indices + 100).tolist()
    assert {"agreement", "nearest that disagree"} <= set(next(suspects.rows()))
    each = memory.suspects(2, per_class=True)
    of_class = [[e for e in suspects.examples if labels[int(e) - 100] == number][:2] for number in range(3)]
    assert each.examples == [example for examples in of_class for example in examples]


def test_errors_of_a_sum_do_not_tell_agreement(tmp_path: Path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "a.memory") as recorder:
        recorder.batch(example=torch.arange(6))
        F.cross_entropy(model(torch.randn(6, 3)), torch.arange(6) % 2, reduction="sum").backward()
        optimizer.step()
    assert sl.open(tmp_path / "a.memory").suspects(3).agreement == [None] * 3
