"""Real data sets, where a test needs one."""

import pytest

from spotlights.datasets import load
from spotlights.errors import DatasetError


def need(*names: str) -> None:
    """Skips the test where one of these data sets cannot be had."""
    try:
        for name in names:
            load(name, "test")
    except DatasetError as error:
        pytest.skip(str(error))
