"""What an installed wheel holds: `pip install 'spotlights[explore]'` is all that the explorer needs."""

from importlib.resources import files
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def in_the_wheel() -> set[str]:
    """The files of the wheel, as its builder lists them; nothing is built, nothing is fetched."""
    return {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}


def test_every_part_of_the_page_is_in_the_wheel(in_the_wheel: set[str]):
    parts = [path for path in (ROOT / "src/spotlights/web/static").iterdir() if path.is_file()]
    assert {part.suffix for part in parts} == {".html", ".css", ".js", ".svg"}
    assert {f"spotlights/web/static/{part.name}" for part in parts} <= in_the_wheel


def test_every_module_is_in_the_wheel_and_no_test_is(in_the_wheel: set[str]):
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/spotlights").rglob("*.py")}
    assert modules <= in_the_wheel
    assert {name.partition("/")[0] for name in in_the_wheel} == {"spotlights"}


def test_the_installed_plotly_brings_the_script_that_the_page_loads():
    assert (files("plotly") / "package_data" / "plotly.min.js").is_file()
