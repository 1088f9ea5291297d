"""`make torture` in short: a few kills, damaged files, failing disks and forks of every way there is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torture import corruptions, disks, forks, kills
from training import elsewhere


def _quietly(torture: Callable[..., Any], folder: Path, count: int) -> Any:
    warnings.simplefilter("ignore")  # stopped recordings warn, as they should
    return torture(folder, count)


@pytest.mark.parametrize(("torture", "count"), [(kills, 8), (corruptions, 40), (disks, 8), (forks, 4)])
def test_a_memory_survives_torture(tmp_path, torture, count):
    outcomes = elsewhere(_quietly, torture, tmp_path, count)
    assert sum(outcomes.values()) >= count
    assert not [outcome for outcome in outcomes if outcome.isupper()], outcomes
