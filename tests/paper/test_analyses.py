"""Every analysis of the image experiments against a plain loop.

The truth is made without Spotlights: the same network is trained again, every layer's inputs and errors are kept
in lists, and each number is computed from them by loops over test images and slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import spotlights as sl
from real_data import need
from spotlights_paper.experiments.analyses.cases import Case, WantedImage, cases, find
from spotlights_paper.experiments.analyses.forgetting import forgetting, masks
from spotlights_paper.experiments.analyses.test_set import (
    CategoryTotals,
    categories,
    cross_task,
    over_time,
    total_scores,
    votes,
)
from spotlights_paper.experiments.images import Images
from spotlights_paper.experiments.registry import experiment_named, preset_named
from spotlights_paper.experiments.training import Trained, accuracy, mlp, without_replacement

pytestmark = pytest.mark.usefixtures("load_once")

SETTINGS = replace(
    preset_named("mnist-continual", "quick"),
    steps=50,
    switch=25,
    hidden=(16, 12),
    batch=32,
    lr=0.05,
    clip=2.0,
    train_images=150,
    test_images=40,
    top=7,
    bins=5,
)
LAYERS = ("layers.0", "layers.1", "layers.2")
CLOSE = {"rtol": 2e-4, "atol": 1e-4}


@dataclass(frozen=True, eq=False)
class Slot:
    """One training example at one step."""

    step: int
    example: int
    label: int
    source: str
    keys: dict[str, np.ndarray]
    errors: dict[str, np.ndarray]
    factor: float
    """What clipping multiplied the gradient by."""

    @property
    def coefficient(self) -> float:
        """Of error ⊗ key in the final weights: SGD with momentum, a geometric series."""
        mu = SETTINGS.momentum
        return -SETTINGS.lr * self.factor * (1 - mu ** (SETTINGS.steps - self.step)) / (1 - mu)


@dataclass(frozen=True, eq=False)
class Plain:
    """The same training, remembered in lists."""

    slots: list[Slot]
    initial: nn.Module
    at_switch: nn.Module
    final: nn.Module


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    need("mnist", "fashion-mnist")
    torch.set_num_threads(1)  # matrices this small only wait for a second thread
    return experiment_named("mnist-continual").run(
        SETTINGS, seed=3, path=tmp_path_factory.mktemp("analyses") / "run.memory"
    )


@pytest.fixture(scope="module")
def plain(trained: Trained) -> Plain:
    first, second = (without_replacement([prepared.train], SETTINGS, 3) for prepared in trained.data.values())
    torch.manual_seed(3)
    model = mlp((784, *SETTINGS.hidden, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=SETTINGS.lr, momentum=SETTINGS.momentum)
    initial = _copy(model)
    at_switch = initial
    slots = []
    for step, batch in enumerate(islice(chain(islice(first, SETTINGS.switch), second), SETTINGS.steps)):
        if step == SETTINGS.switch:
            at_switch = _copy(model)
        keys, outputs, value = {}, {}, batch.inputs
        for index, name in enumerate(LAYERS):
            keys[name] = value.detach().numpy().astype(np.float64)
            outputs[name] = model.layers[index](value)
            outputs[name].retain_grad()
            value = outputs[name].relu() if index < 2 else outputs[name]
        optimizer.zero_grad()
        F.cross_entropy(value, batch.labels).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip))
        factor = min(1.0, SETTINGS.clip / (norm + 1e-6))
        optimizer.step()
        errors = {name: outputs[name].grad.numpy().astype(np.float64) for name in LAYERS}
        for row in range(len(batch.labels)):
            slots.append(
                Slot(
                    step,
                    int(batch.ids[row]),
                    int(batch.labels[row]),
                    batch.columns["source"][row],
                    {name: keys[name][row] for name in LAYERS},
                    {name: errors[name][row] for name in LAYERS},
                    factor,
                )
            )
    assert {slot.factor < 1 for slot in slots} == {True, False}, "the test wants clipped and unclipped steps"
    return Plain(slots, initial, at_switch, model)


@pytest.fixture(scope="module")
def totals(trained: Trained) -> CategoryTotals:
    return total_scores(trained)


def _copy(model: nn.Module) -> nn.Module:
    other = mlp((784, *SETTINGS.hidden, 10))
    other.load_state_dict(model.state_dict())
    return other


def _queries(model: nn.Module, inputs: Tensor) -> dict[str, np.ndarray]:
    found, value = {}, inputs
    for index, name in enumerate(LAYERS):
        found[name] = value.detach().numpy().astype(np.float64)
        value = model.layers[index](value).relu()
    return found


def _test_images(trained: Trained) -> list[tuple[str, Tensor, int]]:
    return [
        (source, prepared.test.inputs[i], int(prepared.test.labels[i]))
        for source, prepared in trained.data.items()
        for i in range(len(prepared.test))
    ]


def _score(slot: Slot, layer: str, query: np.ndarray) -> float:
    return float(slot.keys[layer] @ query)


def _totals_of(plain: Plain, layer: str, query: np.ndarray, of: Callable[[Slot], object]) -> dict[object, float]:
    sums: dict[object, float] = defaultdict(float)
    for slot in plain.slots:
        sums[of(slot)] += abs(_score(slot, layer, query))
    return sums


# -- the whole test set -----------------------------------------------------------------------


def test_the_recorded_network_is_the_plainly_trained_one(trained: Trained, plain: Plain) -> None:
    for name, value in trained.model.state_dict().items():
        assert torch.allclose(value, plain.final.state_dict()[name], atol=1e-5)


def test_totals_by_category_equal_a_loop_over_slots(trained: Trained, plain: Plain, totals: CategoryTotals) -> None:
    asked = _test_images(trained)
    for index in range(0, len(asked), 9):
        source, inputs, label = asked[index]
        assert totals.sources[totals.task[index]] == source
        assert totals.target[index] == label
        assert totals.output[index] == int(plain.final(inputs[None]).argmax())
        for layer, query in _queries(plain.final, inputs[None]).items():
            sums = _totals_of(plain, layer, query[0], lambda slot: (slot.source, slot.label))
            for task, name in enumerate(totals.sources):
                for label in range(10):
                    expected = sums[name, label]
                    assert totals.layers[layer][index, task, label] == pytest.approx(expected, rel=1e-4, abs=1e-3)
    counted = np.zeros((2, 10), dtype=int)
    for slot in plain.slots:
        counted[totals.sources.index(slot.source), slot.label] += 1
    np.testing.assert_array_equal(totals.slots, counted)


def test_votes_equal_a_loop_over_test_images(trained: Trained, plain: Plain, totals: CategoryTotals) -> None:
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * 5)
    for source, inputs, label in _test_images(trained):
        output = int(plain.final(inputs[None]).argmax())
        for layer, query in _queries(plain.final, inputs[None]).items():
            sums = _totals_of(plain, layer, query[0], lambda slot: slot.label)
            vote = max(range(10), key=lambda each: sums[each])
            count = counts[layer, source]
            if output == label:
                count[0] += 1
                count[1] += vote == label
            else:
                count[2] += 1
                count[3] += vote == label
                count[4] += vote == output
    found = votes(totals)
    assert len(found) == 6
    for vote in found:
        expected = counts[vote.layer, vote.source]
        assert [vote.right, vote.right_target, vote.wrong, vote.wrong_target, vote.wrong_output] == expected
        assert vote.target_given_right == pytest.approx(expected[1] / expected[0])
        assert vote.output_given_wrong == pytest.approx(expected[4] / expected[2])
        assert vote.target_given_wrong == pytest.approx(expected[3] / expected[2])


def test_cross_task_shares_equal_a_loop(trained: Trained, plain: Plain, totals: CategoryTotals) -> None:
    layer = "layers.1"
    shares = defaultdict(list)
    for source, inputs, _ in _test_images(trained):
        query = _queries(plain.final, inputs[None])[layer][0]
        sums = _totals_of(plain, layer, query, lambda slot: slot.source)
        for train in trained.sources:
            shares[source, train].append(sums[train] / sum(sums.values()))
    for part in cross_task(totals):
        if part.layer == layer:
            expected = shares[part.test, part.train]
            assert part.share == pytest.approx(np.mean(expected), rel=1e-4)
            assert part.share_spread == pytest.approx(np.std(expected), rel=1e-3, abs=1e-6)


def test_attention_over_time_equals_a_loop_over_steps(trained: Trained, plain: Plain) -> None:
    found = over_time(trained, images=4, bins=SETTINGS.bins)
    assert len(found) == 6
    width = SETTINGS.steps // SETTINGS.bins
    for each in found:
        queries = _queries(plain.final, trained.data[each.source].test.inputs[:4])[each.layer]
        rows = []
        for query in queries:
            sums = _totals_of(plain, each.layer, query, lambda slot: slot.step // width)
            rows.append([sums[b] / sum(sums.values()) for b in range(SETTINGS.bins)])
        np.testing.assert_allclose(each.share, np.mean(rows, axis=0), **CLOSE)
        np.testing.assert_allclose(each.spread, np.std(rows, axis=0), **CLOSE)
        np.testing.assert_allclose(each.starts, np.arange(SETTINGS.bins) * width)


# -- single test images -----------------------------------------------------------------------

WANTED = (WantedImage("mnist", 1, right=False), WantedImage("fashion-mnist", 3))


@pytest.fixture(scope="module")
def looked_at(trained: Trained) -> list[Case]:
    return cases(trained, WANTED, top=SETTINGS.top)


def _position(trained: Trained, case: Case) -> int:
    return case.example - int(trained.data[case.source].test.ids[0])


def test_cases_are_the_first_of_their_kind(trained: Trained, plain: Plain, looked_at: list[Case]) -> None:
    assert looked_at
    for case, wanted in zip(looked_at, WANTED, strict=True):
        test = trained.data[wanted.source].test
        for position in range(len(test)):
            output = int(plain.final(test.inputs[position][None]).argmax())
            right = output == int(test.labels[position])
            if int(test.labels[position]) == wanted.label and wanted.right in (None, right):
                break
        assert case.example == int(test.ids[position])
        assert (case.label, case.output) == (wanted.label, output)
        assert np.array_equal(case.pixels, test.pixels[position].numpy())
    assert find(replace_test(trained, 1), WantedImage("mnist", 5)) is None


def replace_test(trained: Trained, count: int) -> Trained:
    mnist = trained.data["mnist"]
    test = mnist.test
    fewer = Images(
        test.source,
        test.classes,
        test.pixels[:count],
        test.inputs[:count],
        test.labels[:count],
        test.ids[:count],
    )
    return replace(trained, data={"mnist": replace(mnist, test=fewer)})


def test_scores_of_a_case_equal_a_loop_over_slots(trained: Trained, plain: Plain, looked_at: list[Case]) -> None:
    names = categories(trained)
    for case in looked_at:
        inputs = trained.data[case.source].test.inputs[_position(trained, case)]
        queries = _queries(plain.final, inputs[None])
        for layer in case.layers:
            scores = [_score(slot, layer.layer, queries[layer.layer][0]) for slot in plain.slots]
            of: dict[tuple[int, int], list[tuple[float, Slot]]] = defaultdict(list)
            for score, slot in zip(scores, plain.slots, strict=True):
                of[trained.sources.index(slot.source), slot.label].append((score, slot))
            for (task, label), pairs in of.items():
                values = sorted((score for score, _ in pairs), reverse=True)
                kept = layer.top[task, label]
                np.testing.assert_allclose(kept[~np.isnan(kept)], values[: SETTINGS.top], **CLOSE)
                assert layer.absolute[task, label] == pytest.approx(sum(map(abs, values)), rel=1e-4, abs=1e-3)
            best = plain.slots[int(np.argmax(scores))]
            assert names[layer.top_category[0]].startswith(best.source)


def test_pictures_of_a_case_equal_a_loop_over_visits(trained: Trained, plain: Plain, looked_at: list[Case]) -> None:
    for case in looked_at:
        inputs = trained.data[case.source].test.inputs[_position(trained, case)]
        queries = _queries(plain.final, inputs[None])
        for layer in case.layers:
            largest: dict[int, float] = defaultdict(lambda: -np.inf)
            for slot in plain.slots:
                score = _score(slot, layer.layer, queries[layer.layer][0])
                largest[slot.example] = max(largest[slot.example], score)
            assert len({picture.example for picture in layer.pictures}) == len(layer.pictures)
            for picture, expected in zip(layer.pictures, sorted(largest.values(), reverse=True), strict=False):
                assert picture.value == pytest.approx(largest[picture.example], rel=1e-4)
                if picture is layer.pictures[0]:
                    assert picture.value == pytest.approx(expected, rel=1e-4)
                train = trained.data[picture.source].train
                place = int((train.ids == picture.example).nonzero()[0])
                assert np.array_equal(picture.pixels, train.pixels[place].numpy())
                assert picture.label == int(train.labels[place])


def _contribution(slot: Slot, layer: str, query: np.ndarray, direction: np.ndarray) -> float:
    """What the slot's part of weight and bias adds to direction · output."""
    return slot.coefficient * float(slot.errors[layer] @ direction) * (_score(slot, layer, query) + 1.0)


