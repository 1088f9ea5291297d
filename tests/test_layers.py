"""Every kind of layer, with any options: the memory is the layer as of any step, in parts that add up."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spotlights as sl
from layer_kinds import KINDS, Conv1D, OwnNorm, Twice
from spotlights.layers import ADAPTERS, LayerAdapter, adapter_for
from spotlights.layers.convolution import ConvolutionAdapter
from training import fill, one_number, state

pytestmark = pytest.mark.filterwarnings("ignore:.*examples may be counted along")  # batches of 2 by 2
EXACT = {"rtol": 1e-9, "atol": 1e-9}
STEPS = 5
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05, weight_decay=0.1),
}


def recorded(model: nn.Module, inputs: Tensor, make: Callable[..., Any], **options: Any) -> tuple[sl.Memory, list[Any]]:
    """Some steps of regression on random targets, each on another part of the inputs; the state after each."""
    path, after = Path(tempfile.mkdtemp()) / "run.memory", [state(model)]
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(3)
    with sl.record(model, optimizer, path, **{"dtype": "float64", "segment_bytes": 3000, **options}) as recorder:
        for _ in range(STEPS):
            ids = torch.randint(len(inputs), (2,), generator=generator)
            recorder.batch(example=ids, label=ids % 2)
            optimizer.zero_grad()
            output = model(inputs[ids])
            wanted = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            (output - wanted).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            after.append(state(model))
    return sl.open(path), after


def assert_parts_add_up(memory: sl.Memory, model: nn.Module, inputs: Tensor, layer: str) -> None:
    attention = memory.attend(model, inputs)[layer]
    contributions = attention.contributions(target=one_number)
    assert contributions.exact
    every = torch.from_numpy(contributions.numpy())
    made = (contributions.initial + every.sum(dim=1)).reshape(len(inputs), -1).sum(dim=1)
    torch.testing.assert_close(made, one_number(model(inputs)).detach(), **EXACT)

    masked = memory.without(label=0)
    some = masked.attend(model, inputs)[layer].contributions(target=one_number)
    kept = torch.tensor([row["label"] != 0 for row in slots(memory, model, inputs, layer)])
    torch.testing.assert_close(torch.from_numpy(some.numpy()).to(every), every[:, kept], **EXACT)
    made = (some.initial + every[:, kept].sum(dim=1)).reshape(len(inputs), -1).sum(dim=1)
    for network in networks_of(masked, model):
        torch.testing.assert_close(made, one_number(network(inputs)).detach(), **EXACT)


def networks_of(memory: sl.Memory, model: nn.Module) -> list[nn.Module]:
    """The weights' network and the slots', which calls modules as they are written: `Twice` makes two inputs of one."""
    two = any(isinstance(module, Twice) for module in model.modules())
    return [memory.primal(model)] if two else [memory.primal(model), memory.dual(model)]


def slots(memory: sl.Memory, model: nn.Module, inputs: Tensor, layer: str) -> list[dict[str, Any]]:
    rows = memory.attend(model, inputs)[layer].top(memory.layers[layer].slots).rows(0)
    return sorted(rows, key=lambda row: row["slot"])


@pytest.mark.filterwarnings("ignore:Without the masked slots")  # of a layer whose sum cancels
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_memory_is_the_layer_in_parts_that_add_up(kind: str, optimizer: str, data: st.DataObject):
    layer, inputs = data.draw(KINDS[kind](batch=3))
    model = fill(nn.Sequential(layer)).double().train()
    memory, after = recorded(model, inputs, OPTIMIZERS[optimizer])
    model.eval()
    adapter = adapter_for(layer)
    assert memory.layers["0"].kind == adapter.kind == kind
    verified = memory.verify(model)
    assert verified["0"].relative_error <= 1e-9, str(verified)
    assert not verified["0"].unexplained_steps, str(verified)
    assert not verified["0"].moved_steps, str(verified)
    for step in (STEPS, STEPS // 2):
        made = memory.as_of(step).primal(model).state_dict()
        for name in memory.parameters("0"):
            torch.testing.assert_close(made[f"0.{name}"], after[step][f"0.{name}"], **EXACT)
    assert memory.as_of(STEPS // 2).verify(files=False).ok
    assert_parts_add_up(memory, model, inputs, "0")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_each_storage_type_holds_it_within_its_rounding(kind: str, storage: str):
    model, inputs = NETWORKS[kind]()
    model = fill(model).float()
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    memory, _ = recorded(model, inputs, OPTIMIZERS["sgd"], dtype=storage)
    assert memory.verify(model.eval()).ok
    for layer in memory.layers:
        values = memory.attend(model, inputs)[layer].contributions(target=one_number)
        assert torch.isfinite(torch.from_numpy(values.numpy())).all()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_work_together_in_a_network(kind: str):
    model, inputs = NETWORKS[kind]()
    model = fill(model).double()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    memory, after = recorded(model, inputs, OPTIMIZERS["adam"])
    model.eval()
    verified = memory.verify(model)
    for layer in memory.layers:
        assert verified[layer].relative_error <= 1e-9, str(verified)
        assert not verified[layer].unexplained_steps, str(verified)
    for network in networks_of(memory, model):
        torch.testing.assert_close(network(inputs).detach(), model(inputs).detach(), **EXACT)
    made = memory.as_of(2).primal(model).state_dict()
    for name, value in made.items():
        if name.split(".")[0] in memory.layers and name.split(".")[1] in ("weight", "bias"):
            torch.testing.assert_close(value, after[2][name], **EXACT)


def _convolutional() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    return model, torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(5))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(4, 4)),
    "transposed-linear": lambda: (nn.Sequential(Conv1D(5, 4), nn.Tanh(), Conv1D(3, 5)), torch.randn(4, 2, 4)),
    "convolution": _convolutional,
    "transposed-convolution": lambda: (
        nn.Sequential(
            nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, groups=2),
            nn.Tanh(),
            nn.ConvTranspose2d(4, 2, 2, bias=False),
            nn.Flatten(),
            nn.Linear(2 * 6 * 6, 3),
        ),
        torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(5)),
    ),
    "embedding-bag": lambda: (
        nn.Sequential(nn.EmbeddingBag(7, 4), nn.Tanh(), nn.Linear(4, 3)),
        torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(5)),
    ),
    "bilinear": lambda: (
        nn.Sequential(Twice(4, 2, 5), nn.Tanh(), Twice(5, 5, 3)),
        torch.randn(4, 4, generator=torch.Generator().manual_seed(5)),
    ),
    "embedding": lambda: (
        nn.Sequential(nn.Embedding(7, 4), nn.Tanh(), nn.Linear(4, 3)),
        torch.randint(7, (4, 5), generator=torch.Generator().manual_seed(5)),
    ),
    "layer-norm": lambda: _normalised(nn.LayerNorm((4, 4)), nn.LayerNorm(3)),
    "rms-norm": lambda: _normalised(nn.RMSNorm((4, 4)), nn.RMSNorm(3)),
    "batch-norm": lambda: _normalised(nn.BatchNorm2d(2), nn.BatchNorm1d(3)),
    "group-norm": lambda: _normalised(nn.GroupNorm(2, 2), nn.GroupNorm(1, 3)),
    "own-norm": lambda: _normalised(OwnNorm(4, channels=False), OwnNorm(3, channels=False, bias=False)),
    "own-norm-of-channels": lambda: _normalised(OwnNorm(2, channels=True), nn.LayerNorm(3)),
}


def _normalised(first: nn.Module, second: nn.Module) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), first, nn.Tanh(), nn.Flatten(), nn.Linear(32, 3), second)
    return model, torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(5))


def test_every_kind_is_tested():
    assert set(KINDS) == set(NETWORKS) == {adapter.kind for adapter in ADAPTERS if isinstance(adapter, LayerAdapter)}


def test_a_convolution_has_a_slot_for_each_position_and_columns_of_its_example():
    model, inputs = NETWORKS["convolution"]()
    model = fill(model).double()
    memory, _ = recorded(model, inputs.double(), OPTIMIZERS["sgd"])
    found = slots(memory, model, inputs.double()[:1], "0")
    assert memory.layers["0"].slots == len(found) == STEPS * 2 * 16
    assert [row["position"] for row in found[:32]] == [*range(16), *range(16)]
    for row in found:
        assert row["label"] == row["example"] % 2
    assert len({row["example"] for row in found[:16]}) == 1


def test_inputs_that_come_again_are_stored_once_and_patches_as_they_come():
    """A patch is small: looking for it among all others would cost more than keeping it."""
    inputs = torch.zeros(3, 1, 6, 6, dtype=torch.float64)
    inputs[:, 0, 0, 0] = torch.arange(3)
    patches, _ = recorded(fill(nn.Sequential(nn.Conv2d(1, 2, 3))).double(), inputs, OPTIMIZERS["sgd"])
    assert patches.layers["0"].distinct_keys == patches.layers["0"].slots == STEPS * 2 * 16
    rows, _ = recorded(fill(nn.Sequential(nn.Linear(36, 2))).double(), inputs.flatten(1), OPTIMIZERS["sgd"])
    assert rows.layers["0"].distinct_keys <= 3 < rows.layers["0"].slots


def test_patches_that_were_first_met_without_gradients_have_them_later():
    convolution = nn.Conv2d(1, 2, 3, dilation=2)
    adapter, inputs = ConvolutionAdapter(), torch.randn(2, 1, 9, 11)
    with torch.inference_mode():
        adapter.keys(convolution, inputs)
    adapter.keys(convolution, inputs.requires_grad_()).sum().backward()
    assert inputs.grad is not None


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_a_transposed_weight_is_exact_under_muon(tmp_path: Path):
    """Muon's step size depends on which side is longer: that of the weight as the module has it."""
    model = fill(nn.Sequential(Conv1D(6, 3))).double()
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(5)).double()
    memory, _ = recorded(model, inputs, lambda p: torch.optim.Muon([q for q in p if q.ndim == 2]))
    check = memory.verify(model)["0"]
    assert check.change_error < 0.1  # torch computes Muon's polynomial in bfloat16


