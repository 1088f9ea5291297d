"""A history is an account: the initial number, what every slot added, decay and rest are the network's answer."""

import copy
import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spotlights as sl
from spotlights.query import trajectory
from test_processes import _data_parallel, in_all
from training import CLASSES, FEATURES, examples, fill, network

EXACT = 1e-9
STEPS, EXAMPLES, SIZE = 8, 12, 4
NOBODY = {"rounding", "gradients that are rounding", "running statistics", "momentum before recording"}
"""What may be in the rest of a run that is recorded whole."""


# -- networks ---------------------------------------------------------------------------------


class Cnn(nn.Sequential):
    """Convolutions with a bias that the batch norm after it takes away again."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(3, 4, 2, groups=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2)),
            *(nn.Flatten(), nn.Linear(4, CLASSES)),
        )


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.inner = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.inner(self.embedding(tokens))[0][:, -1])


class Gpt(nn.Module):
    """Attention, layer norms, an embedding of positions, and an embedding that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(7, 8), nn.Embedding(6, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.norm.weight.dtype)
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        return self.head(self.norm(self.block(x, src_mask=mask, is_causal=True)))


class Lora(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.base(x) + self.up(self.down(x))))


class Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(4, 6, 2, stride=2), nn.BatchNorm2d(6), nn.SiLU())
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(torch.cat([first, self.up(self.down(first))], dim=1))


@dataclasses.dataclass(frozen=True)
class Task:
    """A network, its training examples and their loss, and a number of interest."""

    model: Callable[[], nn.Module]
    inputs: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    target: Any = 1


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(4))


LABELS, TOKENS, PICTURES = _whole(CLASSES, EXAMPLES), _whole(7, EXAMPLES, 6), _random(EXAMPLES, 1, 4, 4)


def classify(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output, LABELS[ids])


def next_token(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output[:, :-1].flatten(0, 1), TOKENS[ids][:, 1:].flatten())


def reconstruct(output: Tensor, ids: Tensor) -> Tensor:
    return (output - PICTURES[ids].flip(-1)).square().mean()


def third_of_last(output: Tensor) -> Tensor:
    return output[:, -1, 3]


def brightness(output: Tensor) -> Tensor:
    return output.mean(dim=(1, 2, 3))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, CLASSES))


TASKS = {
    "mlp": Task(_mlp, _random(EXAMPLES, FEATURES), classify),
    "cnn with batch norm": Task(Cnn, PICTURES, classify),
    "lstm": Task(Lstm, TOKENS, classify),
    "gpt with tied embeddings": Task(Gpt, TOKENS, next_token, third_of_last),
    "lora": Task(Lora, _random(EXAMPLES, FEATURES), classify),
    "u-net": Task(Unet, PICTURES, reconstruct, brightness),
}


# -- training loops ---------------------------------------------------------------------------

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class Loop:
    """An optimizer and what happens around it."""

    make: Make
    clip: float | None = None
    accumulate: int = 1
    schedule: bool = False
    no_gradient_at: frozenset[int] = frozenset()
    steps_before: int = 0


LOOPS = {
    "plain sgd": Loop(lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd with everything": Loop(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        clip=0.5,
        accumulate=2,
        schedule=True,
    ),
    "dampening, begun before": Loop(
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.3), steps_before=2, clip=0.3
    ),
    "adam": Loop(lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.05), schedule=True, accumulate=2),
    "adamw": Loop(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True), clip=0.5, steps_before=2),
}


@dataclasses.dataclass
class Run:
    """A recorded run, and the network before every step and after the last."""

    task: Task
    model: nn.Module
    memory: sl.Memory
    networks: list[nn.Module]

    def numbers(self, model: nn.Module, target: Any = None) -> Tensor:
        """The number of interest, computed by the network itself."""
        target = self.task.target if target is None else target
        with torch.no_grad():
            output = copy.deepcopy(model).eval()(self.queries)
        return target(output) if callable(target) else output[:, target]

    @property
    def queries(self) -> Tensor:
        return self.task.inputs[:2]

    def history(self, target: Any = None) -> sl.History:
        return self.memory.attend(self.model, self.queries).history(self.task.target if target is None else target)