def _directions(model: nn.Module, inputs: Tensor, of: Callable[[Tensor], Tensor]) -> dict[str, np.ndarray]:
    """The gradient of a number at each layer's output."""
    outputs, value = {}, inputs[None]
    for index, name in enumerate(LAYERS):
        outputs[name] = model.layers[index](value)
        value = outputs[name].relu() if index < 2 else outputs[name]
    gradients = torch.autograd.grad(of(value[0]), list(outputs.values()))
    return {name: g[0].numpy().astype(np.float64) for name, g in zip(LAYERS, gradients, strict=True)}


def test_signed_contributions_of_a_case_equal_a_loop_over_slots(
    trained: Trained, plain: Plain, looked_at: list[Case]
) -> None:
    for case in looked_at:
        inputs = trained.data[case.source].test.inputs[_position(trained, case)]
        queries = _queries(plain.final, inputs[None])
        for layer in case.layers:
            assert {pushed.target for pushed in layer.pushed} == {case.output, case.label}
            for pushed in layer.pushed:
                target = pushed.target
                direction = _directions(plain.final, inputs, lambda logits, t=target: logits[t])[layer.layer]
                expected = np.zeros((2, 10))
                by_example: dict[int, float] = defaultdict(float)
                for slot in plain.slots:
                    value = _contribution(slot, layer.layer, queries[layer.layer][0], direction)
                    expected[trained.sources.index(slot.source), slot.label] += value
                    by_example[slot.example] += value
                np.testing.assert_allclose(pushed.by_category, expected, rtol=1e-3, atol=1e-4)
                assert pushed.strongest_for[0].value == pytest.approx(max(by_example.values()), rel=1e-3, abs=1e-5)
                assert pushed.strongest_against[0].value == pytest.approx(min(by_example.values()), rel=1e-3, abs=1e-5)
                assert pushed.adds_up == (layer.layer == "layers.2")
                if pushed.adds_up:
                    assert pushed.initial + expected.sum() == pytest.approx(float(case.logits[target]), abs=1e-4)