class ByColumn(torch.optim.Optimizer):
    """Divides by the norm along the last dimension: of a kernel, another one than of its matrix."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad / (p.grad.norm(dim=-1, keepdim=True) + 0.1)


@pytest.mark.filterwarnings("ignore:.*has no exact rule")
@pytest.mark.parametrize("kind", ["convolution", "transposed-linear", "transposed-convolution"])
def test_an_optimizer_without_a_rule_is_run_again_on_weights_in_their_own_shape(kind: str):
    model, inputs = NETWORKS[kind]()
    model = fill(model).double()
    memory, _ = recorded(model, inputs.double(), ByColumn)
    assert memory.verify(model, optimizer=ByColumn).ok


def test_a_layer_of_a_user_s_own_is_exact_with_the_adapter_of_the_documentation(tmp_path: Path):
    names: dict[str, Any] = {}
    kept = list(ADAPTERS)
    try:
        exec(_documented("class LayerScale"), names)
        model = fill(nn.Sequential(nn.Linear(4, 5), names["LayerScale"](5))).double()
        inputs = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(5)).double()
        memory, _ = recorded(model, inputs, OPTIMIZERS["adam"])
        assert memory.info.as_dict()["not recorded"] == []
        assert memory.verify(model).ok
        assert_parts_add_up_in_the_last_layer(memory, model, inputs)
        sl.register_layer(names["LayerScaleAdapter"]())  # again: no harm
        with pytest.raises(sl.SettingError, match="already"):
            sl.register_layer(type("Other", (names["LayerScaleAdapter"],), {})())
    finally:
        ADAPTERS[:] = kept
    with pytest.raises(sl.UnsupportedError, match="register_layer"):
        memory.attend(model, inputs)


def test_a_module_that_uses_f_linear_is_exact_with_the_line_of_the_documentation():
    names: dict[str, Any] = {}
    kept = list(ADAPTERS)
    try:
        exec(_documented("class LowRank"), names)
        model = fill(nn.Sequential(nn.Linear(4, 5), names["LowRank"](5, 2))).double()
        inputs = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(5)).double()
        memory, _ = recorded(model, inputs, OPTIMIZERS["adam"])
        assert list(memory.layers) == ["0", "1.down", "1.up"]
        assert memory.info.as_dict()["not recorded"] == []
        assert memory.verify(model).ok
    finally:
        ADAPTERS[:] = kept


def _documented(what: str) -> str:
    """The example of the page on layers that has this in it."""
    page = (Path(__file__).parent.parent / "docs" / "layers.md").read_text(encoding="utf-8")
    (found,) = (block.split("```")[0] for block in page.split("```python\n")[1:] if what in block.split("```")[0])
    return found


def assert_parts_add_up_in_the_last_layer(memory: sl.Memory, model: nn.Module, inputs: Tensor) -> None:
    contributions = memory.attend(model, inputs)["1"].contributions(target=one_number)
    made = (contributions.initial + contributions.total()).reshape(len(inputs), -1).sum(dim=1)
    torch.testing.assert_close(made, one_number(model(inputs)).detach(), **EXACT)


def test_influence_refuses_layers_with_groups_and_leaves_them_out_of_the_sum():
    model, inputs = NETWORKS["convolution"]()
    model = fill(model).double()
    memory, _ = recorded(model, inputs.double(), OPTIMIZERS["sgd"])
    spot = memory.attend(model, inputs.double())
    with pytest.raises(sl.UnsupportedError, match="2 parts of its keys"):
        spot["2"].influence(target=1)
    assert "2" not in repr(spot.influence(target=1)).split(":")[0].removeprefix("Influence(").split(", ")
