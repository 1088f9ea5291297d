"""A memory under torture: kills at any call to the file system, damaged and forged files, failing disks, forks.

    python tests/torture.py --kills 1000 --corruptions 10000 --disks 100 --forks 100

The program ends by itself and fails when a committed step is lost, when damage goes unnoticed, or when anything but a
Spotlights error is raised, hangs or kills a reader.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

import spotlights as sl
from spotlights.memory.format.manifest import signed
from training import CLASSES, FEATURES, chosen, distance, examples, fill, kill_at_call, network, same, sgd, state

STEPS, HANG, ROOM = 12, 60, 2 << 30
"""The steps of a run; seconds after which a reader hangs; bytes that a reader may ask for."""
X, Y = examples()
_write = os.write  # before anybody makes it fail


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return sgd(model, momentum=0.9, weight_decay=0.01)


def _tokens() -> nn.Module:
    return fill(nn.Sequential(nn.Embedding(24, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double())


def _convolution() -> nn.Module:
    layers = nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, CLASSES)
    return fill(nn.Sequential(*layers).double())


@dataclass(frozen=True)
class Kind:
    """A kind of memory: a run that its step numbers determine."""

    options: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = network
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _momentum
    numbers: bool = False
    """The inputs are the numbers of the examples."""

    def inputs(self, ids: torch.Tensor) -> torch.Tensor:
        return ids if self.numbers else X[ids]

    def train(self, path: Path | None, start: int = 0, stop: int = STEPS, **options: Any) -> list[Any]:
        """Trains, unrecorded up to `start`; returns the network, and its weights after each step."""
        model = self.model()
        optimizer, weights = self.optimizer(model), [state(model)]
        self.run(model, optimizer, range(start), None, weights)
        if path is None:
            self.run(model, optimizer, range(start, stop), None, weights)
        else:
            options = {"segment_bytes": 1200, "resume": True, **self.options, **options}
            with sl.record(model, optimizer, path, **options) as recorder:
                assert recorder.step == start, f"resumed at {recorder.step}, not at {start}"
                self.run(model, optimizer, range(start, stop), recorder, weights)
        return [model, *weights]

    def run(self, model: Any, optimizer: Any, steps: range, recorder: Any, weights: list[Any]) -> None:
        for step in steps:
            ids = chosen(step)
            if recorder is not None:
                recorder.batch(example=ids, label=Y[ids], source=["even", "odd"][step % 2])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(self.inputs(ids)), Y[ids]).backward()
            optimizer.step()
            weights.append(state(model))
            if recorder is not None and "fold" in self.options and step % 3 == 2:
                recorder.flush()


KINDS = {
    "float64": Kind(),
    "float16": Kind({"dtype": "float16"}),
    "int8": Kind({"dtype": "int8"}),
    "adam": Kind(optimizer=_adam),
    "keys only": Kind({"errors": False}),
    "sampled": Kind({"sample": 0.5}),
    "folded": Kind({"fold": "example"}),
    "tokens": Kind(model=_tokens, numbers=True),
    "convolution": Kind(model=_convolution, optimizer=sgd),
}


def answers(path: Path, kind: Kind, model: nn.Module) -> list[Any]:
    """What a memory answers to many questions; an error of ours in words."""
    given: list[Any] = []

    def ask(question: Callable[[], Any]) -> Any:
        try:
            answer = question()
        except sl.SpotlightsError as error:
            given.append(f"{type(error).__name__}: {error}")
            return None
        given.append(answer.numpy().tolist() if hasattr(answer, "numpy") else answer)
        return answer

    memory = sl.open(path)
    given += [memory.steps, len(memory), list(memory.layers), sorted(memory.columns)]
    asked = memory.attend(model, kind.inputs(torch.arange(2)))
    for name in memory.layers:
        for column in ("label", "source", "example"):
            ask(lambda name=name, column=column: asked[name].totals(column))
        ask(lambda name=name: [[row["slot"] for row in asked[name].top(3).rows(query)] for query in range(2)])
        ask(lambda name=name: asked[name].contributions(target=1).totals("step"))
        ask(lambda name=name: memory.weights(name))
    ask(lambda: asked[name].influence(target=1).totals("example"))
    ask(lambda: asked.history(target=1).totals("label"))
    ask(lambda: memory.where(source="odd").attend(model, kind.inputs(torch.arange(1)))[name].totals("label"))
    verified = ask(lambda: memory.verify())
    if verified is not None:
        given[-1] = verified.ok, [sentence.split()[0] for sentence in verified.damaged]
    return given


# -- damage -----------------------------------------------------------------------------------------------


def damage(folder: Path, chance: random.Random) -> tuple[str, bool]:
    """Damages one file of a memory; returns what was done, and whether checksums were forged to fit."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    file = chance.choice([*files, *[file for file in files if file.suffix == ".json"] * 2])
    content = bytearray(file.read_bytes())
    ways = ["flip", "noise", "zeros", "cut", "longer", "missing", "folder", "pipe", "dangling", "swapped"]
    way = chance.choice([*ways, *["flip", "forged"] * 6, *["field"] * (8 if file.suffix == ".json" else 0)])
    name = f"{way} {file.relative_to(folder)}"
    file.unlink()  # a reader's copy may share the old file
    header = 8 + int.from_bytes(content[:8], "little") if file.suffix != ".json" else 0
    start = chance.randrange(header if header < len(content) and chance.random() < 0.7 else 0, len(content))
    if way == "flip" or (way == "forged" and file.suffix != ".json"):
        content[start] ^= 1 << chance.randrange(8)
        if way == "forged" and chance.random() < 0.5:
            content[start : start + 8] = chance.choice([b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f"])[
                : len(content) - start
            ]
    elif way in ("noise", "zeros"):
        length = min(len(content) - start, chance.choice([1, 8, 64, 4096]))
        content[start : start + length] = bytes(length) if way == "zeros" else chance.randbytes(length)
    elif way == "cut":
        del content[start:]
    elif way == "longer":
        content += chance.randbytes(chance.choice([1, 8, 4096]))
    elif way == "swapped":
        content = bytearray(chance.choice([other for other in files if other != file]).read_bytes())
    elif way in ("field", "forged"):
        content = bytearray(_nonsense(bytes(content), chance, forged=way == "forged"))
    if way == "folder":
        file.mkdir()
    elif way == "pipe":
        os.mkfifo(file)
    elif way == "dangling":
        file.symlink_to(folder / "nowhere")
    elif way != "missing":
        file.write_bytes(content)
    if way == "forged" and file.suffix != ".json":
        _forge(folder, file)
    return name, way == "forged"


def _nonsense(content: bytes, chance: random.Random, *, forged: bool) -> bytes:
    """A manifest with one field replaced."""
    raw = json.loads(content)
    checksum = raw.pop("checksum", "")
    place: Any = raw
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = chance.choice(keys)
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.1:
            break
        place = inner
    nearby = [inner + 1, inner - 1, inner * 2] if type(inner) is int else []
    others: list[Any] = [None, -1, 0, 10**12, 2**70, "nonsense", "", [], {}, [None], {"a": 1}, True, 0.5, 1e300]
    place[key] = chance.choice([*others, *nearby * 3])
    text = json.dumps(raw, indent=1).removesuffix("\n}").encode()
    return signed(text) if forged else text + f',\n "checksum": "{checksum}"\n}}\n'.encode()


def _forge(folder: Path, file: Path) -> None:
    """Gives the manifest the checksum of a changed file."""
    raw = json.loads((folder / "memory.json").read_bytes())
    raw.pop("checksum")
    fold = raw.get("fold") or {}
    earlier = (fold.get("earlier") or {}).get("segments", [])
    for entry in [raw["initial"], *raw["segments"], *earlier, *([raw["final"]] if raw["final"] else [])]:
        if entry["file"] == str(file.relative_to(folder)):
            entry["checksum"] = xxhash.xxh3_64_hexdigest(file.read_bytes())
    (folder / "memory.json").unlink()
    (folder / "memory.json").write_bytes(signed(json.dumps(raw, indent=1).removesuffix("\n}").encode()))


def corruptions(folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """How so many damaged memories were read. What must not happen is under a name in capitals."""
    wholes = {}
    for name, kind in KINDS.items():
        path = folder / "whole" / name.replace(" ", "-")
        model, *_ = kind.train(path)
        answers(path, kind, model)  # leaves moments
        wholes[name] = (path, model, json.dumps(answers(path, kind, model)))
    outcomes: Counter[str] = Counter()
    done = 0
    while done < count:
        for line in _watched(lambda tell, done=done: _corrupt(wholes, folder, range(done, count), seed, tell)):
            done += 1
            outcomes[line.partition(":")[0]] += 1
            if line.isupper() or line.partition(":")[0].isupper():
                print(f"  {done - 1}: {line}", file=sys.stderr, flush=True)
    return outcomes


def _corrupt(wholes: dict[str, Any], folder: Path, numbers: range, seed: int, tell: Callable[[str], None]) -> None:
    """In a process of its own: one line for each damaged memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in numbers:
        chance = random.Random(f"{seed} {number}")
        name = chance.choice(list(wholes))
        whole, model, right = wholes[name]
        copy = folder / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        what, forged = damage(copy, chance)
        tell(f"{_outcome(copy, KINDS[name], model, right.replace(str(whole), str(copy)), forged)}: {name}: {what}")


def _outcome(path: Path, kind: Kind, model: nn.Module, right: str, forged: bool) -> str:
    try:
        given = answers(path, kind, model)
    except sl.SpotlightsError:
        return "an error of ours"
    except BaseException as error:
        return f"BARE EXCEPTION: {error!r}"
    given, wanted = json.loads(json.dumps(given)), json.loads(right)
    if given == wanted:
        return "harmless"
    if (isinstance(given[-1], str) and "has checksum" in given[-1]) or (
        isinstance(given[-1], list) and not given[-1][0]
    ):
        return "found by verify"
    if any(isinstance(answer, str) and answer not in wanted for answer in given):
        return "an error of ours"
    return "forged, so answered" if forged else "SILENT"


def _watched(work: Callable[[Callable[[str], None]], None]) -> Iterator[str]:
    """The lines that a forked process tells; then, if that one crashed or hung, a line that says so."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            warnings.simplefilter("ignore")
            work(lambda line: _write(writing, line.replace("\n", " ").encode() + b"\n") and None)
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(code)
    os.close(writing)
    hung, rest = False, b""
    while True:
        ready = select.select([reading], [], [], HANG)[0]
        if not ready:
            hung = True
            os.kill(child, signal.SIGKILL)
        some = os.read(reading, 1 << 16)
        if not some:
            break
        *lines, rest = (rest + some).split(b"\n")
        yield from (line.decode() for line in lines)
    os.close(reading)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if hung or ended:
        yield "HANG" if hung else f"CRASH: exit {ended}"


# -- kills ------------------------------------------------------------------------------------------------


def kills(folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Kills processes that record, close, resume, fold, overwrite and copy; what they leave must be whole."""
    chance, outcomes = random.Random(seed), Counter[str]()
    whole = {name: kind.train(None) for name, kind in KINDS.items()}
    while sum(outcomes.values()) < count:
        name = chance.choice(list(KINDS))
        kind, (model, *weights) = KINDS[name], whole[name]
        path = folder / "killed.memory"
        shutil.rmtree(path, ignore_errors=True)
        start = 0
        for _ in range(chance.randrange(1, 5)):
            calls = chance.choice([chance.randrange(1, 12), chance.randrange(1, 60), chance.randrange(40, 140)])
            if not _killed(partial(kind.train, path, start), calls):
                start = STEPS
                break
            outcomes["recording" if not start else "resuming"] += 1
            start = _left(path, kind, weights, start)
        if start < STEPS:
            kind.train(path, start)
        _assert_whole(path, kind, model, f"{name} after kills")
        for job, outcome in ((_overwrite, "overwriting"), (_copy, "copying")):
            calls = chance.randrange(1, 30)
            if _killed(partial(job, path, kind), calls):
                outcomes[outcome] += 1
            if job is _overwrite:
                left = _opened(path)
                assert left is None or not left.view.reader.damaged()
                kind.train(path, resume=False, overwrite=True)
            else:
                sl.open(path).copy(f"{path}.copy", overwrite=True)
                _assert_whole(Path(f"{path}.copy"), kind, model, f"a copy of {name}")
            _assert_whole(path, kind, model, f"{name} after {outcome}")
    return outcomes


def _overwrite(path: Path, kind: Kind) -> None:
    kind.train(path, resume=False, overwrite=True)


def _copy(path: Path, kind: Kind) -> None:
    sl.open(path).copy(f"{path}.copy", overwrite=True)


def _killed(work: Callable[[], object], call: int) -> bool:
    """Whether a forked process was killed at such a call; any other failure of that one is an error."""

    def doomed(tell: object) -> None:
        kill_at_call(call)
        work()

    lines = list(_watched(doomed))
    assert lines in ([], [f"CRASH: exit {-signal.SIGKILL}"]), lines
    return bool(lines)


def _opened(path: Path) -> sl.Memory | None:
    try:
        return sl.open(path)
    except sl.MemoryFormatError:  # not begun, or half deleted
        return None


def _left(path: Path, kind: Kind, weights: list[Any], at_least: int) -> int:
    """After how many steps a killed run can be resumed; everything that is there is right."""
    memory = _opened(path)
    if memory is None:
        assert at_least == 0, "a memory with committed steps does not open any more"
        return 0
    folded = "fold" in kind.options
    assert memory.steps >= (0 if folded else at_least), f"{at_least} steps were committed, {memory.steps} are left"
    assert not memory.view.reader.damaged()
    if not (folded or "sample" in kind.options or "errors" in kind.options):
        assert memory.verify().ok
        if "dtype" not in kind.options:
            made = memory.primal(kind.model()).state_dict()
            trained = {name: made[name] for name in made if "running" not in name and "num_batches" not in name}
            assert distance(trained, {name: weights[memory.steps][name] for name in trained}) < 1e-9
    return max((s.steps for s in memory.view.reader.manifest.snapshots), default=0) if folded else memory.steps


def _assert_whole(path: Path, kind: Kind, model: nn.Module, what: str) -> None:
    """A memory has the same answers as that of a run that nobody disturbed."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder) / "run.memory"
        kind.train(undisturbed)
        wanted, given = answers(undisturbed, kind, model), answers(path, kind, model)
    for right, answer in zip(wanted, given, strict=True):
        if isinstance(right, str):
            right, answer = right.replace(str(undisturbed), ""), str(answer).replace(str(path), "")
        assert _close(right, answer), f"{what}: {answer} instead of {right}"


def _close(a: Any, b: Any) -> bool:
    """Equal; numbers to rounding: a resumed run adds up in blocks of other sizes."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-7 * max(1.0, abs(a)) or a != a
    return a == b


# -- disks and forks --------------------------------------------------------------------------------------


def _fail_from(call: int, names: tuple[str, ...], code: int) -> None:
    """From the n-th of these calls on, this process' disk is full, read-only or broken."""
    calls = 0

    def failing(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= call:
                raise OSError(code, os.strerror(code))
            return original(*args, **kwargs)

        return wrapped

    for name in names:
        setattr(os, name, failing(getattr(os, name)))


_DISKS: dict[str, tuple[tuple[str, ...], int]] = {
    "full": (("writev", "write"), errno.ENOSPC),
    "read-only": (("mkdir", "replace", "unlink", "writev"), errno.EROFS),
    "broken": (("fsync", "replace"), errno.EIO),
    "vanishing": ((), 0),
}


def _train_on_disk(kind: Kind, path: Path, way: str, call: int, end: Any, tell: Callable[[str], None]) -> None:
    if way == "vanishing":
        replace, calls = os.replace, iter(range(1 << 30))
        os.replace = lambda *a, **k: (next(calls) == call // 4 and shutil.rmtree(path), replace(*a, **k))[1]
    else:
        _fail_from(call, *_DISKS[way])
    try:
        model = kind.train(path)[0]
    except sl.StoreError:
        tell("refused")  # at the start, before any training
        return
    tell("trained" if same(state(model), end) else "ANOTHER NETWORK")


def disks(folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Full, read-only, broken and vanishing disks: training ends as without recording, what was committed is right."""
    chance, outcomes = random.Random(seed), Counter[str]()
    whole = {name: kind.train(None) for name, kind in KINDS.items()}
    for number in range(count):
        name, way = chance.choice(list(KINDS)), list(_DISKS)[number % len(_DISKS)]
        kind, weights, path, call = KINDS[name], whole[name][1:], folder / "disk.memory", chance.randrange(1, 40)
        shutil.rmtree(path, ignore_errors=True)

        job = partial(_train_on_disk, kind, path, way, call, weights[-1])
        (line,) = _watched(job)
        assert line in ("trained", "refused"), f"{name}, {way}, call {call}: {line}"
        _left(path, kind, weights, 0)
        outcomes[f"{way}, {line}"] += 1
    return outcomes


def forks(folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Processes forked at any step that go on training, leave the block or just end: the memory is the parent's."""
    chance, outcomes = random.Random(seed), Counter[str]()
    for _ in range(count):
        name, way = chance.choice(list(KINDS)), chance.choice(["trains", "leaves", "ends"])
        kind, path, moment = KINDS[name], folder / "forked.memory", chance.randrange(STEPS)
        shutil.rmtree(path, ignore_errors=True)
        model = kind.model()
        optimizer = kind.optimizer(model)
        with sl.record(model, optimizer, path, segment_bytes=1200, **kind.options) as recorder:
            kind.run(model, optimizer, range(moment), recorder, [])
            assert list(_watched(partial(_go_on, kind, model, optimizer, moment, recorder, way))) == []
            kind.run(model, optimizer, range(moment, STEPS), recorder, [])
        _assert_whole(path, kind, model, f"{name} with a child that {way}")
        outcomes[f"a child that {way}"] += 1
    return outcomes


def _go_on(kind: Kind, model: Any, optimizer: Any, step: int, recorder: Any, way: str, tell: object) -> None:
    if way == "trains":
        kind.run(model, optimizer, range(step, STEPS), recorder, [])
    if way != "ends":
        recorder.__exit__(None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("kills", "corruptions", "disks", "forks"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shared = Path("/dev/shm")
    failed = False
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        for torture in (kills, corruptions, disks, forks):
            count = getattr(options, torture.__name__)
            if count:
                outcomes = torture(Path(folder), count, options.seed)
                print(f"{sum(outcomes.values()):,} {torture.__name__}:", dict(outcomes.most_common()), flush=True)
                failed |= any(name.isupper() for name in outcomes)
    sys.exit(failed)


if __name__ == "__main__":
    main()