# -- what the paper could not show ------------------------------------------------------------


def _plain_network(plain: Plain, masked: dict[str, str]) -> nn.Module:
    """The final network without the slots of one source, layer by layer."""
    model = _copy(plain.final)
    with torch.no_grad():
        for layer, source in masked.items():
            module, start = model.get_submodule(layer), plain.initial.get_submodule(layer)
            weight, bias = start.weight.double().clone(), start.bias.double().clone()
            for slot in plain.slots:
                if slot.source != source:
                    error = torch.from_numpy(slot.coefficient * slot.errors[layer])
                    weight += torch.outer(error, torch.from_numpy(slot.keys[layer]))
                    bias += error
            module.weight.copy_(weight)
            module.bias.copy_(bias)
    return model


def test_masks_equal_networks_made_of_the_other_slots(trained: Trained, plain: Plain) -> None:
    found = masks(trained, switch=SETTINGS.switch)
    assert len(found) == 2 + 2 * 4
    for each in found:
        if not each.masked:
            model = plain.at_switch if each.as_of == SETTINGS.switch else plain.final
        else:
            model = _plain_network(plain, dict.fromkeys(each.layers, each.masked))
        for source, prepared in trained.data.items():
            # one image may sit on the edge between two classes
            assert each.accuracy[source] == pytest.approx(accuracy(model, prepared.test), abs=1.01 / 40)
    together = next(each for each in found if each.masked and len(each.layers) == 3)
    view = trained.memory.without(source=together.masked).primal(trained.model)
    for source, prepared in trained.data.items():
        assert together.accuracy[source] == accuracy(view, prepared.test)