def train(task: Task, loop: Loop, *, steps: int = STEPS, model: nn.Module | None = None, **settings: Any) -> Run:
    torch.manual_seed(0)
    model = fill(task.model().double()) if model is None else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = loop.make(trained)
    networks: list[nn.Module] = []
    _take(task, loop, model, optimizer, range(-loop.steps_before, 0), None, [])
    path = Path(tempfile.mkdtemp()) / "run.memory"
    with sl.record(model, optimizer, path, **{"segment_bytes": 20_000, **settings}) as recorder:
        _take(task, loop, model, optimizer, range(steps), recorder, networks)
    networks.append(copy.deepcopy(model))
    return Run(task, model, sl.open(path), networks)


def _take(
    task: Task,
    loop: Loop,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    recorder: sl.Recorder | None,
    networks: list[nn.Module],
) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in steps:
        networks.append(copy.deepcopy(model))
        optimizer.zero_grad()
        for part in range(loop.accumulate):
            ids = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(100 + 7 * step + part))[:SIZE]
            if recorder is not None:
                recorder.batch(example=ids, label=LABELS[ids], source="even" if step % 2 == 0 else "odd")
            task.loss(model(task.inputs[ids]), ids).backward()
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loop.clip)
        if step in loop.no_gradient_at:
            for parameter in next(m for m in model.modules() if isinstance(m, nn.Linear)).parameters():
                parameter.grad = None
        if loop.schedule:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * (1.0 - 0.05 * step)
        optimizer.step()


def assert_account(run: Run, history: sl.History, target: Any = None, *, tolerance: float = EXACT) -> None:
    """Initial number, slots, decay and rest are the network's own answer, and the rest is next to nothing."""
    answer, start = run.numbers(run.model, target).double(), run.numbers(run.networks[0], target).double()
    scale = torch.maximum(answer.abs(), (answer - start).abs())
    rest = dict(history.rest)
    assert (answer - start).abs().min() > 1e-4, "training has changed nothing: this test would show nothing"
    summed = history.initial + history.total() + history.decay + history.rest
    worst = float(((summed - answer).abs() / scale).max())
    assert worst <= tolerance, f"the sum misses the answer by {worst:.1e}: {history}"
    assert rest.keys() <= NOBODY, f"somebody else has moved the network: {history}"
    for name in ("rounding", "gradients that are rounding"):
        lost = float((rest.get(name, torch.zeros(1)).abs() / scale).max())
        assert lost <= tolerance, f"the slots do not explain the training, {name} is {lost:.1e}: {history}"
    assert float(((history.initial - start).abs() / scale).max()) <= tolerance
    assert history.exact
    # The number after every step is the network's of that step: the weights were rebuilt, not guessed.
    curve = torch.stack([run.numbers(network, target).double() for network in run.networks], dim=1)
    torch.testing.assert_close(history.curve().values, curve, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("task", TASKS)
def test_the_sum_is_the_answer(task: str, loop: str) -> None:
    run = train(TASKS[task], LOOPS[loop])
    history = run.history()
    assert_account(run, history)
    assert ("running statistics" in history.rest) == (task in ("cnn with batch norm", "u-net"))
    decayed = float(history.decay.abs().max())
    assert (decayed > 0.0) == (loop in ("sgd with everything", "adam", "adamw"))


def test_muon_leaves_its_own_rounding_and_nothing_else() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("new in torch 2.9")
    task = dataclasses.replace(TASKS["mlp"], model=lambda: network(FEATURES, 6, 6, CLASSES))
    model = fill(task.model())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("weight"))
    run = train(task, Loop(lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1)), model=model)
    history = run.history()
    summed = history.initial + history.total() + history.decay + history.rest
    torch.testing.assert_close(summed, run.numbers(run.model), rtol=EXACT, atol=EXACT)
    assert set(history.rest) == {"rounding"}
    assert (history.rest["rounding"].abs() < 0.05 * history.total().abs().clamp_min(1.0)).all()
    assert not history.exact
    assert "bfloat16" in str(history.note)


