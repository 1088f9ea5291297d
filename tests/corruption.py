"""Damaged and forged files: what a reader makes of them, one damaged copy of a whole memory at a time."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import xxhash
from safetensors.torch import load
from torch import nn

import spotlights as sl
from spotlights.memory.format.manifest import signed
from spotlights.memory.format.recipe import RECIPE
from spotlights.memory.format.tensors import lay_out
from spotlights.memory.store import Cache
from spotlights.query.parts import checksum_of_part
from test_processes import in_all
from test_processes import run as run_in_processes
from tortured import KINDS, STEPS, Kind, X, answers, ask, calibrate, observe

HANG, ROOM = 60, 2 << 30
"""Seconds after which a reader hangs; bytes that a reader may ask for."""
WEIRD: list[Any] = [None, -1, 0, 1, 10**12, 2**70, "nonsense", "", [], {}, [None], {"a": 1}, True, 0.5, 1e300, -5e9]
NUMBERS = {
    "f": [0.0, -1.0, np.nan, np.inf, -np.inf, 1e300, 1e-300],
    "i": [0, 1, -1, 7, 2**31, 2**62, -(2**63)],
}
_write = os.write  # before anybody makes it fail


# -- what is damaged --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole:
    """A folder that is whole, and how it is read."""

    folder: Path
    damaged: str
    """The part of the folder whose files are damaged."""
    read: Callable[[Path], list[Any]]
    """The answers that a copy of the folder gives."""


def wholes(folder: Path) -> dict[str, Whole]:
    """One of each kind: memories, caches, and parts of answers."""
    made: dict[str, Whole] = {}
    for name, kind in KINDS.items():
        place = folder / name.replace(" ", "-")
        steps = STEPS if kind.size > 4 else STEPS // 2
        model, *_ = kind.train(place / "run.memory", stop=steps, segment_bytes=2500 if kind.size == 4 else 20_000)
        made[name] = Whole(place, "run.memory", lambda copy, kind=kind, model=model: _read(copy, kind, model))
        made[name].read(place)  # leaves moments
        if not kind.recipe:
            continue
        cached = Path(shutil.copytree(place, f"{place}-cached"))
        made[f"cache of a {name}"] = Whole(cached, "cache", made[name].read)
        shutil.rmtree(place / "cache")
        full = folder / f"{name}-full".replace(" ", "-")
        kind.open(place / "run.memory").materialise(full / "run.memory")
        shutil.rmtree(place / "cache", ignore_errors=True)
        plain = Kind(model=kind.model)
        made[f"materialised {name}"] = Whole(
            full, "run.memory", lambda copy, kind=plain, model=model: _read(copy, kind, model)
        )
    place = folder / "processes"
    place.mkdir()
    in_all(_rank, place)
    model = KINDS["float64"].model()
    made["processes"] = Whole(place, "run.memory", lambda copy: _read(copy, KINDS["float64"], model))
    place, kind = folder / "calibrated", KINDS["float64"]
    trained, *_ = kind.train(place / "run.memory", stop=STEPS // 2)
    calibrate(place / "run.memory", kind, trained)
    made["calibrated"] = Whole(
        place, "run.memory", lambda copy, model=trained: _forecast(copy, KINDS["float64"], model)
    )
    place = folder / "observed"
    observe(place / "run.memory", kind, trained)
    made["observed"] = Whole(place, "run.memory", lambda copy, model=trained: _read(copy, KINDS["float64"], model))
    place = folder / "parts"
    KINDS["float64"].train(place / "run.memory", stop=STEPS // 2, segment_bytes=2500)
    (place / "parts").mkdir()
    for number in (1, 2, 3):
        shard = sl.Shard(number, 3)
        _questions(sl.open(place / "run.memory").on(shard), [])
        shard.save(place / "parts" / f"part{number}", about={"a": [1, None, "b"]})
    made["parts"] = Whole(place, "parts", _merged)
    place = folder / "bucket-cache"
    cache = Cache(place / "cache")
    for key in _KEYS:
        cache.put(key, [key.encode() * 99])
    made["cache of a bucket"] = Whole(place, "cache", _cached)
    return made


def _rank(rank: int, folder: Path) -> None:
    model = nn.parallel.DistributedDataParallel(KINDS["float64"].model())
    run_in_processes(model, [rank], folder / "run.memory", "adam")


def _read(folder: Path, kind: Kind, model: nn.Module) -> list[Any]:
    memory, given = kind.open(folder / "run.memory"), []
    other = kind.model()
    rewound = ask(given, lambda: memory.rewind(other, kind.optimizer(other), without="example=5"))
    if rewound is not None:
        given[-1] = rewound.as_dict()
    return [*given, *answers(memory, kind, model)]


def _forecast(folder: Path, kind: Kind, model: nn.Module) -> list[Any]:
    given: list[Any] = []
    asked = sl.open(folder / "run.memory").attend(model, X[:2])
    ask(given, lambda: asked.forecast(1, without={"label": 1}).after)
    return [*given, *_read(folder, kind, model)]


def _questions(memory: sl.Memory, given: list[Any]) -> list[Any]:
    model = KINDS["float64"].model()
    spot = memory.attend(model, X[:2])["2"]
    ask(given, lambda: spot.totals("label"))
    ask(given, lambda: [[row["slot"] for row in spot.top(3).rows(query)] for query in range(2)])
    ask(given, lambda: spot.contributions(target=1).totals("source"))
    return given


def _merged(folder: Path) -> list[Any]:
    merged = sl.Merged(sorted((folder / "parts").iterdir()))
    return [*_questions(sl.open(folder / "run.memory").on(merged), [merged.about]), None]


_KEYS = [f"s3://bucket/run.memory/segments/{number} 0-99" for number in range(5)]


def _cached(folder: Path) -> list[Any]:
    """A range that the cache does not have is read from the bucket: as good as if the cache had it."""
    cache, given = Cache(folder / "cache"), []
    for key in _KEYS:
        content = key.encode() * 99
        found = cache.get(key, len(content))
        given.append((content if found is None else found.tobytes()).decode("latin1"))
    return [*given, None]


# -- damage -----------------------------------------------------------------------------------------------


def damage(folder: Path, chance: random.Random) -> tuple[str, bool]:
    """Damages one file; returns what was done, and whether the file's checksums were forged to fit."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    file = chance.choice([*files, *[file for file in files if file.suffix == ".json"] * 2])
    content = bytearray(file.read_bytes())
    is_json, is_tensors = file.suffix == ".json", file.suffix != ".bytes" and file.suffix != ".json"
    ways = ["flip", "noise", "zeros", "cut", "longer", "missing", "folder", "pipe", "dangling", "swapped"]
    way = chance.choice([*ways, *["flip"] * 6, *["forged"] * (9 if file.suffix != ".bytes" else 0)])
    name = f"{way} {file.relative_to(folder)}"
    forged = way == "forged"
    file.unlink()  # a reader's copy may share the old file
    header = 8 + int.from_bytes(content[:8], "little") if is_tensors else 0
    start = chance.randrange(header if header < len(content) and chance.random() < 0.7 else 0, len(content))
    if forged and is_json:
        content = bytearray(_manifest(bytes(content), chance))
    elif forged:
        name += ": " + _forge_tensors(content, start, chance)
    elif way == "flip":
        content[start] ^= 1 << chance.randrange(8)
    elif way in ("noise", "zeros"):
        length = min(len(content) - start, chance.choice([1, 8, 64, 4096]))
        content[start : start + length] = bytes(length) if way == "zeros" else chance.randbytes(length)
    elif way == "cut":
        del content[start:]
    elif way == "longer":
        content += chance.randbytes(chance.choice([1, 8, 4096]))
    elif way == "swapped" and len(files) > 1:
        content = bytearray(chance.choice([other for other in files if other != file]).read_bytes())
    if way == "folder":
        file.mkdir()
    elif way == "pipe":
        os.mkfifo(file)
    elif way == "dangling":
        file.symlink_to(folder / "nowhere")
    elif way != "missing":
        file.write_bytes(content)
    if forged and is_tensors:
        _forge_checksums(folder, file)
    return name, forged


