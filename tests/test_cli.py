"""Claims about the `spotlights` command, and about a package that imports what it needs when it is needed."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import spotlights as sl
import tables
from demos import small_demo
from spotlights.cli import app
from spotlights.cli.options import print_result, progress_bar
from spotlights.cli.thumbnails import HALF, SIDE, strips
from spotlights.results import write_rows
from spotlights_paper.experiments import demo

COMMANDS = (
    "demo",
    "info",
    "verify",
    "top",
    "totals",
    "history",
    "mask",
    "explore",
    "run",
    "passages",
    "report",
    "reproduce",
    "audit",
    "copy",
    "merge",
    "map",
    "compare",
)


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
    assert not modules & {"torch", "numpy", "matplotlib", "spotlights.api"}


def test_errors_can_be_imported_without_torch():
    assert "torch" not in imported_by("from spotlights import SpotlightsError, __version__")


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
    assert all(layer["exact"] and layer["relative_error"] < layer["tolerance"] for layer in data["layers"].values())


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
    images = small_demo().images  # made before its own loading is replaced
    monkeypatch.setattr(demo, "load_images", lambda name, console: images)
    (tmp_path / "thesis.txt").write_text("years of work")
    result = spotlights("demo", "--out", tmp_path)
    assert result.exit_code == 2
    assert "something other than a demo" in result.stderr


def test_demo_as_json_says_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images = small_demo().images  # made before its own loading is replaced
    monkeypatch.setattr(demo, "load_images", lambda name, console: images)
    result = spotlights("demo", "--steps", 3, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["data"] == "digits"
    assert data["steps"] == 3
    assert data["exact"] is True
    assert all(Path(answer["figure"]).exists() for answer in data["answers"])


# -- questions --------------------------------------------------------------------------------


def first_input() -> int:
    return int(small_demo().images.test.ids[0])


def test_top_shows_the_library_s_examples():
    data = json.loads(spotlights("top", small_demo().settings.out, first_input(), "-k", 4, "--json").stdout)
    attention = small_demo().spotlights(1)["layers.2"]
    said = int(small_demo().network(small_demo().images.test.inputs[:1]).argmax())
    expected = attention.contributions(said).top(4, by="example")
    assert data["asked"]["query"] == f"test:{first_input()}"
    settings = data["asked"]["settings"]
    assert (settings["layer"], settings["measure"], settings["target"]) == ("layers.2", "contribution", str(said))
    assert [row["example"] for row in data["rows"]] == expected.columns["example"][0][0]


def test_top_against_shows_the_other_end():
    run, given = small_demo().settings.out, ("--layer", "layers.0", "--target", 2, "--against", "--slots", "--json")
    data = json.loads(spotlights("top", run, first_input(), *given).stdout)
    expected = small_demo().spotlights(1)["layers.0"].contributions(2).bottom(10)
    assert [row["slot"] for row in data["rows"]] == expected.slots[0, 0].tolist()
    refused = spotlights("top", run, first_input(), "--measure", "score", "--against")
    assert refused.exit_code == 2
    assert "--measure contribution" in refused.stderr


def test_totals_are_the_library_s():
    run = small_demo().settings.out
    data = json.loads(spotlights("totals", run, first_input(), "--measure", "score", "--json").stdout)
    expected = small_demo().spotlights(1)["layers.2"].totals("label")
    assert [row["total score"] for row in data["rows"]] == pytest.approx(expected.values[0].tolist())


def test_history_is_the_library_s(tmp_path: Path):
    run, picture = small_demo().settings.out, tmp_path / "history.png"
    given = ("--target", "3-8", "--by", "label", "-k", 2, "--plot", picture, "--json")
    data = json.loads(spotlights("history", run, first_input(), *given).stdout)
    expected = small_demo().spotlights(1).history("3-8")
    assert data["exact"] is False  # the demo stores keys and errors as float16
    assert data["error"] < 1e-5
    assert data["account"]["answer"] == pytest.approx(float(expected.answer[0]))
    terms = sum(value for name, value in data["account"].items() if name != "answer")
    assert terms == pytest.approx(data["account"]["answer"], rel=1e-4)
    assert [row["total history"] for row in data["totals"]] == pytest.approx(
        expected.totals("label").values[0].tolist()
    )
    assert [row["example"] for row in data["for"]] == expected.top(2).columns["example"][0][0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = spotlights("history", run, first_input())
    assert shown.stdout.count("not a forecast") == 1  # several tables have this note
    assert "digit" in shown.stdout or "label" in shown.stdout
    top = json.loads(spotlights("top", run, first_input(), "--measure", "history", "--target", 3, "--json").stdout)
    assert top["rows"][0]["example"] == small_demo().spotlights(1).history(3).top(1).columns["example"][0][0][0]
    assert "7-9" in spotlights("history", run, first_input(), "--target", "x").stderr


def test_warnings_are_shown_as_messages(monkeypatch):
    found = small_demo()
    real = sl.Memory.without

    def without(*arguments, **columns):
        warnings.warn("Half of it cancels.", sl.SpotlightsWarning, stacklevel=2)
        return real(*arguments, **columns)

    monkeypatch.setattr(sl.Memory, "without", without)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = spotlights("mask", found.settings.out, first_input(), "label=1")
    assert shown.exit_code == 0
    assert "Half of it cancels." in shown.stderr.splitlines()
    assert "SpotlightsWarning" not in shown.stderr


def test_mask_shows_both_answers():
    found = small_demo()
    data = json.loads(spotlights("mask", found.settings.out, first_input(), "label=1,2; step=0-9", "--json").stdout)
    masked = found.memory.without(label=[1, 2]).without(step=range(9)).primal(found.network, layers=["layers.2"])
    expected = masked(found.images.test.inputs[:1])[0]
    assert [output["logit"] for output in data["without"]["outputs"]] == pytest.approx(expected.tolist(), rel=1e-4)
    shown = spotlights("mask", found.settings.out, first_input(), "label=1").stdout
    assert "without these" in shown
    assert "left out in layers.2" in shown
    assert "all layers" in spotlights("mask", found.settings.out, first_input(), "label=1", "--layers", "all").stdout


# -- tables as files --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "arrow", "parquet"])
@pytest.mark.parametrize(
    "given",
    [
        ("top", "-k", 4, "--measure", "score"),
        ("totals",),
        ("totals", "--by", "step", "--bins", 3),
        ("mask", "label=1"),
        ("history",),
    ],
)
def test_a_table_has_the_rows_of_the_answer(given: tuple, kind: str, tmp_path: Path):
    command, *others = given
    file = tmp_path / f"answer.{kind}"
    pandas = pytest.importorskip("pandas")
    if kind != "csv":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'spotlights[arrow]'")
    result = spotlights(command, small_demo().settings.out, first_input(), *others, "--table", file, "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    if command == "mask":
        before, after = (answer[name]["outputs"] for name in ("with", "without"))
        rows = [
            {"output": a["name"], "with": a["logit"], "without": b["logit"]} for a, b in zip(before, after, strict=True)
        ]
    else:
        rows = answer["totals"] if command == "history" else answer["rows"]
    read = {"csv": pandas.read_csv, "arrow": pandas.read_feather, "parquet": pandas.read_parquet}[kind](file)
    assert len(rows) == len(read) > 0
    for name in rows[0]:
        values = [row[name] for row in rows]
        same = pytest.approx(values) if isinstance(values[0], float) else values
        assert [type(values[0])(value) for value in read[name].tolist()] == same


def test_a_merged_and_an_audited_table_are_written_too(tmp_path: Path):
    run, part, table = small_demo().settings.out, tmp_path / "part", tmp_path / "answer.csv"
    refused = spotlights("top", run, first_input(), "--shard", "1/1", "--out", part, "--table", table)
    assert (refused.exit_code, table.exists()) == (2, False)
    assert "spotlights merge" in refused.stderr
    assert spotlights("top", run, first_input(), "--shard", "1/1", "--out", part).exit_code == 0
    assert spotlights("merge", part, "--table", table).exit_code == 0
    assert table.read_text(encoding="utf-8").count("\n") == 11
    assert spotlights("audit", run, "--out", tmp_path / "audit", "--table", table).exit_code == 0
    assert table.read_text(encoding="utf-8") == (tmp_path / "audit" / "audit.csv").read_text(encoding="utf-8")


def test_a_table_of_another_kind_is_refused_before_anything_is_scanned(tmp_path: Path):
    result = spotlights("top", tmp_path / "no.memory", 1, "--table", tmp_path / "answer.xlsx")
    assert result.exit_code == 2
    assert ".csv, .arrow or .parquet" in " ".join(result.stderr.split())


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = spotlights("top", tmp_path / "no.memory", 1, "--table", tmp_path / "answer.arrow")
    assert result.exit_code == 2
    assert "pip install 'spotlights[arrow]'" in " ".join(result.stderr.split())


def test_cells_begin_no_formula_and_columns_have_one_type(tmp_path: Path):
    rows = [{"label": "=cmd()", "value": -1.5}, {"label": 3, "value": None, "more": "+x"}]
    file = write_rows(rows, tmp_path / "a.csv")
    assert file.read_text(encoding="utf-8").splitlines() == ["label,value,more", "'=cmd(),-1.5,", "3,,'+x"]
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'spotlights[arrow]'")
    from pyarrow import feather

    read = feather.read_table(write_rows(rows, tmp_path / "a.arrow")).to_pydict()
    assert read == {"label": ["=cmd()", "3"], "value": [-1.5, None], "more": [None, "+x"]}
    assert feather.read_table(write_rows([], tmp_path / "none.arrow")).num_rows == 0


def test_the_name_of_a_query_is_printed_as_it_is_and_a_path_in_one_line(capsys: pytest.CaptureFixture[str]):
    """To rich, `:100:` is a picture of a hundred points."""
    print_result("test:100: the network says 7", Path("a/" * 100))
    assert capsys.readouterr().out == f"test:100: the network says 7\n{Path('a/' * 100)}\n"


# -- pictures in the terminal -----------------------------------------------------------------


def in_a_terminal(*arguments: object, **environment: str) -> str:
    """What a command prints where rich takes the output for a terminal of 120 columns."""
    given = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color", "COLUMNS": "120", **environment}
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env=given).stdout


def test_top_shows_its_examples_where_the_terminal_can():
    given = ("top", small_demo().settings.out, first_input(), "-k", 3)
    shown = in_a_terminal(*given)
    assert "the input" in shown
    rows = [line for line in shown.splitlines() if HALF in line]
    assert len(rows) == SIDE // 2
    assert rows[0].count(HALF) == 4 * SIDE  # the input and three examples
    image = small_demo().images.test.inputs[0].reshape(8, 8)
    corner = round(float(255 * (image[0, 0] - image.min()) / (image.max() - image.min())))
    assert f"38;2;{corner};{corner};{corner};48;2;{corner};{corner};{corner}m{HALF}" in rows[0]
    assert HALF not in spotlights(*given).stdout
    assert HALF not in in_a_terminal(*given, COLORTERM="")
    assert HALF not in in_a_terminal(*given, NO_COLOR="1")
    assert HALF not in in_a_terminal(*given, "--json")
    assert HALF not in in_a_terminal("totals", small_demo().settings.out, first_input())


def test_pictures_of_any_shape_fit_a_cell(here: Path):
    looks = {0: torch.zeros(3, 40, 20), 1: torch.ones(5, 31), 2: "a text"}
    subject = sl.Subject(tables.trained()[0], tables.trained()[1], tables.rows(2, seed=2)[0], show=looks.__getitem__)
    shown = strips(subject, None, [0, 1], 60)
    assert shown is not None
    lines = str(shown).splitlines()
    assert [line.count(HALF) for line in lines] == [24, 24, *[8] * 6, 0]
    assert lines[-1].split() == ["example", "0", "example", "1"]
    assert strips(subject, None, [2], 60) is None


@pytest.mark.parametrize("command", ["top", "totals", "explore"])
def test_a_folder_without_a_run_is_one_sentence(command: str, tmp_path: Path):
    given = () if command == "explore" else (1,)
    result = spotlights(command, tmp_path, *given)
    assert result.exit_code == 2
    assert "There is no memory at" in result.stderr


# -- any memory -------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file that has subjects."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_subjects.py").write_text(tables.SOURCE)
    yield tmp_path
    sys.modules.pop("my_subjects", None)


def own(*arguments: object, name: str = "subject", memory: Path | None = None):
    path = tables.trained()[0] if memory is None else memory
    command, *others = arguments
    return spotlights(command, path, *others, "--subject", f"my_subjects.py:{name}")


def test_every_command_takes_a_user_s_own_memory(here: Path):
    found = {}
    for command, *given in (
        ("info",),
        ("verify",),
        ("top", 4),
        ("totals", 4),
        ("mask", 4, "label=1"),
        ("audit", "-k", 5, "--out", here / "audit"),
    ):
        result = own(command, *given)
        assert result.exit_code == 0, result.output
        found[command] = result.stdout
    assert "12 inputs, ids 0 to 11" in found["info"]
    assert "the model" in found["verify"]
    assert "test:4: the network says versicolor" in found["top"]
    assert "virginica" in found["mask"]
    page = (here / "audit" / "audit.html").read_text(encoding="utf-8")
    assert "row: 10" in page
    assert "2: virginica" in page
    assert "give the subject text=" in own("passages", "--prompt", "x").stderr


def test_the_answers_are_the_library_s(here: Path):
    path, model = tables.trained()
    inputs = tables.rows(12, seed=2)[0][3:4]
    view = sl.open(path).where(label=1, step=range(30)).without(example=5)
    said = int(model(inputs).argmax())
    expected = view.attend(model, inputs)["2"].contributions(said).top(3, by="example")
    result = own("top", 3, "-k", 3, "--where", "label=1 step=0-30", "--without", "example=5", "--json")
    assert [row["example"] for row in json.loads(result.stdout)["rows"]] == expected.columns["example"][0][0]
    masked = sl.open(path).without(label=1, step=range(30)).without(example=[5, 6]).primal(model, layers=["2"])
    result = own("mask", 3, "label=1 step=0-30; example=5,6", "--layers", "2", "--json")
    logits = [output["logit"] for output in json.loads(result.stdout)["without"]["outputs"]]
    assert logits == pytest.approx(masked(inputs)[0].tolist(), rel=1e-4)


def test_a_memory_without_examples_labels_and_classes_makes_sense(here: Path):
    path, model = tables.regression()
    value = model(tables.rows(12, seed=2)[0][1:2]).item()
    result = own("top", 1, "-k", 2, name="number", memory=path)
    assert f"the network says {value:.4g}" in result.stdout
    assert "top slots by contribution" in result.stdout
    assert "total contribution by step" in own("totals", 1, name="number", memory=path).stdout
    assert own("mask", 1, "step=0-10", name="number", memory=path).exit_code == 0
    assert "recorder.batch(example=ids)" in own("audit", name="number", memory=path).stderr


def test_the_working_directory_s_settings_name_the_subject(here: Path):
    (here / "spotlights.toml").write_text('subject = "my_subjects:subject"')
    assert spotlights("top", tables.trained()[0], 4).exit_code == 0
    (here / "spotlights.toml").write_text("subject = 3")
    assert 'subject = "FILE.py:NAME"' in spotlights("top", tables.trained()[0], 4).stderr


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no users here")
def test_settings_that_another_user_left_where_all_may_write_are_not_run(here: Path, monkeypatch: pytest.MonkeyPatch):
    (here / "evil.py").write_text("raise SystemExit('executed')")
    (here / "spotlights.toml").write_text('subject = "evil.py:subject"')
    mode, user = here.stat().st_mode, os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    here.chmod(0o777)
    try:
        result = spotlights("top", tables.trained()[0], 4)
    finally:
        here.chmod(mode)
    assert result.exit_code == 2
    assert "executed" not in result.output
    assert "belongs to another user" in " ".join(result.stderr.split())


def test_nothing_inside_a_memory_is_executed(here: Path, tmp_path_factory: pytest.TempPathFactory):
    memory = Path(shutil.copytree(tables.trained()[0], tmp_path_factory.mktemp("foreign") / "run.memory"))
    for folder in (memory, memory.parent):
        (folder / "evil.py").write_text("raise SystemExit('executed')")
        (folder / "spotlights.toml").write_text('subject = "evil.py:subject"')
    result = spotlights("top", memory, 4)
    assert result.exit_code == 2
    assert "executed" not in result.output
    assert "--subject my_subject.py:subject" in result.stderr


def test_without_a_subject_the_error_shows_what_to_write(here: Path):
    path = tables.trained()[0]
    said = spotlights("top", path, 4).stderr
    code = "\n".join(line[4:] for line in said.splitlines() if line.startswith("    "))
    code = code.replace("from train import ...", "from tables import network as Net; x_test = y_test = x_train = None")
    space: dict = {}
    exec(code, space)
    assert isinstance(space["sl"].Subject, type)
    assert 'sl.Subject("' in said


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("top", 99), "The ids are 0 to 11"),
        (("top", "train:500"), "The ids in the memory are 0 to 89"),
        (("top", 4, "--target", 9), "outputs 0 to 2"),
        (("mask", 4, "label:1"), "write column=value"),
        (("mask", 4, "label=9"), "The column has: 0, 1, 2"),
        (("mask", 4, "example=500"), "The column has 0 to 89"),
        (("mask", 4, "colour=1"), "It has: step, example, label"),
    ],
)
def test_a_mistake_says_what_there_is(here: Path, given: tuple, sentence: str):
    result = own(*given)
    assert result.exit_code == 2
    assert sentence in result.stderr


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("my_subjects.py:nothing", "Its subjects: subject, untrained"),
        ("my_subjects.py:not_a_subject", "is a int, not an sl.Subject"),
        ("my_subjects.py:untrained", "not the network that"),
        ("elsewhere.py:subject", "there is no file elsewhere.py"),
        ("no_such_module:subject", "No module named 'no_such_module'"),
        ("my_subjects.py", "write FILE.py:NAME"),
        ("broken.py:subject", "RuntimeError: no data"),
    ],
)
def test_a_wrong_subject_is_explained(here: Path, named: str, sentence: str):
    (here / "broken.py").write_text("raise RuntimeError('no data')")
    result = spotlights("top", tables.trained()[0], 4, "--subject", named)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_the_reference_page_is_what_the_commands_say():
    docs = Path(__file__).parent.parent / "docs"
    sys.path.insert(0, str(docs))
    import cli_reference

    assert (docs / "cli.md").read_text(encoding="utf-8") == cli_reference.reference(), "run: make docs"


def test_progress_is_a_line_for_each_tenth_where_nobody_watches(capsys: pytest.CaptureFixture[str]):
    with progress_bar("Working") as told:
        for share in (0.05, 0.1, 0.15, 0.5, 1.0):
            told(share)
    assert capsys.readouterr().err.splitlines() == ["Working: 10 %", "Working: 50 %", "Working: 100 %"]
