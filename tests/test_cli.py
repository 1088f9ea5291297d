"""Claims about the `spotlights` command, and about a package that imports what it needs when it is needed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import spotlights as sl
from demos import small_demo
from spotlights.cli import app
from spotlights.experiments import demo

COMMANDS = ("demo", "info", "verify", "top", "totals", "mask", "explore", "run", "passages", "report", "reproduce")


def spotlights(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def imported_by(code: str) -> set[str]:
    """The modules that a fresh Python has after running some code."""
    code += "\nimport sys; print('\\n' + ' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


# -- importing --------------------------------------------------------------------------------


def test_help_does_not_import_torch():
    code = "from spotlights.cli import app\ntry: app(['--help'])\nexcept SystemExit: pass"
    modules = imported_by(code)
    assert "typer" in modules
    assert not modules & {"torch", "numpy", "matplotlib", "spotlights.opened"}


def test_errors_can_be_imported_without_torch():
    assert "torch" not in imported_by("from spotlights import SpotlightsError, __version__")


def test_every_public_name_is_found_when_first_used():
    code = "import spotlights as sl\nfor name in dir(sl): getattr(sl, name)\nsl.datasets.load; sl.open"
    assert "torch" in imported_by(code)
    assert set(sl.__all__) <= set(dir(sl))
    assert sl.open is sl.open


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'recrod'"):
        sl.recrod  # noqa: B018


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "spotlights", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == sl.__version__


# -- commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(command: str):
    result = spotlights(command, "--help")
    assert result.exit_code == 0
    assert f"Example:  spotlights {command}" in result.output
    assert "--json" in result.output


def test_help_lists_every_command():
    result = spotlights("--help")
    for command in COMMANDS:
        assert command in result.output


def test_version_is_the_package_s():
    assert spotlights("--version").output.strip() == sl.__version__


def test_info_says_what_a_memory_holds():
    result = spotlights("info", small_demo().outcome.memory)
    assert result.exit_code == 0
    assert "layers.2" in result.output
    assert "40 steps of SGD" in result.output


def test_info_as_json_says_the_same():
    data = json.loads(spotlights("info", small_demo().outcome.memory, "--json").stdout)
    assert data == json.loads(json.dumps(small_demo().memory.info.as_dict()))


def test_verify_of_an_exact_memory_exits_with_0():
    result = spotlights("verify", small_demo().outcome.memory)
    assert result.exit_code == 0
    assert "does the memory equal the network?" in result.stdout


def test_verify_as_json_has_a_check_for_each_layer():
    data = json.loads(spotlights("verify", small_demo().outcome.memory, "--json").stdout)
    assert data["exact"] is True
    assert list(data["layers"]) == ["layers.0", "layers.1", "layers.2"]
    assert all(layer["exact"] and layer["relative_error"] < 1e-5 for layer in data["layers"].values())


def test_verify_of_a_damaged_memory_exits_with_1_and_names_the_file(tmp_path: Path):
    damaged = Path(shutil.copytree(small_demo().outcome.memory, tmp_path / "damaged.memory"))
    segment = sorted((damaged / "segments").iterdir())[0]
    content = bytearray(segment.read_bytes())
    content[-40] ^= 0x40
    segment.write_bytes(content)
    result = spotlights("verify", damaged, "--json")
    assert result.exit_code == 1
    assert segment.name in " ".join(json.loads(result.stdout)["damaged"])


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_missing_memory_is_one_sentence_and_exit_code_2(command: str, tmp_path: Path):
    result = spotlights(command, tmp_path / "nothing.memory")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "There is no memory at" in result.stderr


def test_demo_refuses_a_folder_of_others_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "load_images", lambda name, console: small_demo().images)
    (tmp_path / "thesis.txt").write_text("years of work")
    result = spotlights("demo", "--out", tmp_path)
    assert result.exit_code == 2
    assert "something else than a demo" in result.stderr


def test_demo_as_json_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "load_images", lambda name, console: small_demo().images)
    result = spotlights("demo", "--steps", 3, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["data"] == "digits"
    assert data["steps"] == 3
    assert data["exact"] is True
    assert all(Path(answer["figure"]).exists() for answer in data["answers"])


# -- questions --------------------------------------------------------------------------------


def first_input() -> int:
    return int(small_demo().images.dataset.test.ids[0])


def test_top_shows_the_library_s_examples():
    data = json.loads(spotlights("top", small_demo().settings.out, first_input(), "-k", 4, "--json").stdout)
    attention = small_demo().spotlights(1)["layers.2"]
    said = int(small_demo().network(small_demo().images.test[:1]).argmax())
    expected = attention.contributions(said).top(4, by="example")
    assert [row["example"] for row in data] == expected.columns["example"][0][0]


def test_top_against_shows_the_other_end():
    run, given = small_demo().settings.out, ("--layer", "layers.0", "--target", 2, "--against", "--slots", "--json")
    data = json.loads(spotlights("top", run, first_input(), *given).stdout)
    expected = small_demo().spotlights(1)["layers.0"].contributions(2).bottom(10)
    assert [row["slot"] for row in data] == expected.slots[0, 0].tolist()
    refused = spotlights("top", run, first_input(), "--measure", "score", "--against")
    assert refused.exit_code == 2
    assert "--measure contribution" in refused.stderr


def test_totals_are_the_library_s():
    run = small_demo().settings.out
    data = json.loads(spotlights("totals", run, first_input(), "--measure", "score", "--json").stdout)
    expected = small_demo().spotlights(1)["layers.2"].totals("label")
    assert [row["total score"] for row in data] == pytest.approx(expected.values[0].tolist())


def test_mask_shows_both_answers():
    found = small_demo()
    data = json.loads(spotlights("mask", found.settings.out, first_input(), "label:1,2;steps:0-9", "--json").stdout)
    masked = found.memory.without(label=[1, 2]).without(step=range(9)).primal(found.network)
    expected = masked(found.images.test[:1])[0]
    assert [output["logit"] for output in data["without"]["outputs"]] == pytest.approx(expected.tolist(), rel=1e-4)
    assert "without these" in spotlights("mask", found.settings.out, first_input(), "label:1").stdout


@pytest.mark.parametrize("command", ["top", "totals", "explore"])
def test_a_folder_without_a_run_is_one_sentence(command: str, tmp_path: Path):
    given = () if command == "explore" else (1,)
    result = spotlights(command, tmp_path, *given)
    assert result.exit_code == 2
    assert "There is no run and no memory at" in result.stderr


def test_the_reference_page_is_what_the_commands_say():
    docs = Path(__file__).parent.parent / "docs"
    sys.path.insert(0, str(docs))
    import cli_reference

    assert (docs / "cli.md").read_text(encoding="utf-8") == cli_reference.reference(), "run: make docs"
