"""Real data sets, where a test needs one."""

import pytest

from spotlights_paper.datasets import DatasetError, catalogue, load, load_text


def need(*names: str) -> None:
    """Skips the test where one of these data sets cannot be had."""
    try:
        for name in names:
            load(name) if name in catalogue.IMAGES else load_text(name)
    except DatasetError as error:
        pytest.skip(str(error))
