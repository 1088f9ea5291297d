"""Any network in any loop: `verify` is exact, or log and answer say why not. There is no third outcome.

Hypothesis puts together a network, an optimizer, and what happens around the steps. `make fuzz` draws 2,000 of them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, example, given, settings
from random_loops import LOOPS, Loop, Training
from random_networks import Network
from runs import NotRecording, Run, assert_adds_up, assert_honest, listening, same_weights
from torch import nn

import spotlights as sl

EXPLORING = os.environ.get("HYPOTHESIS_PROFILE") == "explore"


def network(loop: Loop) -> Network:
    torch.manual_seed(loop.seed)
    model = Network(loop)
    return model.double() if loop.float64 else model


def recorded(loop: Loop, path: Path) -> Run:
    """The run of a loop; asserts that training is bit for bit what it is without recording."""
    training = Training(loop, network(loop))
    with listening() as heard:
        options = {"dtype": loop.dtype, "segment_bytes": loop.segment_bytes}
        with sl.record(training.model, training.recorded, path, **options) as recorder:
            training.run(recorder)
    plain = Training(loop, network(loop))
    plain.run(NotRecording())
    same_weights(training.model, plain.model)
    return Run(training.model, path, heard)


def assert_no_third_outcome(loop: Loop, done: Run) -> None:
    assert "mistake of ours" not in done.heard, done.heard
    memory, model = done.memory, done.model
    taken = loop.steps - sum(step < loop.steps for event, step in loop.events.items() if event == "a skipped step")
    if "has stopped" in done.heard:
        return
    assert memory.steps == taken, "steps are missing, and nobody was told"
    refused = None
    try:
        assert_honest(done)
        told = loop.dtype or done.heard.warnings or "At step" in done.heard
        assert told or memory.verify(model).ok, "verify says NO, and nothing was said during training"
        if not (loop.every_token or "replace the head" in loop.events):
            assert_answer_adds_up(loop, memory, model)
    except sl.SpotlightsError as error:
        refused = str(error)
    announced = refused is None or "rule" in refused or "verify" in done.heard
    assert announced, f"refused, and not announced: {refused}"


def assert_answer_adds_up(loop: Loop, memory: sl.Memory, model: nn.Module) -> None:
    texts = Training(loop, model).texts[:2]
    with listening():
        spot = memory.attend(model, texts)
        logits = spot.output[0] if loop.returns_a_tuple else spot.output
        assert_adds_up(spot["head"].contributions(target=1), logits[:, 1])


FOUND = (  # earlier
    Loop([], {}, "RMSprop", steps=1, float64=True, dtype="float16", seed=2),
    Loop([("attention", ""), ("attention", ""), ("RNN, sequence first", "residual")], {}, "Adam", steps=1),
    Loop([("before a batch norm", ""), ("LoRA", ""), ("before a batch norm", "")], {}, "Adamax", steps=1, seed=97),
    Loop([("batch norm", ""), ("attention", "")], {}, "Adam with L2", float64=True, steps=5, seed=16),
    Loop([], {"replace the head": 1}, tied=True, every_token=True, float64=True),
    Loop([], {"replace the head": 2}, "Adafactor", steps=3),
    Loop([], {"replace the head": 0, "a skipped step": 0}, steps=1),
    Loop([("linear", "residual"), ("twice", ""), ("twice", "")], {}, steps=1, padding=True, dtype="float16", seed=7),
    Loop([], {"thaw a layer": 0, "replace the head": 0}, second_optimizer="SGD", steps=1, tied=True, every_token=True),
    Loop([("layer norm", ""), ("batch norm", "")], {"clip the norm": 0}, "RMSprop", steps=1, every_token=True),
    Loop([("RMS norm", ""), ("batch norm", "")], {}, "RMSprop", steps=1, every_token=True, seed=16),
    Loop([("batch norm", "")] * 3, {"autocast": 0}, "RMSprop", described="nothing", steps=1, float64=True),
)


@settings(max_examples=200 if EXPLORING else 25, suppress_health_check=list(HealthCheck))
@given(loop=LOOPS)
@example(FOUND[0])
@example(FOUND[1])
@example(FOUND[2])
@example(FOUND[3])
@example(FOUND[4])
@example(FOUND[5])
@example(FOUND[6])
@example(FOUND[7])
@example(FOUND[8])
@example(FOUND[9])
@example(FOUND[10])
@example(FOUND[11])
def test_verify_is_exact_or_says_why_not(loop):
    with tempfile.TemporaryDirectory() as folder:
        assert_no_third_outcome(loop, recorded(loop, Path(folder) / "run.memory"))
