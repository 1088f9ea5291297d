"""The tables of optimizers and layers are those that were measured, and some pairs measured again agree with them."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spotlights.layers import ADAPTERS

DOCS = Path(__file__).parent.parent / "docs"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exactness", DOCS / "exactness.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if not hasattr(torch.optim, "Muon"):
    pytest.skip("this torch has no Muon, which the tables have", allow_module_level=True)
exactness = _load()
if not exactness.RESULTS.exists():
    pytest.skip("not measured yet: run `make tables`", allow_module_level=True)
RESULTS = json.loads(exactness.RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", exactness.PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_results(page: Path):
    text = page.read_text(encoding="utf-8")
    table = exactness.tables(RESULTS)[exactness.PAGES[page]]
    assert exactness.with_table(text, table) == text, "run `make tables`"


def test_every_optimizer_and_every_layer_was_measured():
    assert list(RESULTS) == list(exactness.OPTIMIZERS)
    assert all(list(row) == list(exactness.LAYERS) for row in RESULTS.values())
    inexact = {(o, layer) for o, row in RESULTS.items() for layer, error in row.items() if error > exactness.EXACT}
    assert not {pair for pair in inexact if pair[0] != "Muon"}


# Some layers, each with some optimizer. `make tables` measures all pairs; test_layers.py tests all layers.
PAIRS = [
    (list(exactness.OPTIMIZERS)[at % (len(exactness.OPTIMIZERS) - 1)], layer)
    for at, layer in enumerate(exactness.LAYERS)
][::3]


@pytest.mark.parametrize(("optimizer", "layer"), [*PAIRS, ("Muon", "Linear")])
def test_some_pairs_measured_again_agree_with_the_table(optimizer: str, layer: str):
    kept = list(ADAPTERS)
    try:
        difference = exactness.difference(optimizer, layer, steps=10)
    finally:
        ADAPTERS[:] = kept
    assert (difference <= exactness.EXACT) == (RESULTS[optimizer][layer] <= exactness.EXACT)
