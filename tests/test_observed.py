"""An observed memory has the gradients of a network that was trained without us, and says that it is an estimate."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import spotlights as sl
from spotlights.cli import app
from test_history import LABELS, TASKS, Cnn
from training import EXACT, EXAMPLES, examples, fill, network, same, sgd, state, train

INPUTS, CLASS = examples()


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(INPUTS[ids]), CLASS[ids])


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(INPUTS[ids]), CLASS[ids], reduction="none")


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """A network that nobody recorded, and two sets of weights of its training."""
    model, kept = network(dropout=0.3), []
    train(model, sgd(model), 40, after_step=lambda step: kept.append(state(model)) if step in (10, 20) else None)
    return model, kept


def observe(path: Path, trained: Any, **options: Any) -> sl.Memory:
    model, kept = trained
    return sl.observe(model, loss, range(EXAMPLES), path, checkpoints=kept, columns={"label": CLASS}, **options)


@pytest.mark.parametrize("batch", [7, 100])
@pytest.mark.parametrize("of_batch", [loss, losses])
def test_slots_are_the_gradients_of_each_example_at_each_set_of_weights(
    tmp_path: Path, trained: Any, batch: int, of_batch: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    model, kept = trained
    memory = sl.observe(model, of_batch, range(EXAMPLES), tmp_path / "a.memory", checkpoints=kept, batch=batch)
    assert memory.observed == 3
    assert len(memory) == 3 * EXAMPLES
    own = copy.deepcopy(model).eval()
    for number, weights in enumerate([*kept, model.state_dict()]):
        own.load_state_dict(weights)
        asked = _gradient(own, lambda net: net(INPUTS[:1])[0, 1])
        taught = [_gradient(own, lambda net, e=e: loss(net, torch.tensor([e]))) for e in range(EXAMPLES)]
        spots = memory.where(checkpoint=number).attend(own, INPUTS[:1])
        for layer, spot in spots.items():
            names = [name for name in asked if name.startswith(f"{layer}.")]
            products = torch.stack([-sum((g[name] * asked[name]).sum() for name in names) for g in taught])
            # With so much damping, nothing is whitened: what is left is the product of two gradients.
            found = spot.influence(1, damping=1e9, balance=False).totals("example").values[0]
            torch.testing.assert_close(found / found.norm(), products / products.norm(), rtol=1e-6, atol=1e-8)


def _gradient(model: nn.Module, number: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(number(model), parameters), strict=True))


def test_answers_do_not_depend_on_the_size_of_batches(tmp_path: Path, trained: Any) -> None:
    model, _ = trained
    first, second = (observe(tmp_path / f"{size}.memory", trained, batch=size) for size in (5, 24))
    one, other = (m.attend(model, INPUTS[:3]).influence(2).totals("example").values for m in (first, second))
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7 * float(one.abs().max()))
    assert first.suspects(24).examples == second.suspects(24).examples


def test_the_users_network_and_random_numbers_stay_as_they_are(tmp_path: Path, trained: Any) -> None:
    model, _ = trained
    model.train()
    before, random_state = state(model), torch.get_rng_state()
    observe(tmp_path / "a.memory", trained)
    assert same(state(model), before)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("name", list(TASKS))
def test_every_kind_of_layer_is_observed(tmp_path: Path, name: str) -> None:
    """In eval mode: a batch norm uses its running statistics, so that an example's gradient is its own."""
    task = TASKS[name]
    model = fill(task.model().double())
    memory = sl.observe(
        model,
        lambda net, ids: task.loss(net(task.inputs[ids]), ids),
        range(len(LABELS)),
        tmp_path / "a.memory",
        batch=5,
    )
    assert all(info.slots or not info.trained for info in memory.layers.values())
    assert all(info.unexplained_steps == 0 for info in memory.layers.values()), "slots are not the whole gradient"
    if isinstance(model, Cnn):
        assert int(model[1].num_batches_tracked) == 0


def test_examples_with_wrong_labels_are_suspects(tmp_path: Path) -> None:
    inputs, labels = torch.randn(60, 8, generator=torch.Generator().manual_seed(1)), torch.arange(60) % 3
    inputs[torch.arange(60), labels] += 6.0
    wrong = labels.clone()
    wrong[[4, 20, 41]] = (labels[[4, 20, 41]] + 1) % 3
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), wrong).backward()
        optimizer.step()
    memory = sl.observe(
        nn.Sequential(model), lambda net, ids: F.cross_entropy(net(inputs[ids]), wrong[ids]), range(60), tmp_path / "a"
    )
    suspects = memory.suspects(3)
    assert set(suspects.examples) == {4, 20, 41}
    assert "an estimate" in suspects.note


