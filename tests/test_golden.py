"""Golden answers: what the library answered at the commit that wrote them; a change of an answer must be on purpose.

Where it is on purpose: `python tests/golden/answers.py --write`, and say in the commit which answers changed and why.
"""

import itertools
import json
import math
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import spotlights as sl
from spotlights.query.engine import Engine, Threads

sys.path.insert(0, str(Path(__file__).parent / "golden"))  # as for the script that writes them

from answers import STORED, SUBJECTS

SHOWN = 20
SUMS = ("sum", "weighted", "squares")

Difference = tuple[str, Any, Any]


def differences(stored: Any, found: Any, tolerance: float, path: str) -> Iterator[Difference]:
    """Where two answers differ by more than rounding: the path of the answer, what was stored and what was found."""
    if isinstance(stored, dict) and isinstance(found, dict):
        if stored.keys() != found.keys():
            yield path, sorted(stored), sorted(found)
        elif "largest" in stored:
            yield from _numbers(stored, found, tolerance, path)
        elif "top" in stored and isinstance(stored["top"], list):
            yield from _lists(stored, found, tolerance, path)
        else:
            for name, held in stored.items():
                yield from differences(held, found[name], tolerance, f"{path} › {name}")
    elif stored != found:
        yield path, stored, found


def _numbers(stored: dict[str, Any], found: dict[str, Any], tolerance: float, path: str) -> Iterator[Difference]:
    """Numbers may be off by the tolerance, relative to the largest one of their tensor."""
    if stored["shape"] != found["shape"]:
        yield f"{path} › shape", stored["shape"], found["shape"]
        return
    size, count = stored["largest"], math.prod(stored["shape"])
    allowed = tolerance * size
    for place, (one, other) in enumerate(zip(stored["first"], found["first"], strict=True)):
        if not abs(one - other) <= allowed:
            yield f"{path} › {place}", one, other
    scales = {"sum": 1.0, "weighted": 1.0, "squares": 2 * size}
    for name in SUMS:
        if name in stored and not abs(stored[name] - found[name]) <= allowed * math.sqrt(count) * scales[name]:
            yield f"{path} › {name}", stored[name], found[name]
    if not abs(size - found["largest"]) <= allowed:
        yield f"{path} › largest", size, found["largest"]


def _lists(stored: dict[str, Any], found: dict[str, Any], tolerance: float, path: str) -> Iterator[Difference]:
    """Lists in the order of their values; slots whose values are as good as equal may change places."""
    if {**stored, "top": len(stored["top"])} != {**found, "top": len(found["top"])}:
        yield path, stored, found
        return
    for query, (mine, theirs) in enumerate(zip(stored["top"], found["top"], strict=True)):
        here = f"{path} › query {query}"
        values, others = mine["values"], theirs["values"]
        if len(values) != len(others) or mine["is"].keys() != theirs["is"].keys():
            yield here, mine, theirs
            continue
        allowed = tolerance * max(map(abs, values), default=0.0)
        ranks = mine["is"].get("rank", range(1, len(values) + 1))
        for name in ("values", "errors"):
            size = max(map(abs, mine.get(name, [])), default=0.0)
            for rank, (one, other) in enumerate(zip(mine.get(name, []), theirs.get(name, []), strict=True)):
                if not abs(one - other) <= tolerance * size:
                    yield f"{here} › {name} › {rank}", one, other
        for start, stop in _apart(values, ranks, 2 * allowed):
            one, other = (_who(each["is"], start, stop) for each in (mine, theirs))
            if one != other:
                yield f"{here} › rows {start} to {stop - 1}", one, other


def _apart(values: list[float], ranks: Sequence[int], least: float) -> Iterator[tuple[int, int]]:
    """Stretches of rows whose values are apart from those before and after; each rank 1 begins a list of its own."""
    starts = [place for place, rank in enumerate(ranks) if rank == 1]
    for start, stop in itertools.pairwise([*starts, len(values)]):
        cuts = [place for place in range(start + 1, stop) if abs(values[place] - values[place - 1]) > least]
        yield from itertools.pairwise([start, *cuts])  # not the last stretch: what would have come next is not known


def _who(columns: dict[str, list[Any]], start: int, stop: int) -> list[str]:
    """The rows of a stretch, in an order that does not depend on their values."""
    names = [name for name in columns if name != "rank"]
    rows = zip(*(columns[name][start:stop] for name in names), strict=True)
    return sorted(json.dumps(dict(zip(names, row, strict=True)), sort_keys=True) for row in rows)


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Elsewhere(Engine):
    """Pickles each plan and runs it from the pickle on a freshly opened memory, as another machine would."""

    open: Any
    opened: dict[str, Any] = field(default_factory=dict)

    def run(self, plans: Sequence[Any], reader: Any) -> list[Any]:
        fresh = self.opened.get(reader.address) or self.open(reader.address).view.reader
        self.opened[reader.address] = fresh
        unpickled = [pickle.loads(pickle.dumps(plan)) for plan in plans]
        return pickle.loads(pickle.dumps(Threads().run(unpickled, fresh)))


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_plan_of_these_questions_runs_from_its_pickle(
    name: str, stored: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    here = sl.open
    monkeypatch.setattr(sl, "open", lambda path: here(path).on(Elsewhere(here)))
    test_answers_are_those_that_were_stored(name, stored, tmp_path)


@pytest.mark.parametrize("name", SUBJECTS)
def test_answers_are_those_that_were_stored(name: str, stored: dict[str, Any], tmp_path: Path):
    subject = SUBJECTS[name]
    if subject.missing:
        pytest.skip(f"this torch has no {subject.needs}")
    found = json.loads(json.dumps(subject.answers(tmp_path)))
    wrong = list(differences(stored[name], found, subject.tolerance, name))
    shown = "\n".join(f"{path}\n    stored: {one}\n    found:  {other}" for path, one, other in wrong[:SHOWN])
    assert not wrong, f"{len(wrong)} answers differ by more than {subject.tolerance:g}:\n{shown}"


def test_every_stored_answer_is_asked_for(stored: dict[str, Any]):
    assert stored.keys() == SUBJECTS.keys()
