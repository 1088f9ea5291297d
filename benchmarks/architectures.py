"""The table of architectures: what recording gives for networks as users write them. Writes docs/architectures.md.

    python benchmarks/architectures.py                       all of them, about ten minutes on one core
    python benchmarks/architectures.py --only ViT "U-Net"    some of them, printed and not written
    python benchmarks/architectures.py --keep rows.json      the same in parts: rows that are there are not made again

Each architecture (`zoo/`) is trained for some steps in a process of its own, with a limit of time, first without and
then with recording; three of them have the size that people train. An architecture that fails, fails in its own row:
every cell says what came out or why nothing did. Networks of Hugging Face need the extra "architectures"; without it
they are listed as not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tied_tokens
import torch
from zoo import ARCHITECTURES, FULL_SIZE, Setup

import spotlights as sl

for _file in ("vision", "text", "hugging_face", "others", "full_size"):
    import_module(f"zoo.{_file}")  # registers its architectures

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architectures.md"
STEPS, STEPS_OF_FULL_SIZE = 8, 3
LIMIT = 60
"""Seconds for a tiny architecture; one of full size may take five times as long."""
OF_THE_CHANGE = 1e-4
COLUMNS = {
    "trained": "trained numbers",
    "recorded": "recorded",
    "verify": "of the change",
    "sum": "initial + Σ = output",
    "suspects": "suspects",
    "influence": "influence",
    "bytes": "bytes per example",
}
TIMED = {**COLUMNS, "ratio": "step time", "verified": "verify"}
VERSIONS = ("torch", "transformers", "peft")
HEAD = f"""# Architectures

What recording gives for networks as users write them. Made by `python benchmarks/architectures.py`: random data,
float32, one thread, VERSIONS_HERE.

- *recorded*: the share of the trained numbers that belong to layers with slots. "By gradient": of these, the share in
  parameters that no kind of layer knows (class tokens, gates, the factors of a weight norm). Such a parameter
  has one slot for each step, its gradient, which belongs to no example: sums are whole, and no example is named.
- *of the change*: the largest part of a layer's change that the slots miss; {OF_THE_CHANGE:.0e} is rounding. Where
  it is more, `verify` says why: see below the tables.
- *initial + Σ = output*: the difference for one test input, in the layer that answers, and what the result says.
- *suspects*, *influence*, *verify*: the processor's seconds for the first answer.
- *step time*: the processor's time of the quickest recorded step over that of the quickest plain one, of a few, with
  the seconds of the plain one. What is written after the last step is left out. `benchmarks/networks.py` measures the
  cost of recording with care.
