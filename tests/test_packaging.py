"""What an installed wheel holds: `pip install 'spotlights[explore]'` is all that the explorer needs."""

import re
import tomllib
from importlib.metadata import distributions, requires
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def in_the_wheel() -> set[str]:
    """The files of the wheel, as its builder lists them; nothing is built, nothing is fetched."""
    return {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}


def test_every_part_of_the_page_is_in_the_wheel(in_the_wheel: set[str]):
    parts = [path for path in (ROOT / "src/spotlights/explorer/static").iterdir() if path.is_file()]
    assert {part.suffix for part in parts} == {".html", ".css", ".js", ".svg"}
    assert {f"spotlights/explorer/static/{part.name}" for part in parts} <= in_the_wheel


def test_every_module_is_in_the_wheel_and_no_test_is(in_the_wheel: set[str]):
    modules = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert modules <= in_the_wheel
    assert {name.partition("/")[0] for name in in_the_wheel} == {"spotlights", "spotlights_paper"}


def test_every_package_that_the_checks_install_is_pinned_to_a_version_that_pyproject_allows():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)  # a version, no address
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = ("figures", "tables", "demo", "explore", "cloud", "test", "docs", "lint")
    wanted = [
        Requirement(text) for text in [*project["dependencies"], *(line for name in names for line in extras[name])]
    ]
    wanted = [requirement for requirement in wanted if requirement.name != "spotlights"]
    assert all("<" in str(requirement.specifier) for requirement in wanted if requirement.name != "furo")  # by date
    seen = set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if requirement.extras | {name} <= seen:
            continue
        seen |= {name, *requirement.extras}
        assert name in pins, f"{name} is not pinned: make pins"
        assert requirement.specifier.contains(pins[name], prereleases=True), f"{requirement}: {pins[name]} is pinned"
        installed = {each.version.partition("+")[0] for each in distributions(name=name)}
        if installed != {pins[name]}:
            continue  # `make test` alone has no ruff and no sphinx; what another version needs says nothing
        for further in map(Requirement, requires(name) or ()):
            chosen = [{"extra": extra} for extra in requirement.extras or {""}]
            if further.marker is None or any(further.marker.evaluate(extra) for extra in chosen):
                wanted.append(further)