def _manifest(content: bytes, chance: random.Random) -> bytes:
    """A manifest with fields replaced; some of the time, its checksum fits."""
    raw = json.loads(content)
    checksum = raw.pop("checksum", "")
    for _ in range(chance.choice([1, 1, 2, 3])):
        nonsense(raw, chance)
    text = json.dumps(raw, indent=1).removesuffix("\n}").encode()
    return signed(text) if chance.random() < 0.8 else text + f',\n "checksum": "{checksum}"\n}}\n'.encode()


def nonsense(place: Any, chance: random.Random) -> None:
    """Replaces or removes one value of plain data."""
    while place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = chance.choice(keys)
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.1:
            nearby = [inner + 1, inner - 1, inner * 2] if type(inner) is int else []
            if chance.random() < 0.1:
                del place[key]
            else:
                place[key] = copy.deepcopy(chance.choice([*WEIRD, *nearby * 3]))  # which may be changed next
            return
        place = inner


def _forge_tensors(content: bytearray, start: int, chance: random.Random) -> str:
    """Changes a file of tensors so that it is still one, in most cases; says how."""
    if chance.random() < 0.3:
        content[start : start + 8] = chance.choice([b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f"])[
            : len(content) - start
        ]
        return "bytes"
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    if chance.random() < 0.25 or "__metadata__" in header:
        metadata = header.get("__metadata__", {})
        if "part" in metadata and chance.random() < 0.8:  # forged by the same means as the rest
            part = json.loads(metadata["part"])
            nonsense(part, chance)
            metadata["part"] = json.dumps(part)
        else:
            nonsense(header, chance)
        encoded = json.dumps(header).encode()
        encoded += b" " * (-(8 + len(encoded)) % 4096)
        content[: 8 + length] = len(encoded).to_bytes(8, "little") + encoded
        return "header"
    tensors = {name: array.copy() for name, array in safetensors.numpy.load(bytes(content)).items()}
    if not tensors:  # of a process that holds no weights of its own
        return "nothing"
    name = chance.choice(sorted(tensors))  # or the same seed would be another damage
    array, way = tensors[name], chance.choice(["numbers"] * 4 + ["missing", "shorter", "type", "renamed", "wider"])
    if name in (f"{RECIPE}header", f"{RECIPE}layouts") and chance.random() < 0.8:
        plain, way = json.loads(array.tobytes()), "data"
        nonsense(plain, chance)
        tensors[name] = np.frombuffer(json.dumps(plain).encode(), np.int8)
    elif way == "missing":
        del tensors[name]
    elif way == "renamed":
        tensors[chance.choice(["", "/", "a/b", name + "/x", *sorted(tensors)])] = tensors.pop(name)
    elif way == "shorter":
        tensors[name] = array[: len(array) // 2]
    elif way == "wider":
        tensors[name] = np.concatenate([array, array])
    elif way == "type":
        other = chance.choice([np.float64, np.float32, np.int64, np.int8])
        with np.errstate(all="ignore"):
            tensors[name] = array.astype(other)
    elif array.size:
        flat = array.reshape(-1)
        some = slice(None) if chance.random() < 0.3 else [chance.randrange(array.size)]
        with np.errstate(all="ignore"):
            flat[some] = np.array(chance.choice(NUMBERS[array.dtype.kind])).astype(array.dtype)
    if tensors:
        beginning, blocks, _ = lay_out({n: [array] for n, array in tensors.items()})
        content[:] = b"".join([beginning, *(np.ascontiguousarray(block).tobytes() for block in blocks)])
    return f"{way} of {name}"


def restated(content: bytes, folder: Path | None = None, file: Path | None = None, **changes: Any) -> bytes:
    """Signed JSON with other values, or with the size and checksum of a changed file, signed again."""
    raw = json.loads(content) | changes
    raw.pop("checksum", None)
    if folder is not None and file is not None:
        _restate(raw, folder, file, file.read_bytes())
    return signed(json.dumps(raw, indent=1).removesuffix("\n}").encode())


def _forge_checksums(folder: Path, file: Path) -> None:
    """Gives the manifests the checksum and the size of a changed file, or a part its own checksum."""
    content = file.read_bytes()
    for manifest in folder.rglob("memory.json"):
        forged = restated(manifest.read_bytes(), manifest.parent, file)
        manifest.unlink()
        manifest.write_bytes(forged)
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        metadata = header["__metadata__"]
        metadata["checksum"] = checksum_of_part(metadata["part"], load(content))
    except Exception:
        return  # no part, or no file of tensors any more
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[8 + length :])


def _restate(raw: Any, folder: Path, file: Path, content: bytes) -> None:
    if isinstance(raw, dict) and "file" in raw and folder / str(raw["file"]) == file:
        raw |= {"checksum": xxhash.xxh3_64_hexdigest(content), "bytes": len(content)}
    for inner in raw.values() if isinstance(raw, dict) else raw if isinstance(raw, list) else ():
        _restate(inner, folder, file, content)


# -- outcomes ---------------------------------------------------------------------------------------------


def corruptions(folder: Path, count: int, seed: int = 0) -> Counter[str]:
    """How so many damaged folders were read. What must not happen is under a name in capitals."""
    whole = wholes(folder / "whole")
    right = {name: json.dumps(each.read(each.folder)) for name, each in whole.items()}
    for name in ("recipe", "recipe of adam"):
        shutil.rmtree(whole[name].folder / "cache")
    outcomes: Counter[str] = Counter()
    done = 0
    while done < count:
        for line in watched(lambda tell, done=done: _corrupt(whole, right, folder, range(done, count), seed, tell)):
            done += 1
            outcomes[line.partition(":")[0]] += 1
            if line.partition(":")[0].isupper():
                print(f"  {done - 1}: {line}", file=sys.stderr, flush=True)
            went(outcomes, 500)
    return outcomes


def went(outcomes: Counter[str], every: int) -> None:
    """Says now and then how far a torture is, which may take an hour."""
    done = sum(outcomes.values())
    if done % every == 0:
        print(f"  {done:,} so far: {dict(outcomes.most_common())}", file=sys.stderr, flush=True)


def _corrupt(
    whole: dict[str, Whole],
    right: dict[str, str],
    folder: Path,
    numbers: range,
    seed: int,
    tell: Callable[[str], None],
) -> None:
    """In a process of its own: one line for each damaged folder."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    copy = folder / "copy"
    for number in numbers:
        chance = random.Random(f"{seed} {number}")
        name = chance.choice(list(whole))
        each = whole[name]
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(each.folder, copy)
        what, forged = damage(copy / each.damaged, chance)
        tell(f"{_outcome(each, copy, right[name].replace(str(each.folder), str(copy)), forged)}: {name}: {what}")


def _outcome(whole: Whole, copy: Path, right: str, forged: bool) -> str:
    try:
        given = whole.read(copy)
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


def watched(work: Callable[[Callable[[str], None]], None]) -> Iterator[str]:
    """The lines that a forked process tells; then, if that one crashed or hung, a line that says so."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            warnings.simplefilter("ignore")
            torch.set_num_threads(1)
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
