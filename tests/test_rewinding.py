"""Forgetting an example is a training that never had it: bit for bit, and on record."""

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import spotlights as sl
from spotlights.cli import app
from spotlights.memory import writer
from test_history import Cnn, Lstm
from training import CLASSES, examples, fill, network, same, state

STEPS, LATE = 14, 9
"""Example 17 is first seen at the late step, and at every second step from there on."""
INPUTS, CLASS = examples(torch.float32)


def ids_of(step: int, part: int = 0) -> list[int]:
    drawn = torch.randperm(16, generator=torch.Generator().manual_seed(10 * step + part))[:4].tolist()
    return [*drawn, 17] if step >= LATE and (step - LATE) % 2 == 0 else drawn


@dataclass(frozen=True)
class Training:
    """A network and its loop."""

    model: Callable[[], nn.Module]
    make: Callable[[Any], torch.optim.Optimizer]
    inputs: Tensor = INPUTS
    clip: float | None = None
    accumulate: int = 1
    schedule: bool = False

    def network(self) -> nn.Module:
        return fill(self.model()).float()

    def loss(self, model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(self.inputs[ids]), CLASS[ids]) / self.accumulate

    def run(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: range = range(STEPS),
        recorder: sl.Recorder | None = None,
        without: tuple[int, ...] = (),
    ) -> None:
        for step in steps:
            if self.schedule:
                for group in optimizer.param_groups:
                    group["lr"] = 0.02 * (1.0 - 0.04 * step)
            optimizer.zero_grad()
            for part in range(self.accumulate):
                ids = torch.tensor([number for number in ids_of(step, part) if number not in without])
                torch.manual_seed(100 * step + part)  # so that a smaller batch does not change the draws of later ones
                if recorder is not None:
                    recorder.batch(example=ids, label=CLASS[ids], source="a" if step < LATE else "b")
                self.loss(model, ids).backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()

    def record(self, path: Path, **options: Any) -> nn.Module:
        model = self.network()
        optimizer = self.make(model.parameters())
        with sl.record(model, optimizer, path, **options) as recorder:
            self.run(model, optimizer, recorder=recorder)
        return model