def test_interference_equals_a_loop_over_forgotten_digits(trained: Trained, plain: Plain) -> None:
    found = forgetting(trained, switch=SETTINGS.switch, images=1000)
    test = trained.data["mnist"].test
    lost = []
    for inputs, label in zip(test.inputs, test.labels.tolist(), strict=True):
        before, after = (int(model(inputs[None]).argmax()) for model in (plain.at_switch, plain.final))
        if before == label != after:
            lost.append((inputs, label, after))
    assert lost, "the test wants some forgotten digits"
    assert found.sampled == len(lost)
    answered = np.zeros((10, 10), dtype=int)
    sums, counts = np.zeros((3, 10, 2, 10)), np.zeros(10)
    for inputs, label, after in lost:
        answered[label, after] += 1
        counts[label] += 1
        queries = _queries(plain.final, inputs[None])
        directions = _directions(plain.final, inputs, lambda z, a=after, b=label: z[a] - z[b])
        for index, layer in enumerate(LAYERS):
            for slot in plain.slots:
                value = _contribution(slot, layer, queries[layer][0], directions[layer])
                sums[index, label, trained.sources.index(slot.source), slot.label] += value
    np.testing.assert_array_equal(found.answered, answered)
    for index, layer in enumerate(found.layers):
        for label in range(10):
            if not counts[label]:
                assert np.isnan(layer.contributions[label]).all()
                continue
            np.testing.assert_allclose(
                layer.contributions[label], sums[index, label] / counts[label], rtol=1e-3, atol=1e-4
            )
    assert [layer.adds_up for layer in found.layers] == [False, False, True]


