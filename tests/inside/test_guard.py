"""An error in any hook stops recording with one warning. Training goes on, bit for bit."""

import copy
import warnings

import pytest
import torch
from torch import nn

import spotlights as sl
from spotlights.recording.hooks import BackwardPass
from spotlights.recording.layer import RecordedLayer
from training import examples, network, sgd

X, Y = examples()
PLACES = {
    "a backward pass begins": (RecordedLayer, "before_pass"),
    "a tensor has its gradient": (BackwardPass, "note"),
    "a backward pass ends": (RecordedLayer, "encode"),
    "an optimizer is about to step": (RecordedLayer, "take"),
    "an optimizer has stepped": (RecordedLayer, "settle"),
}


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("place", PLACES)
def test_an_error_where_nobody_expects_one_stops_recording_and_nothing_else(place, tmp_path, monkeypatch):
    model = network()
    plain = copy.deepcopy(model)
    wanted = _train(plain, sgd(plain))
    optimizer = sgd(model)
    owner, name = PLACES[place]
    original, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("nobody foresaw this")
        return original(*args, **kwargs)

    after = []
    with warnings.catch_warnings(record=True) as said, sl.record(model, optimizer, tmp_path / "m") as recorder:
        warnings.simplefilter("always")
        optimizer.register_step_pre_hook(lambda *args: after.append("about to"))
        optimizer.register_step_post_hook(lambda *args: after.append("has"))
        monkeypatch.setattr(owner, name, failing)
        losses = _train(model, optimizer)
        recorder.flush()
    assert [warning.category for warning in said] == [sl.RecordingStoppedWarning]
    assert "nobody foresaw this" in str(said[0].message)
    assert losses == wanted
    assert after == ["about to", "has"] * 4, "hooks of others still run"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    monkeypatch.undo()
    assert sl.open(tmp_path / "m").status.startswith("stopped: RuntimeError in a hook")