def _make_orthogonal(grad: Tensor, ns_coefficients: tuple[float, ...], ns_steps: int, eps: float) -> Tensor:
    """Newton–Schulz as torch has it, but in the type of the gradient."""
    a, b, c = ns_coefficients
    x = grad.T if len(grad) > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(grad) > grad.shape[1] else x


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="new in torch 2.9")
def test_without_bfloat16_muons_history_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.optim._muon"], "_zeropower_via_newtonschulz", _make_orthogonal)
    task = dataclasses.replace(TASKS["mlp"], model=lambda: network(FEATURES, 6, 6, CLASSES))
    model = fill(task.model())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("weight"))
    run = train(task, Loop(lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1)), model=model)
    history = run.history()
    summed = history.initial + history.total() + history.decay
    torch.testing.assert_close(summed, run.numbers(run.model), rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_two_processes_have_one_history(tmp_path: Path, optimizer: str) -> None:
    weights, _ = in_all(_data_parallel, tmp_path, optimizer, {"accumulate": 2})
    model, inputs = network(), examples()[0][:3]
    initial = model(inputs)[:, 1].detach()
    model.load_state_dict(weights)
    history = sl.open(tmp_path / "run.memory").attend(model, inputs).history(1)
    summed = history.initial + history.total() + history.decay + history.rest
    torch.testing.assert_close(summed, model(inputs)[:, 1].detach(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(history.initial, initial, rtol=EXACT, atol=EXACT)
    assert set(history.rest) == {"rounding"}
    assert history.exact


def test_in_float32_a_network_of_the_size_of_mnist_meets_its_answer() -> None:
    torch.manual_seed(0)
    images, labels = torch.rand(256, 784) * (torch.rand(256, 784) < 0.2), torch.randint(10, (256,))
    model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    before = copy.deepcopy(model)
    path = Path(tempfile.mkdtemp()) / "run.memory"
    with sl.record(model, optimizer, path) as recorder:
        for step in range(100):
            ids = torch.randint(256, (32,), generator=torch.Generator().manual_seed(step))
            recorder.batch(example=ids, label=labels[ids])
            optimizer.zero_grad()
            F.cross_entropy(model(images[ids]), labels[ids]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    history = sl.open(path).attend(model, images[:4]).history(7)
    answer, start = (network(images[:4])[:, 7].detach().double() for network in (model, before))
    scale = torch.maximum(answer.abs(), (answer - start).abs())
    summed = history.initial + history.total() + history.decay
    assert float(((summed - answer).abs() / scale).max()) < 1e-4, "without the rest: it is rounding alone"
    torch.testing.assert_close(history.initial, start, rtol=1e-5, atol=1e-6)
    assert history.exact
    assert float(history.residual.max()) < 0.2


# -- every slot -------------------------------------------------------------------------------


def test_each_slot_has_what_its_own_gradient_did_to_the_number() -> None:
    """By brute force, forwards in time: every slot has a momentum of its own, and moves the weights by it."""
    options = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
    run = train(TASKS["mlp"], Loop(lambda p: torch.optim.SGD(p, **options)))
    history = run.history()
    weights = [dict(network.named_parameters()) for network in run.networks]
    shares: dict[int, Tensor] = {}
    held: dict[int, dict[str, Tensor]] = {}
    for step in range(STEPS):
        ids = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(100 + 7 * step))[:SIZE]
        model = copy.deepcopy(run.networks[step])
        for example in ids.tolist():  # its part of the mean loss; ReLU and the layers know no other example
            model.zero_grad()
            (classify(model(run.task.inputs[[example]]), torch.tensor([example])) / SIZE).backward()
            now = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
            held.setdefault(example, {name: torch.zeros_like(g) for name, g in now.items()})
            for name, gradient in now.items():
                held[example][name] += gradient / 0.9  # is multiplied by momentum below, like the rest
        gradients = discrete_gradients(run, weights[step], weights[step + 1], step)
        for example, moments in held.items():
            moved = torch.zeros(2, dtype=torch.float64)
            for name, moment in moments.items():
                moment *= 0.9
                fresh = _own_gradient(run, step, example, name) if example in ids.tolist() else 0.0
                update = -0.05 * (fresh + 0.9 * moment)
                moved += torch.stack([(g[name] * update).sum() for g, _ in gradients])
            shares[example] = shares.get(example, 0.0) + moved
    totals = history.totals("example")
    for place, example in enumerate(totals.groups):
        torch.testing.assert_close(totals.values[:, place], shares[example], rtol=1e-8, atol=1e-10)


def _own_gradient(run: Run, step: int, example: int, name: str) -> Tensor:
    model = copy.deepcopy(run.networks[step])
    model.zero_grad()
    (classify(model(run.task.inputs[[example]]), torch.tensor([example])) / SIZE).backward()
    gradient = dict(model.named_parameters())[name].grad
    assert gradient is not None
    return gradient


def discrete_gradients(
    run: Run, before: dict[str, Tensor], after: dict[str, Tensor], step: int
) -> list[tuple[dict[str, Tensor], float]]:
    """ḡ of the number for each query, and its share of ΔW, as the equations of docs/history.md have it."""
    middle = copy.deepcopy(run.networks[step])
    with torch.no_grad():
        for name, parameter in middle.named_parameters():
            parameter.copy_((before[name] + after[name]) / 2)
    change = {name: (after[name] - before[name]).detach() for name in before}
    size = sum(float(d.square().sum()) for d in change.values())
    made = []
    for query in range(len(run.queries)):
        middle.zero_grad()
        middle(run.queries[[query]])[0, run.task.target].backward()
        gradient = {name: p.grad.clone() for name, p in middle.named_parameters() if p.grad is not None}
        first_order = sum(float((gradient[name] * change[name]).sum()) for name in gradient)
        old, new = (run.numbers(run.networks[s])[query] for s in (step, step + 1))
        share = float(new - old - first_order) / size
        made.append(({name: gradient[name] + share * change[name] for name in gradient}, share))
    return made


# -- for all networks and loops ----------------------------------------------------------------


@st.composite
def optimizers(draw: st.DrawFn) -> Make:
    decay = draw(st.sampled_from([0.0, 0.1]), label="weight_decay")
    kind = draw(st.sampled_from(["sgd", "adam", "adamw", "nadam", "radam", "adamax", "rmsprop", "adagrad", "adadelta"]))
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": decay, "maximize": draw(st.booleans(), label="maximize")}
    if kind == "sgd":
        momentum = draw(st.sampled_from([0.0, 0.8]), label="momentum")
        options |= {"momentum": momentum}
        if momentum:
            options |= draw(st.sampled_from([{}, {"nesterov": True}, {"dampening": 0.4}]), label="more")
        return lambda p: torch.optim.SGD(p, **options)
    if kind == "rmsprop":
        options |= {"momentum": draw(st.sampled_from([0.0, 0.5])), "centered": draw(st.booleans())}
    classes = {c.lower(): c for c in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta")}
    return lambda p: getattr(torch.optim, classes[kind])(p, **options)


@st.composite
def networks(draw: st.DrawFn) -> nn.Module:
    sizes = [FEATURES, *draw(st.lists(st.integers(2, 12), max_size=2), label="widths"), CLASSES]
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers.append(nn.Linear(wide, narrow, bias=draw(st.booleans(), label="bias")))
        layers += draw(st.sampled_from([[], [nn.LayerNorm(narrow)], [nn.BatchNorm1d(narrow)]]), label="norm")
        layers.append(draw(st.sampled_from([nn.ReLU(), nn.GELU(), nn.Tanh()]), label="activation"))
    return nn.Sequential(*layers[:-1])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors])
@given(
    model=networks(),
    make=optimizers(),
    clip=st.sampled_from([None, 0.3]),
    accumulate=st.integers(1, 2),
    schedule=st.booleans(),
    no_gradient_at=st.frozensets(st.integers(0, STEPS - 1), max_size=3),
    steps_before=st.sampled_from([0, 2]),
    trajectory_bytes=st.sampled_from([1, 20_000, 1 << 30]),
)
def test_any_network_and_any_loop_has_a_history(
    model: nn.Module, make: Make, trajectory_bytes: int, **around: Any
) -> None:
    task = TASKS["mlp"]
    kept, trajectory.TRAJECTORY_BYTES = trajectory.TRAJECTORY_BYTES, trajectory_bytes
    try:
        run = train(task, Loop(make, **around), model=fill(model.double()))
        history = run.history()
    finally:
        trajectory.TRAJECTORY_BYTES = kept
    answer, start = run.numbers(run.model), run.numbers(run.networks[0])
    summed = history.initial + history.total() + history.decay + history.rest
    torch.testing.assert_close(summed, answer, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(history.initial, start, rtol=1e-8, atol=1e-8)
    assert set(history.rest) <= NOBODY
    assert float(history.rest.get("rounding", torch.zeros(1)).abs().max()) < 1e-7


# -- what can be asked ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run() -> Run:
    return train(TASKS["mlp"], LOOPS["adamw"], steps=20)


def test_no_target_is_refused(run: Run):
    with pytest.raises(sl.SettingError, match=r"target=None: give a class.*or a function"):
        run.memory.attend(run.model, run.queries).history(None)


@pytest.fixture(scope="module")
def history(run: Run) -> sl.History:
    return run.history(
        {"one": 1, "two, not zero": "2-0", "loss": lambda o: F.cross_entropy(o, LABELS[:2], reduction="none")}
    )


def test_several_inputs_and_targets_are_one_sweep(run: Run, history: sl.History) -> None:
    assert len(history) == 6
    assert history.names[2] == "two, not zero (input 0)"
    output = run.model(run.queries).detach()
    loss = F.cross_entropy(output, LABELS[:2], reduction="none")
    torch.testing.assert_close(history.answer, torch.cat([output[:, 1], output[:, 2] - output[:, 0], loss]))
    summed = history.initial + history.total() + history.decay + history.rest
    torch.testing.assert_close(summed, history.answer, rtol=EXACT, atol=EXACT)
    alone = run.history("2-0")
    torch.testing.assert_close(alone.numpy(), history.numpy()[2:4], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize(("column", "bins"), [("label", None), ("source", None), ("step", 5), ("example", None)])
def test_every_grouping_has_the_same_total(history: sl.History, column: str, bins: int | None) -> None:
    totals = history.totals(column, bins=bins)
    torch.testing.assert_close(totals.values.sum(dim=1), history.total(), rtol=EXACT, atol=EXACT)
    assert totals.counts.sum() == 20 * SIZE


def test_top_and_bottom_are_the_ends_of_the_totals(history: sl.History) -> None:
    values = history.totals("example").values
    np.testing.assert_allclose(history.top(3).numpy(), values.sort(descending=True).values[:, :3])
    np.testing.assert_allclose(history.bottom(3).numpy(), values.sort().values[:, :3])
    first = next(history.top(1).rows(0))
    assert {"example", "history", "visits", "label"} <= first.keys()
    with pytest.raises(sl.UnsupportedError, match='by="example"'):
        history.top(3, by=None)


def test_layers_share_the_total(history: sl.History) -> None:
    by_layer = history.by_layer()
    assert by_layer.groups == ["0", "2", "4"]
    torch.testing.assert_close(by_layer.values.sum(dim=1), history.total(), rtol=EXACT, atol=EXACT)
    assert (by_layer.values != 0).all()


def test_a_view_has_its_own_slots_and_names_the_others(run: Run) -> None:
    whole = run.history()
    odd = run.memory.where(source="odd")
    some = odd.attend(run.model, run.queries).history(1)
    torch.testing.assert_close(some.total(), whole.totals("source").values[:, 1], rtol=EXACT, atol=EXACT)
    outside = some.rest["slots outside the view"]
    torch.testing.assert_close(outside, whole.totals("source").values[:, 0], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(some.initial + some.total() + some.decay + some.rest, run.numbers(run.model))
    again = whole.within(odd)
    torch.testing.assert_close(again.total(), some.total(), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(again.rest["slots outside the view"], outside, rtol=EXACT, atol=EXACT)


def test_as_of_a_step_the_history_ends_there(run: Run) -> None:
    early = run.memory.as_of(7).attend(run.model, run.queries).history(1)
    then = run.numbers(run.networks[7])
    torch.testing.assert_close(early.answer, then, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(early.initial + early.total() + early.decay + early.rest, then, rtol=EXACT, atol=EXACT)
    none = run.memory.as_of(0).attend(run.model, run.queries).history(1)
    torch.testing.assert_close(none.initial, none.answer)
    assert (none.total() == 0).all()


def test_kappa_and_residual_are_those_of_the_equations(run: Run) -> None:
    history = run.history()
    assert (history.kappa >= 1.0).all()
    weights = [dict(network.named_parameters()) for network in run.networks]
    missed = torch.zeros(2, dtype=torch.float64)
    for step, (before, after) in enumerate(itertools.pairwise(weights)):
        change = {name: (after[name] - before[name]).detach() for name in before}
        size = sum(float(d.square().sum()) for d in change.values())
        for query, (gradient, share) in enumerate(discrete_gradients(run, before, after, step)):
            old, new = (run.numbers(run.networks[s])[query] for s in (step, step + 1))
            moved = sum(float((gradient[name] * change[name]).sum()) for name in gradient)
            assert moved == pytest.approx(float(new - old), abs=1e-12)
            missed[query] += abs(share) * size
    movement = history.curve().values.diff(dim=1).abs().sum(dim=1)
    torch.testing.assert_close(history.residual, missed / movement, rtol=1e-6, atol=1e-9)


def test_forgetting_names_the_step_and_the_examples_that_took_the_answer() -> None:
    """Half of training teaches labels, the other half teaches others for the same inputs."""
    inputs, labels = _random(EXAMPLES, FEATURES), torch.arange(EXAMPLES) % CLASSES
    model = fill(network(FEATURES, 16, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    path, right = Path(tempfile.mkdtemp()) / "run.memory", []
    with sl.record(model, optimizer, path) as recorder:
        for step in range(60):
            taught = labels if step < 30 else (labels + 1) % CLASSES
            right.append(int(model(inputs[:1]).argmax()) == 0)
            ids = torch.arange(EXAMPLES)
            recorder.batch(example=ids + (100 if step >= 30 else 0), label=taught, source="a" if step < 30 else "b")
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), taught).backward()
            optimizer.step()
    history = sl.open(path).attend(model, inputs[:1]).history(0)
    lost = list(history.forgetting(k=3))[-1]
    assert lost.at_step == max(s for s in range(59) if right[s] and not right[s + 1])
    assert (lost.at_step >= 30, lost.says, lost.regained) == (True, 1, None)
    assert lost.before > lost.after
    assert lost.takers[0][0] == 100, "the same input with the other label took most"
    sums = dict(zip(history.totals("source").groups, history.totals("source").values[0].tolist(), strict=True))
    assert sums["a"] > 0 > sums["b"]
    assert "lost at step" in str(history.forgetting())


def test_it_prints_converts_and_plots(history: sl.History, quick_figures: None) -> None:
    text = str(history)
    assert "initial" in text
    assert "not a forecast" in text
    assert "exact: adds up within" in text
    frame = history.to_pandas()
    assert list(frame["number"]) == history.names
    terms = [name for name in frame.columns if name not in ("number", "answer")]
    np.testing.assert_allclose(frame[terms].sum(axis=1), frame["answer"], rtol=EXACT)
    assert history.curve().to_pandas().shape == (21, 7)
    assert "steps" in str(history.curve())
    for by in ("label", "source", None):
        panel = history.panel(1, by=by)
        ends = panel.areas[:, -1].sum()
        assert ends == pytest.approx(float(history.total()[1]))
        assert history.plot(1, by=by).axes[0].lines
    assert history.curve().plot(1).axes[0].lines


# -- what is not recorded ---------------------------------------------------------------------


class Scaled(nn.Module):
    """Has a parameter that no layer records."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = network(), nn.Parameter(torch.ones(CLASSES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


@pytest.mark.filterwarnings("ignore::spotlights.errors.SpotlightsWarning")
def test_parameters_that_nobody_recorded_keep_their_final_values_and_are_named() -> None:
    run = train(dataclasses.replace(TASKS["mlp"], model=Scaled), LOOPS["plain sgd"], layers=["inner.*"])
    history = run.history()
    start = copy.deepcopy(run.networks[0])
    start.scale.data.copy_(run.model.scale.data)
    torch.testing.assert_close(history.initial, run.numbers(start), rtol=EXACT, atol=EXACT)
    summed = history.initial + history.total() + history.decay + history.rest
    torch.testing.assert_close(summed, run.numbers(run.model), rtol=EXACT, atol=EXACT)
    assert "5.0% of the trained parameters are not recorded" in str(history.note)
    assert "scale" in str(history.note)


def test_gradients_that_no_slot_explains_are_named() -> None:
    def penalised(output: Tensor, ids: Tensor) -> Tensor:
        return classify(output, ids) + 0.1 * sum(p.square().sum() for p in model.parameters())

    model = fill(_mlp().double())
    with pytest.warns(sl.SpotlightsWarning, match="penalty"):
        run = train(dataclasses.replace(TASKS["mlp"], loss=penalised), LOOPS["plain sgd"], model=model)
    history = run.history()
    assert "unexplained gradients" in history.rest
    assert not history.exact
    assert "not exact" in str(history.note)
    summed = history.initial + history.total() + history.decay + history.rest
    torch.testing.assert_close(summed, run.numbers(run.model), rtol=EXACT, atol=EXACT)


def test_another_model_is_noticed(run: Run) -> None:
    other = fill(_mlp().double())
    history = run.memory.attend(other, run.queries).history(1)
    assert "the model's weights are not those of the memory" in history.rest
    assert not history.exact


def test_a_memory_without_running_statistics_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from spotlights.recording.start import RunningStatistics

    monkeypatch.setattr(RunningStatistics, "initial", lambda self: {})
    monkeypatch.setattr(RunningStatistics, "now", lambda self: {})
    run = train(TASKS["cnn with batch norm"], LOOPS["plain sgd"])
    history = run.history()
    assert "running statistics" not in history.rest
    assert "final running statistics" in str(history.note)
    summed = history.initial + history.total() + history.decay + history.rest
    torch.testing.assert_close(summed, run.numbers(run.model), rtol=EXACT, atol=EXACT)


def test_running_statistics_survive_resuming() -> None:
    task, model = TASKS["cnn with batch norm"], fill(Cnn().double())
    optimizer, networks = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    path = Path(tempfile.mkdtemp()) / "run.memory"
    for steps in (range(4), range(4, 9)):
        with sl.record(model, optimizer, path, resume=True, segment_bytes=20_000) as recorder:
            _take(task, LOOPS["plain sgd"], model, optimizer, steps, recorder, networks)
    run = Run(task, model, sl.open(path), [*networks, copy.deepcopy(model)])
    assert_account(run, run.history())


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"fold": "example"}, "folded"), ({"sample": 0.5}, "sample"), ({"errors": False}, "errors=False")],
)
def test_memories_that_have_not_everything_are_refused_with_a_sentence(settings: dict[str, Any], message: str) -> None:
    run = train(TASKS["mlp"], LOOPS["plain sgd"], **settings)
    with pytest.raises(sl.UnsupportedError, match=message):
        run.history()


def test_an_optimizer_without_a_rule_is_refused_with_a_sentence() -> None:
    with pytest.warns(sl.SpotlightsWarning, match="Rprop has no exact rule"):
        run = train(TASKS["mlp"], Loop(lambda p: torch.optim.Rprop(p, lr=0.01)))
    with pytest.raises(sl.UnsupportedError, match="Rprop, which has no exact update rule"):
        run.history()


@pytest.mark.parametrize("target", ["7 of 9", "1-", "", {}, 17, 0.5])
def test_a_target_that_is_none_is_refused(run: Run, target: Any) -> None:
    with pytest.raises(sl.SettingError):
        run.history(target)


def test_progress_is_told_to_the_end(run: Run) -> None:
    shares: list[float] = []
    run.memory.attend(run.model, run.queries).history(1, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
