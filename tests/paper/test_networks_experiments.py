"""The experiments beyond the paper: a convolutional network and a GPT, small, against plain torch."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

import spotlights as sl
from real_data import need
from spotlights.cli import app
from spotlights_paper.datasets import read_text
from spotlights_paper.experiments import mnist
from spotlights_paper.experiments.language.asking import open_run, passages, passages_toward
from spotlights_paper.experiments.language.gpt import GPT, cosine, shuffled_windows, train_gpt
from spotlights_paper.experiments.language.trained import TrainedLanguage
from spotlights_paper.experiments.language.two_levels import inclination_to, two_levels
from spotlights_paper.experiments.registry import EXPERIMENTS, experiment_named, preset_named
from spotlights_paper.experiments.running import load_results, load_run, run_experiment, save_results
from spotlights_paper.subjects import subject_of

SENTENCES = ("The hen sat on the fence. ", "A fox saw the hen. ", "“Come down,” said the fox! ", "The hen did not. ")
TEXT = "".join(SENTENCES[(i * i + i // 3) % 4] for i in range(60))
GPT_SETTINGS = replace(
    preset_named("aesop-gpt", "quick"), tokens=None, steps=12, width=12, context=10, batch=4, warm_up=3
)


def spotlights(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


# -- the convolutional network ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("mnist")
    torch.set_num_threads(1)
    return run_experiment("mnist-cnn", preset="quick", steps=8, out=tmp_path_factory.mktemp("cnn") / "run")


def test_every_layer_of_the_convolutional_network_is_met(images: Path):
    run = load_run(images)
    assert list(run.exactness) == ["strokes", "shapes", "hidden", "classes"]
    assert all(check.relative_error < 1e-3 for check in run.exactness.values())
    memory = sl.open(images / "run.memory")
    assert memory.layers["strokes"].slots == 8 * 64 * 14 * 14
    assert memory.layers["hidden"].slots == 8 * 64


def test_its_last_two_layers_are_asked_about_and_the_logit_adds_up(images: Path):
    results = load_results(images)
    assert results.layers == mnist.ASKED
    assert {vote.layer for vote in results.votes} == set(mnist.ASKED)
    case = results.cases[0]
    last = case.layers[-1]
    assert [layer.layer for layer in case.layers] == mnist.ASKED
    assert [layer.pushed[0].adds_up for layer in case.layers] == [False, True]
    pushed = last.pushed[0]
    assert pushed.initial + pushed.by_category.sum() == pytest.approx(pushed.logit, abs=2e-3)
    assert len(pushed.strongest_for) == len(pushed.strongest_against) == 3


def test_the_explorer_and_the_report_open_it(images: Path, tmp_path: Path, quick_figures: None):
    subject = subject_of(images)
    memory = subject.open()
    model = subject.network(memory)
    assert not model.training
    right = model(subject.inputs.data).argmax(dim=1) == torch.tensor(subject.inputs.labels)
    assert float(right.double().mean()) == pytest.approx(load_run(images).accuracy["mnist"])
    results = load_results(images)
    save_results(replace(results, cases=results.cases[:1]), images)  # one picture of each kind is enough
    done = spotlights("report", images, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "A convolutional network with Adam" in page
    assert "Table 1" not in page  # the paper has no such network
    assert (tmp_path / "figures" / "mnist-cnn-quick-1-contributions.png").is_file()


def test_only_the_layers_that_are_asked_for_are_attended(images: Path):
    subject = subject_of(images)
    memory = subject.open()
    model, some = subject.network(memory), subject.inputs.batch([0, 1])
    spot = memory.attend(model, some, layers=["classes"])
    assert list(spot) == ["classes"]
    assert torch.equal(spot["classes"].queries, memory.attend(model, some)["classes"].queries)
    with pytest.raises(sl.UnknownNameError, match='No layer "softmax"'):
        memory.attend(model, some, layers=["classes", "softmax"])


def test_a_network_of_another_kind_cannot_be_retrained_as_the_papers(images: Path):
    done = spotlights("retrain-check", images, "--without", "label=3")
    assert done.exit_code == 2
    assert "how to train again" in done.stderr


# -- the GPT --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguage:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("gpt")
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
    settings = replace(GPT_SETTINGS, dtype="float32")
    return train_gpt(settings, data=read_text(folder / "book.txt", "character"), seed=0, path=folder / "run.memory")


def test_every_layer_of_the_gpt_is_met_tied_weights_too(gpt: TrainedLanguage):
    assert isinstance(gpt.model, GPT)
    assert gpt.model.head.weight is gpt.model.embedding.weight
    checks = gpt.memory.verify(gpt.model)
    assert all(check.relative_error < 1e-4 for check in checks.values())
    assert not any(check.unexplained_steps for check in checks.values())
    assert "recorded: 100 %" in str(gpt.memory.info)


def test_windows_come_in_random_order_and_the_next_token_is_the_target():
    text = torch.arange(107) * 3
    seen = list(islice(shuffled_windows(text, batch=4, length=8, seed=1), 6))
    again = list(islice(shuffled_windows(text, batch=4, length=8, seed=1), 6))
    for window, other in zip(seen, again, strict=True):
        assert torch.equal(window.positions, other.positions)
        assert torch.equal(window.tokens, text[window.positions])
        assert torch.equal(window.targets, text[window.positions + 1])
    epoch = torch.cat([window.positions.flatten() for window in seen[:3]])
    assert len(epoch.unique()) == len(epoch) == 3 * 4 * 8
    with pytest.raises(sl.SettingError, match="longer text"):
        next(shuffled_windows(text, batch=20, length=8, seed=0))


def test_the_learning_rate_rises_and_falls_to_zero():
    share = cosine(replace(GPT_SETTINGS, steps=20, warm_up=4))
    assert [share(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert share(12) == pytest.approx(0.5)
    assert share(20) == pytest.approx(0.0)


def test_surprise_is_the_mean_over_tokens_with_half_a_context(gpt: TrainedLanguage):
    tokens, model = gpt.data.test.numbers[:40], gpt.model
    assert isinstance(model, GPT)
    losses = []
    with torch.no_grad():
        for start in range(0, len(tokens) - 10, 5):
            logits = model(tokens[None, start : start + 10])[0]
            losses += [float(F.cross_entropy(logits[i], tokens[start + i + 1])) for i in range(4, 10)]
    assert model.surprise(tokens, batch=3) == pytest.approx(float(np.mean(losses)), rel=1e-5)


def test_what_follows_does_not_depend_on_what_is_later_or_too_early(gpt: TrainedLanguage):
    tokens, model = gpt.data.test.numbers[None, :14], gpt.model
    with torch.no_grad():
        whole = model(tokens[:, -10:])
        assert torch.equal(model(tokens), whole)
        assert torch.allclose(model(tokens[:, -10:-3]), whole[:, :-3], atol=1e-6)
        assert torch.allclose(model(tokens, last=True), whole[:, -1:], atol=1e-6)


def contributions_by_position(
    gpt: TrainedLanguage, layer: str, inputs: dict, row: int, target: Callable
) -> dict[int, float]:
    """Slot by slot, added up by the position of the training text."""
    measure = gpt.memory.attend(gpt.model, inputs, layers=[layer])[layer].at(row).contributions(target)
    every = measure.top(gpt.memory.layers[layer].slots)
    sums: dict[int, float] = {}
    for position, value in zip(every.columns["example"][0][0], every.values[0, 0].tolist(), strict=True):
        sums[position] = sums.get(position, 0.0) + value
    return sums


def test_passages_toward_a_character_are_those_that_add_most_to_its_logit(gpt: TrainedLanguage):
    prompt = "saw the h"
    found = passages_toward(gpt, prompt, k=3)
    assert found.what == "contribution"
    assert found.layer == "head"
    inputs = {"tokens": gpt.data.vocabulary.encode(prompt)[None]}
    with torch.no_grad():
        number = int(gpt.model(inputs["tokens"])[0, -1].argmax())
    sums = contributions_by_position(gpt, "head", inputs, len(prompt) - 1, lambda out: out[:, -1, number])
    best = max(sums.values())
    assert found[0].score == pytest.approx(best, rel=1e-4)
    assert sums[found[0].hits[0].position] == pytest.approx(best, rel=1e-4)
    for passage in found:
        for hit in passage.hits:
            assert hit.score == pytest.approx(sums[hit.position], rel=1e-3, abs=1e-5)
    with torch.no_grad():
        logit = float(gpt.model(inputs["tokens"])[0, -1, number])
    head = gpt.memory.attend(gpt.model, inputs, layers=["head"])["head"].at(len(prompt) - 1)
    initial = float(head.contributions(lambda out: out[:, -1, number]).initial[0])
    assert initial + sum(sums.values()) == pytest.approx(logit, abs=1e-4)
    said = gpt.data.vocabulary.tokens[number]
    assert f"toward {said!r} as the next character: {logit:.2f}" in (found.note or "")


def test_passages_of_a_long_prompt_are_those_of_its_end(gpt: TrainedLanguage):
    long = passages(gpt, "A fox saw the hen", k=2)
    assert long.prompt == list("A fox saw the hen"[-10:])
    assert long.passages == passages(gpt, "A fox saw the hen"[-10:], k=2).passages
    assert long.layer == "blocks.1.grow"


def test_the_first_level_is_the_softmax_and_the_second_adds_up_to_the_inclination(gpt: TrainedLanguage):
    model, prompt = gpt.model, "A fox saw"
    assert isinstance(model, GPT)
    found = two_levels(gpt, prompt)
    tokens = gpt.data.vocabulary.encode(prompt)[None]
    token = len(prompt) - 1
    first, block = model.blocks
    with torch.no_grad():
        seen = block.attention_norm(first(model.embedding(tokens) + model.places(torch.arange(len(prompt)))))[0]
        queries, keys = (layer(seen).view(len(prompt), 2, 6) for layer in (block.to_query, block.to_key))
        inclined = torch.einsum("hd,khd->hk", queries[token], keys[: token + 1]) / 6**0.5
        weights = inclined.softmax(dim=1)
    assert torch.allclose(torch.tensor(found.weights), weights, atol=1e-5)
    expected = weights.mean(dim=0).topk(3)
    assert [looked.place for looked in found.looked] == expected.indices.tolist()
    inputs = {"tokens": tokens, "looks_in": 1}
    for looked in found.looked:
        inclination = float(inclined[:, looked.place].mean())
        assert looked.inclination == pytest.approx(inclination, abs=1e-5)
        target = inclination_to(token, looked.place)
        for layer, row, hits in (("to_key", looked.place, looked.by_key), ("to_query", token, looked.by_query)):
            name = f"blocks.1.{layer}"
            sums = contributions_by_position(gpt, name, inputs, row, target)
            initial = gpt.memory.attend(model, inputs)[name].at(row).contributions(target).initial
            assert float(initial[0]) + sum(sums.values()) == pytest.approx(inclination, abs=1e-4)
            assert hits[0].score == pytest.approx(max(sums.values()), rel=1e-3, abs=1e-6)
        assert looked.alike.what == "score"
        assert looked.by_value.what == "contribution"


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(sl.SettingError, match="cannot be divided among 5 heads"):
        GPT(7, replace(GPT_SETTINGS, heads=5))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("aesop")
    return run_experiment("aesop-gpt", preset="quick", steps=6, out=tmp_path_factory.mktemp("gpt") / "run")


def test_a_run_opens_again_and_says_the_same(run: Path):
    trained, settings = open_run(run)
    file = load_run(run)
    assert isinstance(trained.model, GPT)
    assert settings.context == trained.model.context
    assert all(check.exact and check.relative_error < 5e-3 for check in file.exactness.values())  # float16
    assert file.surprise["test"] == pytest.approx(trained.model.surprise(trained.data.test.numbers), rel=1e-5)
    results = load_results(run)
    assert [passages.what for passages in results.tables[0].ours] == ["score", "score", "contribution"]
    assert len(results.two_levels) == 1


def test_the_report_shows_both_levels(run: Path, tmp_path: Path):
    done = spotlights("report", run, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Two levels of retrieval in block 1" in page
    assert (tmp_path / "figures" / "aesop-gpt-quick-0-two-levels.png").is_file()


def test_the_presets_are_known():
    assert [next(iter(experiment_named(name).presets)) for name in ("aesop-gpt", "mnist-cnn")] == ["laptop"] * 2
    assert {"mnist-cnn", "aesop-gpt"} <= set(EXPERIMENTS)
