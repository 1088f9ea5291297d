"""What the optimizer did with each slot, found without help from the user: in float64 the memory is exact."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spotlights as sl
from training import (
    CLASSES,
    EXACT,
    FEATURES,
    assert_exact,
    chosen,
    distance,
    examples,
    fill,
    network,
    sgd,
    state,
    train,
)

X, Y = examples()


@st.composite
def runs(draw) -> dict:
    """A training run with options of SGD that torch accepts together."""
    momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
    nesterov = momentum > 0 and draw(st.booleans())
    return {
        "momentum": momentum,
        "nesterov": nesterov,
        "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.05])),
        "maximize": draw(st.booleans()),
        "lr": draw(st.floats(0.001, 0.2)),
        "bias_lr": draw(st.none() | st.floats(0.0, 0.2)),
        "kind": draw(st.sampled_from(["", "foreach", "fused"])),
        "schedule": draw(st.sampled_from(["", "cosine", "step", "cycle"])),
        "clip": draw(st.none() | st.floats(0.05, 1.0)),
        "loss_scale": draw(st.sampled_from([1.0, 1024.0, 0.3])),
        "sizes": draw(st.lists(st.integers(1, 6), min_size=2, max_size=8)),
        "accumulate": draw(st.integers(1, 3)),
        "set_to_none": draw(st.booleans()),
    }


def _optimizer(model: nn.Module, run: dict) -> torch.optim.SGD:
    options = {name: run[name] for name in ("lr", "momentum", "nesterov", "dampening", "weight_decay", "maximize")}
    if run["kind"]:
        options[run["kind"]] = True
    if run["bias_lr"] is None:
        return torch.optim.SGD(model.parameters(), **options)
    weights = [p for name, p in model.named_parameters() if "weight" in name]
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    groups = [{"params": weights}, {"params": biases, "lr": run["bias_lr"], "weight_decay": 0.0}]
    return torch.optim.SGD(groups, **options)


def _schedule(optimizer: torch.optim.SGD, kind: str):
    if kind == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    if kind == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    if kind == "cycle":  # moves the momentum as well, where there is one
        moves = optimizer.param_groups[0]["momentum"] > 0
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10, cycle_momentum=moves)
    return None


@settings(max_examples=25, deadline=None)
@given(run=runs())
def test_sgd_with_any_options_is_exact_at_every_step(tmp_path_factory, run):
    model = network()
    optimizer = _optimizer(model, run)
    scheduler = _schedule(optimizer, run["schedule"])
    checkpoints = [state(model)]
    path = tmp_path_factory.mktemp("sgd") / "run.memory"
    with sl.record(model, optimizer, path, dtype="float64", segment_bytes=2000) as recorder:
        for step, size in enumerate(run["sizes"]):
            optimizer.zero_grad(set_to_none=run["set_to_none"])
            for part in range(run["accumulate"]):
                ids = chosen(100 * step + part, size)
                recorder.batch(example=ids)
                loss = F.cross_entropy(model(X[ids]), Y[ids]) / run["accumulate"]
                (loss * run["loss_scale"]).backward()
            for parameter in model.parameters():
                parameter.grad /= run["loss_scale"]
            if run["clip"] is not None:
                nn.utils.clip_grad_norm_(model.parameters(), run["clip"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            checkpoints.append(state(model))
    memory = assert_exact(path, model)
    assert len(memory) == sum(run["sizes"]) * run["accumulate"]
    for step, checkpoint in enumerate(checkpoints):
        off = distance(memory.as_of(step).primal(model).state_dict(), checkpoint)
        assert off <= EXACT, f"as_of({step}) differs from the checkpoint by {off:.1e}"


@pytest.mark.parametrize("kind", ["", "foreach", "fused"])
def test_momentum_from_before_the_recording_is_accounted_for(tmp_path, kind):
    model = network()
    optimizer = sgd(model, momentum=0.9, dampening=0.2, weight_decay=0.01, **({kind: True} if kind else {}))
    train(model, optimizer, 5)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, range(5, 10), recorder)
    memory = assert_exact(tmp_path / "m", model)
    assert memory.as_of(3).verify().ok


def test_options_may_change_between_steps(tmp_path):
    model = network()
    optimizer = sgd(model)

    def change(step: int) -> None:
        group = optimizer.param_groups[0]
        group["momentum"] = [0.0, 0.9, 0.5, 0.0, 0.9][step % 5]
        group["weight_decay"] = [0.0, 0.1][step % 2]
        group["maximize"] = step == 7
        group["lr"] = torch.tensor(0.05) if step == 3 else 0.1 / (step + 1)

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 12, recorder, before_step=change)
    assert_exact(tmp_path / "m", model)


def test_a_parameter_group_that_does_not_train_stays(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=0.1
    )
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 4, recorder)
    memory = assert_exact(tmp_path / "m", model)
    assert torch.equal(memory.weights("0"), model[0].weight.detach())


@pytest.mark.parametrize("how", ["norm", "value-of-one-layer", "by-hand"])
def test_gradient_clipping_needs_no_help(tmp_path, how):
    model = network()
    optimizer = sgd(model, momentum=0.9)

    def clip(step: int) -> None:
        if how == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif how == "value-of-one-layer":
            nn.utils.clip_grad_norm_(model[0].parameters(), 0.01)
        else:
            for parameter in model.parameters():
                parameter.grad = parameter.grad * -0.37

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 6, recorder, before_step=clip)
    assert_exact(tmp_path / "m", model)


def test_weights_and_biases_clipped_apart_are_exact(tmp_path):
    model = network()
    weights, biases = ([p for n, p in model.named_parameters() if kind in n] for kind in ("weight", "bias"))
    optimizer = torch.optim.SGD([{"params": weights}, {"params": biases, "lr": 0.3}], lr=0.1)

    def clip(step: int) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 0.05)

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 4, recorder, before_step=clip)
    assert_exact(tmp_path / "m", model)


def test_gradients_set_to_zero_before_the_step_leave_no_slots(tmp_path):
    model = network()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.1)

    def drop(step: int) -> None:
        if step % 2:
            optimizer.zero_grad(set_to_none=False)

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 6, recorder, before_step=drop)
    memory = assert_exact(tmp_path / "m", model)
    assert memory.steps == 6
    assert len(memory) == 12


def test_units_that_get_no_error_do_not_hide_the_clipping(tmp_path):
    """γ is found from some of the output units, others at each step: dead ones cannot tell it."""
    model = fill(nn.Sequential(nn.Linear(FEATURES, 200), nn.ReLU(), nn.Linear(200, CLASSES)).double())
    with torch.no_grad():
        model[0].bias[:170] = -100.0
    optimizer = sgd(model)

    def clip(step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        train(model, optimizer, 8, recorder, before_step=clip)
    assert_exact(tmp_path / "m", model)


def test_a_closure_is_recorded_with_the_gradients_it_leaves(tmp_path):
    model = network()
    optimizer = sgd(model, momentum=0.9)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X[:4]), Y[:4])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        for step in range(6):
            recorder.batch(example=torch.arange(4))
            if step % 2:
                model(X[:4]).sum().backward()  # thrown away by the closure
            loss = optimizer.step(closure) if step < 3 else optimizer.step(closure=closure)
            assert loss.item() > 0
    assert len(assert_exact(tmp_path / "m", model)) == 24


@pytest.mark.parametrize("kind", ["", "foreach", "fused"])
def test_loss_scaling_and_the_steps_it_skips_need_no_help(tmp_path, kind):
    model = network(dtype=torch.float32)
    x, y = examples(torch.float32)
    optimizer = sgd(model, **({kind: True} if kind else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64") as recorder:
        for step in range(10):
            recorder.batch(example=torch.arange(4) + 100 * step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[:4]), y[:4])
            scaler.scale(loss * (float("inf") if step in (0, 4, 5) else 1.0)).backward()
            if step == 7:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
    memory = sl.open(tmp_path / "m")
    assert memory.steps == 7
    assert len(memory) == 28
    assert len(memory.where(example=list(range(400, 600)))) == 0, "slots of a skipped step were kept"
    for check in memory.verify(model).values():
        assert check.relative_error < 1e-6
        assert not check.unexplained_steps
        assert not check.moved_steps
