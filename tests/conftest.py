"""What all tests share: no chance in them, and where they find data sets.

`make test` gives the same result every time: hypothesis draws the same examples, and every test starts from the same
seeds. `make fuzz` lets hypothesis explore. Data sets are in `$SPOTLIGHTS_DATA`, or in a folder beside the checkout.
"""

import functools
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext

settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"

if "SPOTLIGHTS_DATA" not in os.environ and BESIDE.is_dir():
    os.environ["SPOTLIGHTS_DATA"] = str(BESIDE)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    import numpy
    import torch  # here, because the process that only hands out files needs neither

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


LONGEST = (
    *("update_rules", "explorer_page", "folded_crashes", "golden", "torture", "explorer_kinds", "explorer_hostile"),
    *("report", "recipes", "buckets", "explorer_guard", "networks_experiments", "crash_safety", "random_loops"),
    *("memory_format", "influence", "layers", "history", "cli"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: each is the work of one process, and none should be left with one at the end.

    pytest-xdist keeps this order with --no-loadscope-reorder.
    """
    names = [f"test_{name}.py" for name in LONGEST]
    items.sort(key=lambda item: names.index(item.path.name) if item.path.name in names else len(names))


@pytest.fixture(scope="module")
def quick_figures() -> Iterator[None]:
    """Figures whose labels do not look for room: half of the time that drawing takes. test_figures.py looks at them."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        yield


@pytest.fixture(scope="module")
def load_once() -> Iterator[None]:
    """The same files need not be unpacked for every run."""
    from spotlights_paper.datasets import load
    from spotlights_paper.experiments import images

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "load", functools.cache(load))
        yield


@pytest.fixture(scope="module")
def browser() -> "Iterator[BrowserContext]":
    """Chromium, for the tests of one file: Playwright allows one of itself in a process, and holds its event loop."""
    from playwright.sync_api import sync_playwright

    paths = map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))
    path = next((path for path in paths if path), None)
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context()
        context.set_default_timeout(120_000)  # a busy machine is no failure
        yield context
        browser.close()