TRAININGS = {
    "sgd with everything": Training(
        lambda: network(dropout=0.3, dtype=torch.float32),
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01),
        clip=0.05,
        schedule=True,
    ),
    "adamw": Training(
        lambda: network(5, 6, CLASSES), lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True), accumulate=2
    ),
    "batch norm": Training(
        Cnn,
        lambda p: torch.optim.Adam(p, lr=0.02),
        torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(2)),
    ),
    "lstm": Training(
        Lstm,
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
        torch.randint(7, (24, 6), generator=torch.Generator().manual_seed(3)),
    ),
}
RECIPE: dict[str, Any] = {"keep": "recipe", "checkpoint_every": 4}
PLAIN = TRAININGS["adamw"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTLIGHTS_CACHE", str(tmp_path / "cache"))


def rewound(path: Path, training: Training, without: str = "example=17") -> tuple[sl.Rewound, nn.Module, Any]:
    """Another network, as if by another process, put back; and its optimizer."""
    model = training.model().float()
    optimizer = training.make(model.parameters())
    memory = sl.open(path, model=training.network(), recompute=training.loss)
    return memory.rewind(model, optimizer, without=without), model, optimizer


@pytest.mark.parametrize("name", TRAININGS)
def test_forgetting_an_example_is_a_training_that_never_had_it(tmp_path: Path, name: str) -> None:
    training = TRAININGS[name]
    final = training.record(tmp_path / "run.memory", **RECIPE)
    never = training.network()
    training.run(never, training.make(never.parameters()), without=(17,))
    again, model, _ = rewound(tmp_path / "run.memory", training)
    shares: list[float] = []
    again.train(clip=training.clip, progress=shares.append)
    assert same(state(model), state(never)), "not the network that never had the example"
    assert not same(state(model), state(final)), "the example has taught nothing: this test would show nothing"
    assert shares[-1] == 1.0


@pytest.mark.parametrize("options", [RECIPE, {}], ids=["recipe", "slots"])
@pytest.mark.parametrize("name", TRAININGS)
def test_from_the_checkpoint_the_same_loop_leads_to_the_same_network(
    tmp_path: Path, name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, buffers, the optimizer's state and its options are those of the checkpoint, bit for bit."""
    monkeypatch.setattr(writer, "_SLOTS_PER_WHOLE_CHECKPOINT", 1)  # small networks have few slots for each weight
    training = TRAININGS[name]
    final = training.record(tmp_path / "run.memory", **{"segment_bytes": 3000, **options})
    again, model, optimizer = rewound(tmp_path / "run.memory", training)
    assert 0 < again.step <= LATE, "no checkpoint on the way: this test would show little"
    training.run(model, optimizer, range(again.step, STEPS))
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in final.state_dict().items():
        if name in parameters or options or "tracked" not in name:
            assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("options", [RECIPE, {"segment_bytes": 3000}], ids=["recipe", "slots"])
def test_the_record_says_what_the_network_has_seen(tmp_path: Path, options: dict[str, Any]) -> None:
    PLAIN.record(tmp_path / "run.memory", **options)
    again, model, _ = rewound(tmp_path / "run.memory", PLAIN, "example=17,3 source=b")
    assert (again.first_seen, again.steps, again.to_train) == (LATE, STEPS, STEPS - again.step)
    assert again.examples == 2
    left = [
        sorted({*ids_of(s, 0), *ids_of(s, 1)} - ({17, 3} if s >= LATE else set())) for s in range(again.step, STEPS)
    ]
    assert again.batches == [hashlib.sha256(json.dumps(ids).encode()).hexdigest() for ids in left]
    checkpoint = PLAIN.network()
    PLAIN.run(checkpoint, PLAIN.make(checkpoint.parameters()), range(again.step))
    assert same(state(model), state(checkpoint))
    found = hashlib.sha256()
    for name, tensor in sorted(checkpoint.state_dict().items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    assert again.checkpoint == found.hexdigest()
    assert json.loads(again.save(tmp_path / "record.json").read_text()) == again.as_dict()
    assert "example=17,3" in str(again)
    assert again.trained is None


def test_only_the_loss_of_a_recipe_can_train(tmp_path: Path) -> None:
    PLAIN.record(tmp_path / "run.memory", **RECIPE)
    model = PLAIN.network()
    again = sl.open(tmp_path / "run.memory").rewind(model, PLAIN.make(model.parameters()), without="example=17")
    with pytest.raises(sl.UnsupportedError, match="does not say how a loss is computed"):
        again.train()


@pytest.mark.parametrize(("clip", "said"), [(None, "as clipping does"), (0.5, r"clip=0\.5 does not")])
def test_a_loop_that_clips_has_to_say_so(tmp_path: Path, clip: float | None, said: str) -> None:
    training = TRAININGS["sgd with everything"]
    training.record(tmp_path / "run.memory", **RECIPE)
    again, model, _ = rewound(tmp_path / "run.memory", training)
    before = state(model)
    with pytest.raises(sl.UnsupportedError, match=said):
        again.train(clip=clip)
    assert same(state(model), before), "a refused training has left a network that is neither"


@pytest.mark.parametrize(
    ("options", "without", "said"),
    [
        (RECIPE, "example=23", "No step of .* saw"),
        ({}, "example=23", "No step of .* saw"),
        ({}, "", "No step of .* saw"),
        ({}, "colour=3", 'No column "colour"'),
        (RECIPE, "colour=3", 'No column "colour"'),
        ({"sample": 0.5}, "example=17", "is a sample"),
        ({"fold": "example"}, "example=17", "folded"),
        ({"layers": "0"}, "example=17", "does not have 2.weight"),
    ],
)
@pytest.mark.filterwarnings("ignore::spotlights.errors.SpotlightsWarning")
def test_what_cannot_be_forgotten_is_said(tmp_path: Path, options: dict[str, Any], without: str, said: str) -> None:
    PLAIN.record(tmp_path / "run.memory", **options)
    with pytest.raises(sl.SpotlightsError, match=said):
        rewound(tmp_path / "run.memory", PLAIN, without)


def test_another_optimizer_is_noticed(tmp_path: Path) -> None:
    PLAIN.record(tmp_path / "run.memory", segment_bytes=3000)
    model = PLAIN.network()
    before = state(model)
    for other in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW([model[0].weight], lr=0.1)):
        with pytest.raises(sl.SpotlightsError, match=r"SGD was given; the run had AdamW|does not hold"):
            sl.open(tmp_path / "run.memory").rewind(model, other, without="example=17")
    assert same(state(model), before)


def test_examples_may_be_named(tmp_path: Path) -> None:
    model = network(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "run.memory", **RECIPE) as recorder:
        for step in range(6):
            recorder.batch(example=[f"image {step}", "image 7"])
            optimizer.zero_grad()
            F.cross_entropy(model(INPUTS[[step, 7]]), CLASS[[step, 7]]).backward()
            optimizer.step()
    again = sl.open(tmp_path / "run.memory").rewind(copy.deepcopy(model), optimizer, without='example="image 5"')
    assert (again.first_seen, again.step) == (5, 4)
    names = [["image 4", "image 7"], ["image 7"]]
    assert again.batches == [hashlib.sha256(json.dumps(ids).encode()).hexdigest() for ids in names]


def test_the_optimizer_gets_the_options_of_the_run(tmp_path: Path) -> None:
    model = nn.Linear(INPUTS.shape[1], 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.001)
    with sl.record(model, optimizer, tmp_path / "run.memory") as recorder:
        recorder.batch(example=[1, 2])
        F.cross_entropy(model(INPUTS[:2]), CLASS[:2] % 3).backward()
        optimizer.step()
    other = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)  # torch's weight decay is 0 there, an integer
    sl.open(tmp_path / "run.memory").rewind(model, other, without="example=1")
    assert other.param_groups[0]["weight_decay"] == 0.001
    assert other.param_groups[0]["lr"] == 0.1


SUBJECT = """
import torch, spotlights as sl
from test_rewinding import INPUTS, PLAIN

subject = sl.Subject("run.memory", model=PLAIN.network, inputs=INPUTS[:3], loss=PLAIN.loss)
without_loss = sl.Subject("run.memory", model=PLAIN.network, inputs=INPUTS[:3])
"""


def test_the_command_writes_the_network_and_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = PLAIN.record(tmp_path / "run.memory", **RECIPE)
    never = PLAIN.network()
    PLAIN.run(never, PLAIN.make(never.parameters()), without=(17,))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forgetful.py").write_text(SUBJECT)
    command = ["forget", "run.memory", "--without", "example=17", "--subject", "forgetful.py:subject"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "steps trained again" in done.stdout
    assert same(load_file(tmp_path / "forgotten/run/model.safetensors"), state(never))
    assert json.loads((tmp_path / "forgotten/run/record.json").read_text())["trained"] is not None
    refused = CliRunner().invoke(app, [*command[:-1], "forgetful.py:without_loss"])
    assert refused.exit_code == 2
    assert "does not say how a loss is computed" in refused.stderr
    # A network without a record beside it may be somebody else's: it is not replaced.
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/model.safetensors").write_bytes(b"theirs")
    refused = CliRunner().invoke(app, [*command, "--out", "theirs"])
    assert refused.exit_code == 2
    assert "may be another network" in refused.stderr
    assert (tmp_path / "theirs/model.safetensors").read_bytes() == b"theirs"
    # Slots alone cannot be trained from.
    PLAIN.record(tmp_path / "slots.memory")
    refused = CliRunner().invoke(app, ["forget", "slots.memory", *command[2:]])
    assert refused.exit_code == 2
    assert "is no recipe" in refused.stderr
    assert not (tmp_path / "forgotten/slots").exists()
    # With its loss, a subject of a recipe answers all other questions, too.
    verified = CliRunner().invoke(app, ["verify", "run.memory", *command[-2:]])
    assert "relative error" in verified.stdout, verified.output
    memory = sl.open("run.memory", model=PLAIN.network(), recompute=PLAIN.loss)
    torch.testing.assert_close(memory.primal(final)(INPUTS[:3]), final(INPUTS[:3]), rtol=1e-4, atol=1e-4)