- *bytes per example*: what is written for each step and example, nearly all of it keys and errors. `keep="recipe"`
  stores none of these and computes them again when a question is asked ([recipes](recipes.md)); `dtype="float16"`
  halves, `sample=0.1` keeps a tenth ([smaller recordings](recording.md#make-it-smaller)).
"""
TINY = f"""## Of every kind

Tiny networks, {STEPS} steps. A layer costs some tenths of a millisecond for each step whatever its size, so that their
step times say nothing.
"""
TIED = """## Tied weights of 50,257 tokens

`python benchmarks/tied_tokens.py`: a weight that the embedding and the output layer of a small GPT share, in float32.
The bytes of a token are those of the arithmetic: an error for each token of the vocabulary and a key in the output
layer, an error and a token number in the embedding. The error of a token is `softmax(logits) − one-hot` under the usual
loss: it has as many numbers as there are tokens, and none of them is zero.
"""
LARGE = f"""## Of full size

The same for {STEPS_OF_FULL_SIZE} steps of networks of the size that people train. Keys and errors grow with the rows:
each pixel, each token is one.
"""


class Cells:
    """The row of one architecture; each cell is printed once it is known, so that a time limit leaves the others."""

    def fill(self, cell: str, make: Callable[[], str]) -> None:
        try:
            text = make()
        except Exception as error:  # the table's purpose is to show these
            text = _sentence(error)
        self.print(cell, text)

    def print(self, cell: str, text: str) -> None:
        print(json.dumps({cell: text}), flush=True)


def _sentence(error: BaseException, length: int = 110) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= length else text[: length - 1] + "…"


def measure(name: str) -> None:
    """Prints the cells of one architecture."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cells = Cells()
    try:
        setup = (ARCHITECTURES | FULL_SIZE)[name]()
    except ImportError as error:
        cells.print("trained", f"not installed: {error.name}")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memory"
        steps = STEPS_OF_FULL_SIZE if name in FULL_SIZE else STEPS
        plain = [_timed(setup, None) for _ in range(steps)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            recorded: list[float] = []
            try:
                _record(setup, path, recorded, steps)
            except Exception as error:  # what a user's script would have ended with
                cells.print("recorded", f"{'TRAINING ENDED by' if recorded else 'REFUSED:'} {_sentence(error)}")
                return
        print(json.dumps({"said": [str(w.message) for w in caught if issubclass(w.category, sl.SpotlightsWarning)]}))
        cells.fill("ratio", lambda: f"{min(recorded) / min(plain):.2f} ({min(plain):.2g} s)")
        stored = sum(file.stat().st_size for file in (path / "segments").rglob("*"))
        cells.fill("bytes", lambda: f"{stored / (steps * setup.batch_size):,.0f}")
        _ask(setup, sl.open(path), cells)


def _record(setup: Setup, path: Path, seconds: list[float], steps: int) -> None:
    """Trains with recording, and notes the seconds of each step."""
    with sl.record(setup.model, setup.optimizer, path) as recorder:  # type: ignore[arg-type]
        for _ in range(steps):
            seconds.append(0.0)
            seconds[-1] = _timed(setup, recorder)


def _timed(setup: Setup, recorder: sl.Recorder | None) -> float:
    ids = torch.randperm(setup.examples)[: setup.batch_size]
    start = time.process_time()
    if recorder is not None:
        recorder.batch(**setup.columns(ids))
    setup.step(ids)
    return time.process_time() - start


def _ask(setup: Setup, memory: sl.Memory, cells: Cells) -> None:
    cells.fill("trained", lambda: f"{memory.info.as_dict()['trained parameters']:,}")
    cells.fill("recorded", lambda: _recorded(memory, setup))
    start = time.process_time()
    cells.fill("verify", lambda: _verified(memory, setup))
    cells.fill("verified", lambda: f"{time.process_time() - start:.1f} s")
    cells.fill("sum", lambda: _sum(memory, setup))
    cells.fill("suspects", lambda: _suspects(memory, setup))
    cells.fill("influence", lambda: _influence(memory, setup))


def _recorded(memory: sl.Memory, setup: Setup) -> str:
    info = memory.info.as_dict()
    empty = [name for name, layer in memory.layers.items() if not layer.slots and layer.trained]
    modules = dict(setup.model.named_modules())
    without = sum(p.numel() for name in empty if name in modules for p in modules[name].parameters(recurse=False))
    claimed = info["recorded parameters"]
    # Layers without slots that do not count as recorded are in the list of those that are not.
    covered = claimed if any(name.rsplit(".", 1)[0] in empty for name in info["not recorded"]) else claimed - without
    share = 1000 * covered // max(info["trained parameters"], 1) / 10
    names = info["not recorded"]
    notes = [f"without slots: {_some(empty)}"] if empty else []
    notes += [f"not: {_some(list(names))}"] if names else []
    single = sum(layer.out_features for layer in memory.layers.values() if layer.kind == "parameter" and layer.trained)
    if single:
        notes.append(f"{100 * single / max(info['trained parameters'], 1):.2g} % by gradient")
    return f"{share:g} %" + (f" ({'; '.join(notes)})" if notes else "")


def _some(names: list[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _verified(memory: sl.Memory, setup: Setup) -> str:
    verified = memory.verify(setup.model)
    trained = {name: check for name, check in verified.items() if memory.layers[name].trained}
    if not trained:
        return "no trained layer is recorded"
    missing = {name: check for name, check in trained.items() if check.change_error > OF_THE_CHANGE}
    for name, check in list(missing.items())[:1]:
        print(json.dumps({"reason": f"`{name}`: {(check.reasons or ['NO REASON'])[0]}"}), flush=True)
    worst = f"{max(check.change_error for check in trained.values()):.0e}"
    return f"{worst} ({len(missing)} of {len(trained)} layers: see below)" if missing else worst


def _sum(memory: sl.Memory, setup: Setup) -> str:
    if setup.answers not in memory.layers:
        return "no layer of its own: recorded by the factors of its weight"
    spot = memory.attend(setup.model, setup.inputs)
    attention = spot[setup.answers]
    parts: Any = (
        attention.whole().contributions(setup.target) if len(attention) > 1 else attention.contributions(setup.target)
    )
    number = setup.target(spot.output).detach().double()
    made = parts.initial + parts.total()
    rounding = getattr(parts, "rounding", None)
    made = made if rounding is None else made + rounding
    note = "exact" if parts.exact else (parts.note or "no note").partition(" (")[0]
    return f"{float((made - number).abs().max()):.0e}, {note}"


def _suspects(memory: sl.Memory, setup: Setup) -> str:
    start = time.process_time()
    suspects = memory.suspects(5)
    took = time.process_time() - start
    return f"{took:.1f} s" + ("" if suspects.layer == setup.answers else f", by {suspects.layer}")


def _influence(memory: sl.Memory, setup: Setup) -> str:
    start = time.process_time()
    memory.attend(setup.model, setup.inputs).influence(setup.target).top(3)
    return f"{time.process_time() - start:.1f} s"


def row_of(name: str, limit: float) -> dict[str, Any]:
    """Runs one architecture in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    cells: dict[str, Any] = {}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
        output, failure = done.stdout, done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired as expired:
        output, failure = (expired.stdout or b"").decode(), [f"stopped after {limit:g} s"]
    for line in output.splitlines():
        if line.startswith("{"):
            cells |= json.loads(line)
    if failure:
        first_empty = next((cell for cell in COLUMNS if cell not in cells), "bytes")
        cells[first_empty] = failure[0][:110]
    return cells


def table(rows: dict[str, dict[str, Any]], columns: dict[str, str]) -> str:
    """The rows as a table in Markdown."""
    lines = ["| architecture | " + " | ".join(columns.values()) + " |", "| --- |" + " --- |" * len(columns)]
    for name, cells in rows.items():
        texts = [str(cells.get(cell, "–")).replace("|", "\\|") for cell in columns]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def reasons(rows: dict[str, dict[str, Any]]) -> str:
    """What `verify` says of the first layer whose change is not met, and what recording said."""
    lines = ["In the words of `verify`, for the first such layer:", ""]
    lines += [f"- {name}, {cells['reason']}." for name, cells in rows.items() if "reason" in cells]
    lines += ["", "What was said while recording:", ""]
    lines += [f"- {name}: {text}" for name, cells in rows.items() for text in cells.get("said", ())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", metavar="NAME", help=f"some of: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a tiny architecture")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where rows are kept, to go on later")
    settings = parser.parse_args()
    if settings.one:
        measure(settings.one)
        return
    rows: dict[str, dict[str, Any]] = {}
    if settings.keep is not None and settings.keep.exists():
        rows = json.loads(settings.keep.read_text())
    for name in settings.only or ARCHITECTURES | FULL_SIZE:
        if name in rows:
            continue
        start = time.perf_counter()
        rows[name] = row_of(name, settings.limit * (5 if name in FULL_SIZE else 1))
        took = time.perf_counter() - start
        print(f"{name}: {rows[name]} ({took:.0f} s)", file=sys.stderr, flush=True)
        if settings.keep is not None:
            settings.keep.write_text(json.dumps(rows, indent=1))
    page = page_of(rows)
    print(page)
    if not settings.only:
        PAGE.write_text(page)


def page_of(rows: dict[str, dict[str, Any]]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in VERSIONS)
    tiny = table({name: rows[name] for name in ARCHITECTURES if name in rows}, COLUMNS)
    large = table({name: rows[name] for name in FULL_SIZE if name in rows}, TIMED)
    head = HEAD.replace("VERSIONS_HERE", versions)
    parts = (
        head,
        LARGE,
        large,
        "",
        TINY,
        tiny,
        "",
        TIED,
        tied_tokens.table(),
        "",
        "## What is missing",
        "",
        reasons(rows),
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
