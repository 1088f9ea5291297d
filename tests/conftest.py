"""Where the tests find data sets: `$SPOTLIGHTS_DATA`, or else a data folder beside the checkout."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"

if "SPOTLIGHTS_DATA" not in os.environ and BESIDE.is_dir():
    os.environ["SPOTLIGHTS_DATA"] = str(BESIDE)


@pytest.fixture(scope="module")
def quick_figures() -> Iterator[None]:
    """Figures whose labels do not look for room: half of the time that drawing takes. test_figures.py looks at them."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        yield
