"""Where the tests find data sets: `$SPOTLIGHTS_DATA`, or else a data folder beside the checkout."""

import os
from pathlib import Path

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"

if "SPOTLIGHTS_DATA" not in os.environ and BESIDE.is_dir():
    os.environ["SPOTLIGHTS_DATA"] = str(BESIDE)
