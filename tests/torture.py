"""Memories under torture: kills at any call to the file system, damaged and forged files, failing disks, forks.

    python tests/torture.py --kills 1000 --corruptions 10000 --disks 100 --forks 100

The program ends by itself and fails when a committed step is lost, when damage goes unnoticed, or when anything but a
Spotlights error is raised, hangs or kills a reader.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import spotlights as sl
from corruption import corruptions, watched, went
from spotlights.query.forecast import keep_calibration, load_calibration
from spotlights.results import Calibration, write_rows
from tortured import KINDS, STEPS, Kind, answers, observe
from training import count_calls, distance, kill_at_call, same, state

Tell = Callable[[str], object]


# -- kills ------------------------------------------------------------------------------------------------


def kills(folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """Kills processes at any moment of a memory's life; what they leave must be whole.

    A process is killed at one of the calls by which its work changes the file system; which one is drawn after they
    have been counted.
    """
    chance, outcomes = random.Random(seed), Counter[str]()
    path = folder / "killed.memory"
    while sum(outcomes.values()) < count:
        name = chance.choice(list(KINDS))
        kind, (model, *weights) = KINDS[name], _undisturbed(name)[0]
        _clear(folder)
        start = 0
        for _ in range(chance.randrange(1, 5)):
            moment = _killed(partial(_record, path, kind, start), _moment(chance, _calls(name, "record")))
            if not moment:  # a resumed run makes fewer calls
                start = STEPS
                break
            outcomes[moment] += 1
            went(outcomes, 50)
            start = _left(path, kind, weights, start)
        if start < STEPS:
            kind.train(path, start)
        _assert_whole(path, name, model, f"{name} after kills")
        jobs = [_overwrite, _copy, _observe, _keep, *([_recompute, _materialise] if kind.recipe else [])]
        for job in chance.sample(jobs, 2):
            work = job.__name__.strip("_")
            if work == "recompute":
                shutil.rmtree(folder / "cache", ignore_errors=True)
            if moment := _killed(partial(job, path, kind), _moment(chance, _calls(name, work))):
                outcomes[moment] += 1
                went(outcomes, 50)
            if job is _overwrite:
                left = _opened(path)
                assert left is None or not left.view.reader.damaged()
                kind.train(path, resume=False, overwrite=True)
            elif job in (_copy, _materialise):
                job(path, kind)
                plain = Kind(model=kind.model) if job is _materialise else kind
                _assert_whole(Path(f"{path}.copy"), name, model, f"{work} of {name}", plain)
            elif job is _observe:
                left = _opened(Path(f"{path}.copy"))
                assert left is None or not left.view.reader.damaged()
                job(path, kind)
                assert _observed(Path(f"{path}.copy"), name) == _rightly_observed(name)
            elif job is _keep:
                kept = path.parent.joinpath("answers").glob("*.csv")
                assert {file.read_bytes() for file in kept} <= set(_TABLES), "half a table"
                load_calibration(sl.open(path).view.reader)  # or an error says that it is damaged
            _assert_whole(path, name, model, f"{name} after {work}")
    return outcomes


@cache
def _undisturbed(name: str) -> tuple[list[Any], list[Any]]:
    """A run that nobody disturbed: its network with the weights after each step, and the answers of its memory."""
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as folder:
        trained = kind.train(Path(folder) / "run.memory")
        given = answers(kind.open(Path(folder) / "run.memory"), kind, trained[0])
    return trained, [str(each).replace(folder, "") if isinstance(each, str) else each for each in given]


@cache
def _calls(name: str, work: str) -> int:
    """How many calls change the file system when nobody kills the process."""
    kind = KINDS[name]

    def counted(tell: Tell) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.memory"
            if work != "record":
                kind.train(path)
            jobs = {"record": partial(_record, start=0), "overwrite": _overwrite, "copy": _copy}
            counter = count_calls()
            jobs |= {"recompute": _recompute, "materialise": _materialise, "observe": _observe, "keep": _keep}
            jobs[work](path=path, kind=kind)
            tell(str(next(counter)))

    (line,) = watched(counted)
    return int(line)


def _moment(chance: random.Random, calls: int) -> int:
    """The call to be killed at: any; more often one of the first, or of the last, which close the memory."""
    return chance.choice(
        [chance.randrange(1, calls), chance.randrange(1, min(12, calls)), calls - chance.randrange(12)]
    )


def _clear(folder: Path) -> None:
    for left in folder.iterdir():
        shutil.rmtree(left)


def _record(path: Path, kind: Kind, start: int, tell: Tell = lambda line: None) -> None:
    tell("starting" if not start else "resuming")
    kind.train(path, start, begun=lambda: tell("recording"), closing=lambda: tell("closing"))


def _overwrite(path: Path, kind: Kind, tell: Tell = lambda line: None) -> None:
    tell("overwriting")
    kind.train(path, resume=False, overwrite=True)


def _copy(path: Path, kind: Kind, tell: Tell = lambda line: None) -> None:
    tell("copying")
    sl.open(path).copy(f"{path}.copy", overwrite=True)


def _recompute(path: Path, kind: Kind, tell: Tell = lambda line: None) -> None:
    """Asks a recipe for its slots, with an empty cache."""
    tell("recomputing")
    kind.open(path).materialise()


def _materialise(path: Path, kind: Kind, tell: Tell = lambda line: None) -> None:
    tell("materialising")
    kind.open(path).materialise(f"{path}.copy", overwrite=True)


def _observe(path: Path, kind: Kind, tell: Tell = lambda line: None) -> None:
    tell("observing")
    observe(Path(f"{path}.copy"), kind, kind.model())


def _observed(path: Path, name: str) -> list[Any]:
    given = answers(sl.open(path), Kind(model=KINDS[name].model, numbers=KINDS[name].numbers), KINDS[name].model())
    return [each.replace(str(path), "") if isinstance(each, str) else each for each in given]


@cache
def _rightly_observed(name: str) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        _observe(Path(folder) / "run.memory", KINDS[name])
        return _observed(Path(folder) / "run.memory.copy", name)


_TABLES = [b"%s\r\n" % column + b"1\r\n" * 9999 for column in (b"a", b"b")]


def _keep(path: Path, kind: Kind, tell: Tell = lambda line: None) -> None:
    """Writes answers where there are older ones, and a calibration."""
    tell("keeping answers")
    (path.parent / "answers").mkdir(exist_ok=True)
    for number in range(6):
        write_rows([{"ab"[number // 3]: 1}] * 9999, path.parent / "answers" / f"{number % 3}.csv")
    reader = sl.open(path).view.reader
    keep_calibration(Calibration(1.0, 0.5, 0.25, 8, 2, 3, reader.steps), reader)


def _killed(work: Callable[..., object], call: int) -> str:
    """What a forked process was doing when it was killed at such a call; nothing if it came to its end."""

    def doomed(tell: Tell) -> None:
        kill_at_call(call)
        work(tell=tell)

    *told, last = watched(doomed)
    if last == f"CRASH: exit {-signal.SIGKILL}":
        return told[-1]
    assert not last.startswith(("CRASH", "HANG")), last
    return ""


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
    memory = kind.open(path) if memory.steps else memory
    if not (folded or "sample" in kind.options or "errors" in kind.options or (kind.recipe and not memory.steps)):
        assert memory.verify().ok
        if "dtype" not in kind.options:
            made = memory.primal(kind.model()).state_dict()
            trained = {name: made[name] for name in made if "running" not in name and "num_batches" not in name}
            assert distance(trained, {name: weights[memory.steps][name] for name in trained}) < 1e-9
    return max((s.steps for s in sl.open(path).view.reader.manifest.snapshots), default=0) if folded else memory.steps


def _assert_whole(path: Path, name: str, model: Any, what: str, kind: Kind | None = None) -> None:
    """A memory has the same answers as that of a run that nobody disturbed."""
    kind = kind or KINDS[name]
    given = answers(kind.open(path), kind, model)
    for right, answer in zip(_undisturbed(name)[1], given, strict=True):
        if isinstance(right, str):
            right, answer = right.replace("/run.memory", ""), str(answer).replace(str(path), "")
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
    for number in range(count):
        name, way = chance.choice(list(KINDS)), list(_DISKS)[number % len(_DISKS)]
        kind, (_, *weights) = KINDS[name], _undisturbed(name)[0]
        path, call = folder / "disk.memory", chance.randrange(1, 40)
        _clear(folder)
        (line,) = watched(partial(_train_on_disk, kind, path, way, call, weights[-1]))
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
        _clear(folder)
        model = kind.model()
        optimizer = kind.optimizer(model)
        with sl.record(model, optimizer, path, segment_bytes=1200, **kind.options) as recorder:
            kind.run(model, optimizer, range(moment), recorder, [])
            assert list(watched(partial(_go_on, kind, model, optimizer, moment, recorder, way))) == []
            kind.run(model, optimizer, range(moment, STEPS), recorder, [])
        _assert_whole(path, name, model, f"{name} with a child that {way}")
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
                place, start = Path(folder) / torture.__name__, time.monotonic()
                place.mkdir()
                outcomes = torture(place, count, options.seed)
                took = f"in {(time.monotonic() - start) / 60:.1f} minutes:"
                print(f"{sum(outcomes.values()):,} {torture.__name__}", took, dict(outcomes.most_common()), flush=True)
                failed |= any(name.isupper() for name in outcomes)
    sys.exit(failed)


if __name__ == "__main__":
    main()
