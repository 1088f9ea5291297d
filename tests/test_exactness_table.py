"""The tables of optimizers and layers say what was measured, and what was measured is still so."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from spotlights.layers import ADAPTERS

DOCS = Path(__file__).parent.parent / "docs"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("exactness", DOCS / "exactness.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exactness = _load()
if not exactness.RESULTS.exists():
    pytest.skip("not measured yet: run `make docs`", allow_module_level=True)
RESULTS = json.loads(exactness.RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", exactness.PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_results(page: Path):
    text = page.read_text(encoding="utf-8")
    table = exactness.tables(RESULTS)[exactness.PAGES[page]]
    assert exactness.with_table(text, table) == text, "run `make docs`"


def test_every_optimizer_and_every_layer_was_measured():
    assert list(RESULTS) == list(exactness.OPTIMIZERS)
    assert all(list(row) == list(exactness.LAYERS) for row in RESULTS.values())
    assert sorted(layer for layers in exactness.SHORT.values() for layer in layers) == sorted(exactness.LAYERS)
    inexact = {(o, layer) for o, row in RESULTS.items() for layer, error in row.items() if error > exactness.EXACT}
    assert not {pair for pair in inexact if pair[0] != "Muon"}


# Some layers, each with some optimizer; all pairs are measured by `make docs`, all layers tested in test_layers.py.
PAIRS = [
    (list(exactness.OPTIMIZERS)[at % (len(exactness.OPTIMIZERS) - 1)], layer)
    for at, layer in enumerate(exactness.LAYERS)
][::3]


@pytest.mark.parametrize(("optimizer", "layer"), [*PAIRS, ("Muon", "Linear")])
def test_some_of_it_measured_again_is_the_same(optimizer: str, layer: str):
    kept = list(ADAPTERS)
    try:
        found = exactness.difference(optimizer, layer, steps=10)
    finally:
        ADAPTERS[:] = kept
    assert (found <= exactness.EXACT) == (RESULTS[optimizer][layer] <= exactness.EXACT)