def test_fewer_forgotten_digits_can_be_taken_apart(trained: Trained) -> None:
    whole = forgetting(trained, switch=SETTINGS.switch, images=1000)
    some = forgetting(trained, switch=SETTINGS.switch, images=2)
    assert some.sampled == 2
    np.testing.assert_array_equal(some.answered, whole.answered)


# -- questions that the analyses brought along ------------------------------------------------


def test_weighted_scores_equal_a_loop(trained: Trained, plain: Plain) -> None:
    inputs = trained.data["mnist"].test.inputs[:3]
    totals = trained.memory.attend(trained.model, inputs)["layers.1"].weighted().totals("label", absolute=True)
    queries = _queries(plain.final, inputs)["layers.1"]
    for query in range(3):
        for row in totals.rows(query):
            slots = [slot for slot in plain.slots if slot.label == row["label"]]
            sizes = [abs(_score(s, "layers.1", queries[query])) * np.linalg.norm(s.errors["layers.1"]) for s in slots]
            assert row[totals.name] == pytest.approx(sum(sizes), rel=1e-4, abs=1e-5)
            assert row["slots"] == len(slots)


def test_weighted_scores_refuse_what_has_no_meaning(trained: Trained) -> None:
    attention = trained.memory.attend(trained.model, trained.data["mnist"].test.inputs[:1], kernel="cosine")
    with pytest.raises(sl.UnsupportedError, match="plain product"):
        attention["layers.0"].weighted()
