"""The public surface: what is exported exists, is documented, and importing it loads only what it needs."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import spotlights as sl
from spotlights import errors
from spotlights.results import Passages, Suspects, Top, Totals

PROMISED = {
    "record", "open", "Memory", "Attention", "Recorder", "DualLinear", "dot_attention", "__version__",
    "LayerAdapter", "register_layer",
}  # fmt: skip
MEMORY = {
    "layers", "verify", "attend", "where", "without", "as_of", "weights", "dual", "columns", "steps", "info",
    "suspects",
}  # fmt: skip
ATTENTION = {"scores", "top", "totals", "contributions", "influence", "passages", "plot"}


def test_everything_in_all_exists_and_is_sorted():
    assert sorted(sl.__all__) == list(sl.__all__), "keep __all__ in order"
    assert len(set(sl.__all__)) == len(sl.__all__)
    for name in sl.__all__:
        assert getattr(sl, name) is not None


def test_everything_promised_is_there():
    assert PROMISED <= set(sl.__all__) <= set(dir(sl))
    assert sl.open is sl.open, "found once"
    for kind, names in ((sl.Memory, MEMORY), (sl.Attention, ATTENTION)):
        assert {name for name in names if not hasattr(kind, name)} == set()
    for kind in (Top, Totals):
        assert all(hasattr(kind, name) for name in ("numpy", "to_pandas", "plot", "rows"))
    assert all(hasattr(sl.Contributions, name) for name in ("top", "bottom", "totals", "numpy"))


def test_every_error_is_public_and_under_one_root():
    ours = {
        name
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    assert ours == {name for name in sl.__all__ if name.endswith(("Error", "Warning"))}
    for name in ours:
        root = sl.SpotlightsWarning if name.endswith("Warning") else sl.SpotlightsError
        assert issubclass(getattr(sl, name), root)
        assert name in str(errors.__doc__), "draw it in the tree at the top of errors.py"


def test_everything_else_that_can_be_seen_is_private_or_a_module():
    seen = {name for name in dir(sl) if not name.startswith("_")}
    modules = {name for name in seen if inspect.ismodule(getattr(sl, name))}
    assert seen - modules <= set(sl.__all__)


def public(kind: type) -> list[tuple[str, object]]:
    return [(name, member) for name, member in vars(kind).items() if not name.startswith("_")]


@pytest.mark.parametrize("name", [name for name in sl.__all__ if not name.startswith("_")])
def test_every_public_class_and_function_has_a_docstring(name: str):
    thing = getattr(sl, name)
    assert inspect.getdoc(thing), f"{name} has no docstring"


@pytest.mark.parametrize(
    "kind",
    [
        sl.Memory,
        sl.Attention,
        sl.Recorder,
        sl.Spotlights,
        sl.Contributions,
        sl.Influence,
        Passages,
        Suspects,
        Top,
        Totals,
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_public_method_has_a_docstring(kind: type):
    own = {"values", "path", "forward", "table", "name"}  # plain, or an override that says nothing new
    undocumented = [
        name
        for name, member in public(kind)
        if name not in own
        and (inspect.isfunction(member) or isinstance(member, property))
        and not (member.__doc__ or inspect.getdoc(getattr(kind, name)))
    ]
    assert undocumented == []


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="colour"):
        sl.colour  # noqa: B018


def test_importing_spotlights_imports_only_what_it_stands_on():
    script = (
        "import sys, json, spotlights as sl\n"
        "[getattr(sl, name) for name in sl.__all__]\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "torch" in loaded
    assert loaded & {"matplotlib", "pandas", "sklearn", "typer", "rich", "beartype"} == set()


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    assert version("spotlights") == sl.__version__


def test_a_class_name_means_one_concept():
    places: dict[str, list[str]] = {}
    for file in sorted(Path(sl.__file__).parents[1].glob("spotlights*/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and file.parent.name != "integrations":  # one callback for each library
                places.setdefault(node.name, []).append(f"{file.name}:{node.lineno}")
    assert len(places) > 200
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