def test_an_observed_memory_says_so_everywhere(tmp_path: Path, trained: Any) -> None:
    model, _ = trained
    memory = observe(tmp_path / "a.memory", trained)
    spot, said = memory.attend(model, INPUTS[:1]), "observed at 3 sets of weights, not recorded: an estimate"
    influence = spot.influence(1)
    squared = spot.influence(1, rule="joint")
    answers = [spot["3"].top(2), spot["3"].totals("label"), influence.top(2), influence.totals("label"), squared.top(2)]
    for text in (memory, memory.where(label=1), influence, *(answer.note for answer in answers)):
        assert said in str(text)
    assert said in " ".join(str(memory.info).split())
    assert memory.info.as_dict()["observed"] == 3
    assert not memory.info.as_dict()["exact"]
    assert said in " ".join(CliRunner().invoke(app, ["info", str(tmp_path / "a.memory")]).stdout.split())
    alone = sl.observe(model, loss, range(EXAMPLES), tmp_path / "b.memory")
    assert "observed at the trained weights" in str(alone)
    assert "checkpoint" not in alone.columns


def test_what_needs_a_training_is_refused_with_a_sentence(tmp_path: Path, trained: Any) -> None:
    model, _ = trained
    memory = observe(tmp_path / "a.memory", trained)
    spot = memory.attend(model, INPUTS[:1])
    for ask in (
        lambda: spot["3"].contributions(1).top(3),
        lambda: spot.history(1),
        lambda: memory.masks(model),
        lambda: memory.verify(model),
        lambda: memory.weights("3"),
        lambda: memory.dual(model),
        lambda: memory.without(label=1).primal(model),
    ):
        with pytest.raises(sl.UnsupportedError, match=r"was observed.*record a training with sl\.record"):
            ask()


def test_checkpoints_may_be_files(tmp_path: Path, trained: Any) -> None:
    model, kept = trained
    torch.save(kept[0], tmp_path / "0.pt")
    save_file(kept[1], tmp_path / "1.safetensors")
    files = [tmp_path / "0.pt", str(tmp_path / "1.safetensors")]
    memory = sl.observe(model, loss, range(EXAMPLES), tmp_path / "a.memory", checkpoints=files)
    other = observe(tmp_path / "b.memory", trained)
    one, two = (m.attend(model, INPUTS[:2])["3"].totals("example").values for m in (memory, other))
    torch.testing.assert_close(one, two, rtol=EXACT, atol=EXACT)


def test_examples_may_be_named_and_progress_is_told(tmp_path: Path, trained: Any) -> None:
    names = [f"image {number}" for number in range(EXAMPLES)]

    def named(model: nn.Module, ids: list[str]) -> Tensor:
        return loss(model, torch.tensor([int(name.split()[1]) for name in ids]))

    shares: list[float] = []
    memory = sl.observe(trained[0], named, names, tmp_path / "a.memory", batch=10, progress=shares.append)
    assert set(memory.distinct("example")) == set(names)
    assert shares == pytest.approx([10 / 24, 20 / 24, 1.0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss": lambda model, ids: torch.zeros(())}, "must return a loss with a gradient"),
        ({"loss": lambda model, ids: loss(OTHER, ids)}, "must use the model that it is given"),
        ({"checkpoints": [{"0.weight": torch.zeros(2)}]}, "not one of this model: it differs in 0.bias"),
        ({"columns": {"label": [1, 2]}}, r'columns\["label"\] has 2 values for 24 examples'),
        ({"ids": []}, "give at least one"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, trained: Any, change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"loss": loss, "ids": range(EXAMPLES), "path": tmp_path / "a.memory", **change}
    with pytest.raises(sl.SettingError, match=said):
        sl.observe(trained[0], **given)


OTHER = network()


def test_the_explorer_offers_what_an_observed_memory_answers(tmp_path: Path, trained: Any) -> None:
    from explorers import get, prepared

    observe(tmp_path / "a.memory", trained)
    explorer = prepared(sl.Subject(tmp_path / "a.memory", model=trained[0], inputs=INPUTS[:4]))
    run = get("run", explorer)
    assert [kind["name"] for kind in run["measures"]] == ["influence", "score", "absolute"]
    assert (run["observed"], run["history"], run["audit"]) == (3, False, True)
    assert "was observed" in run["no_masks"]
