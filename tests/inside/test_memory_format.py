"""The bytes on disk: readable by others, and damage is named instead of computed with."""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

import spotlights as sl
from spotlights.memory.buffers import BufferPool
from spotlights.memory.files import check_content, write_tensors
from spotlights.memory.format.manifest import signed
from spotlights.memory.format.tensors import lay_out
from spotlights.memory.store import store_at
from spotlights.memory.writer import MemoryWriter
from training import elsewhere, examples, network, sgd, train

X, _ = examples()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A closed memory of several segments, with an indexed layer, scales and string columns."""
    path = tmp_path_factory.mktemp("whole") / "run.memory"
    model = network(dtype=torch.float32)
    optimizer = sgd(model, momentum=0.9)
    with sl.record(model, optimizer, path, dtype="float16", segment_bytes=1500) as recorder:
        for step in range(8):
            recorder.batch(example=torch.arange(4), source="web" if step % 2 else "book")
            optimizer.zero_grad()
            model(X[:4].float()).square().sum().backward()
            optimizer.step()
    assert len(list((path / "segments").iterdir())) > 1
    return path


@pytest.fixture
def memory(whole) -> Iterator[Path]:
    """A copy to damage, in main memory where the system has such a place: a busy disk proves nothing here."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as directory:
        yield Path(shutil.copytree(whole, Path(directory) / "copy.memory"))


def _ask(path: Path) -> sl.Memory:
    """Opens a memory and looks at all of it."""
    memory = sl.open(path)
    memory.verify()
    return memory


def _put(path: Path, content: bytes) -> None:
    """A new file in place of the old one: file systems flush a file that is emptied and filled again."""
    path.unlink()
    path.write_bytes(content)


def _complaint(path: Path) -> str:
    """What is said about a damaged memory, by an error or by the table of `verify`."""
    try:
        verified = sl.open(path).verify()
    except sl.MemoryFormatError as error:
        return str(error)
    assert verified.ok == (not verified.damaged)
    assert all(sentence.split()[0] in "".join(str(verified).split()) for sentence in verified.damaged)
    return " ".join(verified.damaged)


def _manifest(path: Path) -> dict:
    """Without its checksum, as in memories of earlier versions: other checks must find what is wrong."""
    raw = json.loads((path / "memory.json").read_text())
    del raw["checksum"]
    return raw


# -- what others can read ---------------------------------------------------------------------------------


def test_every_tensor_file_opens_with_the_plain_safetensors_library(whole):
    manifest = _manifest(whole)
    files = [manifest["initial"], manifest["final"], *manifest["segments"]]
    for entry in files:
        tensors = load_file(whole / entry["file"])
        assert tensors
        assert (whole / entry["file"]).stat().st_size == entry["bytes"]
    initial = load_file(whole / "initial.safetensors")
    assert torch.equal(initial["0/weight"], network(dtype=torch.float32)[0].weight)


def test_slots_add_up_to_the_weights_with_nothing_but_the_files(tmp_path):
    """What the format promises, computed from the bytes: W_T = W_0 − lr Σ δ⊗k, for plain SGD."""
    model = network()
    optimizer = sgd(model, lr=0.1)
    with sl.record(model, optimizer, tmp_path / "m", dtype="float64", segment_bytes=1500) as recorder:
        train(model, optimizer, 8, recorder)
    weight = load_file(tmp_path / "m" / "initial.safetensors")["2/weight"]
    for entry in _manifest(tmp_path / "m")["segments"]:
        tensors = load_file(tmp_path / "m" / entry["file"])
        weight = weight - 0.1 * tensors["2/errors"].T @ tensors["2/keys"]
    torch.testing.assert_close(weight, model[2].weight.detach(), rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("seed", range(6))
def test_a_file_holds_the_bytes_of_its_blocks_whatever_their_sizes(tmp_path, seed):
    """Blocks of whole pages are written from where they are, others through a buffer, in any mixture."""
    chance, pool = random.Random(seed), BufferPool(0)
    tensors: dict[str, list[torch.Tensor]] = {}
    for name in "abcde":
        dtype = chance.choice([torch.float64, torch.float32, torch.float16])
        rows = [chance.choice([1, 60, 2048, 4096, 4100, 70_000]) for _ in range(chance.randint(1, 5))]
        tensors[name] = [pool.take(torch.Size((n, 16)), dtype).normal_() for n in rows]
    store = store_at(tmp_path)
    entry = write_tensors(store, "f", {name: [b.numpy() for b in blocks] for name, blocks in tensors.items()})
    assert (tmp_path / "f").stat().st_size == entry.bytes
    check_content(store, entry)
    for name, found in load_file(tmp_path / "f").items():
        assert torch.equal(found, torch.cat(tensors[name]))


def test_a_memory_holds_json_and_tensors_and_nothing_pickled(whole):
    files = [path for path in whole.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".safetensors"}
    for path in files:
        content = path.read_bytes()
        pickled = [bytes((0x80, protocol)) for protocol in range(2, 6)]
        assert not content.startswith((*pickled, b"PK")), f"{path} looks like a pickle or an archive of one"


def test_a_memory_can_be_moved(memory):
    moved = memory.rename(memory.parent / "elsewhere")
    assert _ask(moved).verify().ok


def test_string_columns_come_back_as_strings(whole):
    assert len(_ask(whole).where(source="web")) == 16


# -- damage is named ----------------------------------------------------------------------------------------


TENSOR_FILES = ["initial.safetensors", "final.safetensors", "segments/000000-rank0.safetensors"]


@pytest.mark.parametrize("file", ["memory.json", *TENSOR_FILES])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty", "longer", "a directory"])
def test_a_file_of_the_wrong_size_is_named_when_opening(memory, file, damage):
    path = memory / file
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "longer":
        path.write_bytes(content + b"\0")
    elif damage == "a directory":
        path.mkdir()
    with pytest.raises(sl.MemoryFormatError) as caught:
        sl.open(memory)
    assert path.name in str(caught.value)
    assert str(memory) in str(caught.value)


@pytest.mark.parametrize("file", TENSOR_FILES)
def test_any_flipped_bit_is_reported_with_its_file(memory, file):
    """Where it makes a file unreadable it is an error, elsewhere `verify` reports it; never silence."""
    path = memory / file
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    chance = random.Random(file)
    places = [chance.randrange(header) for _ in range(20)] + [chance.randrange(header, len(content)) for _ in range(20)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << chance.randrange(8)
        _put(path, damaged)
        assert path.name in _complaint(memory), f"byte {place} went unnoticed"


def test_files_that_changed_places_are_reported(memory):
    first, second = sorted((memory / "segments").iterdir())[:2]
    swapped = first.read_bytes(), second.read_bytes()
    first.write_bytes(swapped[1])
    second.write_bytes(swapped[0])
    complaint = _complaint(memory)
    assert first.name in complaint or second.name in complaint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"memory"',
        "{}",
        '{"format": 2}',
        "\x00\x01",
        "[" * 100_000,
        '{"format": NaN}',
    ],
    ids=lambda text: repr(text[:20]),
)
def test_a_manifest_that_is_no_manifest_is_named(memory, text):
    (memory / "memory.json").write_text(text)
    with pytest.raises(sl.MemoryFormatError, match=r"memory\.json"):
        sl.open(memory)


def test_any_flipped_bit_of_the_manifest_is_an_error_or_changes_nothing(memory):
    content, right = (memory / "memory.json").read_bytes(), _ask(memory)
    chance, silent = random.Random(3), []
    for _ in range(150):
        flipped = bytearray(content)
        place = chance.randrange(len(content))
        flipped[place] ^= 1 << chance.randrange(8)
        _put(memory / "memory.json", bytes(flipped))
        try:
            if sl.open(memory).view.reader.manifest != right.view.reader.manifest:
                silent.append(place)
        except sl.MemoryFormatError:
            pass
    assert not silent


def test_memories_of_versions_without_a_checksum_in_the_manifest_open(memory):
    (memory / "memory.json").write_text(json.dumps(_manifest(memory)))
    assert _ask(memory).steps == 8


def _forge(memory: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> str:
    """Changes a tensor of the first segment, with new checksums everywhere; returns the segment's name."""
    raw = _manifest(memory)
    segment = memory / raw["segments"][0]["file"]
    tensors = {key: value.numpy() for key, value in load_file(segment).items()}
    tensors[name] = change(tensors[name])
    beginning, blocks, _ = lay_out({key: [value] for key, value in tensors.items()})
    content = beginning + b"".join(block.tobytes() for block in blocks)
    _put(segment, content)
    raw["segments"][0] |= {"bytes": len(content), "checksum": xxhash.xxh3_64_hexdigest(content)}
    _put(memory / "memory.json", signed(json.dumps(raw, indent=1).removesuffix("\n}").encode()))
    return segment.name


@pytest.mark.parametrize("number", [-2, 99, 2**62, -(2**63)])
@pytest.mark.parametrize("tensor", ["2/column/step", "2/column/source", "0/index"])
def test_numbers_out_of_their_range_are_named_whatever_the_checksums_say(memory, tensor, number):
    name = _forge(memory, tensor, lambda values: np.concatenate([[number], values[1:]]))
    opened, x = sl.open(memory), X[:1].float()
    asked = network(dtype=torch.float32)
    with pytest.raises(sl.MemoryFormatError, match=f"{name}.*{tensor}.*outside"):
        opened.attend(asked, x)[tensor[0]].totals(tensor.rpartition("/")[2] if "column" in tensor else "step")


@pytest.mark.parametrize("field", ["slots", "keys", "end_step"])
def test_no_more_is_declared_than_the_files_can_hold(memory, field):
    """Otherwise so much memory would be asked for before the files are looked at."""
    raw = _manifest(memory)
    if field == "end_step":
        raw["segments"][0][field] = raw["segments"][1]["first_step"] = 10**12
    else:
        raw["segments"][0][field]["2"] = 10**12
    (memory / "memory.json").write_text(json.dumps(raw))
    with pytest.raises(sl.MemoryFormatError, match="cannot have"):
        sl.open(memory)


def test_a_log_that_calls_everything_rounding_hides_nothing_from_verify(memory):
    _forge(memory, "/log/2/weight/factor", lambda factors: 2 * factors)
    _forge(memory, "/log/2/probe", lambda rows: np.stack([np.full(len(rows), -1e9), rows[:, 1]], axis=1))
    assert not sl.open(memory).verify()["2"].ok


@pytest.mark.parametrize("tensor", ["/log/2/weight/factor", "/log/2/weight/sample", "/log/2/bias/rule"])
def test_a_log_that_lacks_a_step_is_named_whatever_the_checksums_say(memory, tensor):
    name = _forge(memory, tensor, lambda values: values[1:])
    with pytest.raises(sl.MemoryFormatError, match=f"{name}: '{tensor}' has shape .* the file has . steps"):
        sl.open(memory).verify()


@pytest.mark.parametrize("number", [-2, 24, 2**62, -(2**63)])
def test_tokens_that_do_not_exist_are_named_whatever_the_checksums_say(tmp_path, number):
    model = torch.nn.Sequential(torch.nn.Embedding(24, 4), torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sl.record(model, optimizer, tmp_path / "m") as recorder:
        recorder.batch(example=[1, 2, 3])
        model(torch.tensor([1, 2, 3])).square().mean().backward()
        optimizer.step()
    name = _forge(tmp_path / "m", "0/key_tokens", lambda values: np.full_like(values, number))
    for ask in (lambda m: m.layers, lambda m: m.attend(model, torch.tensor([1]))["0"].totals("example")):
        with pytest.raises(sl.MemoryFormatError, match=f"{name}: .*0/key_tokens.* outside"):
            ask(sl.open(tmp_path / "m"))


def test_settings_that_no_optimizer_has_are_named_whatever_the_checksums_say(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with sl.record(model, optimizer, tmp_path / "m"):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
    _forge(tmp_path / "m", "/log/linear/weight/rule", lambda values: np.full_like(values, 1e300))
    with pytest.raises(sl.MemoryFormatError, match="cannot have made a step"):
        sl.open(tmp_path / "m").weights("linear")


def test_a_reason_in_the_log_that_is_none_is_named(memory):
    _forge(memory, "/log/2/probe", lambda values: np.full_like(values, np.nan))
    with pytest.raises(sl.MemoryFormatError, match='step log of layer "2"'):
        sl.open(memory).verify()


@pytest.mark.parametrize("which", ["initial", "final"])
@pytest.mark.parametrize(
    "change",
    [lambda values: values[1:], lambda values: values.astype(np.int64), lambda values: values.reshape(-1), None],
    ids=["shorter", "whole numbers", "flat", "missing"],
)
def test_weights_of_another_shape_or_type_are_named_whatever_the_checksums_say(memory, which, change):
    raw = _manifest(memory)
    tensors = {key: value.numpy() for key, value in load_file(memory / raw[which]["file"]).items()}
    weight = tensors.pop("2/weight")
    beginning, blocks, _ = lay_out(
        {key: [value] for key, value in (tensors | ({} if change is None else {"2/weight": change(weight)})).items()}
    )
    content = beginning + b"".join(np.ascontiguousarray(block).tobytes() for block in blocks)
    _put(memory / raw[which]["file"], content)
    raw[which] |= {"bytes": len(content), "checksum": xxhash.xxh3_64_hexdigest(content)}
    _put(memory / "memory.json", signed(json.dumps(raw, indent=1).removesuffix("\n}").encode()))
    with pytest.raises(sl.MemoryFormatError, match=f"{which}.safetensors: .*2/weight"):
        sl.open(memory).verify()


def test_a_manifest_that_is_not_text_is_named(memory):
    (memory / "memory.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(sl.MemoryFormatError, match=r"memory\.json"):
        sl.open(memory)


@pytest.mark.parametrize("version", [0, 1, 999, "2", None])
def test_another_format_version_is_named_with_ours(memory, version):
    raw = _manifest(memory)
    (memory / "memory.json").write_text(json.dumps({**raw, "format": version}))
    with pytest.raises(sl.MemoryFormatError, match=r"memory\.json has format .*reads format 2"):
        sl.open(memory)


@pytest.mark.parametrize("file", ["/etc/passwd", "../outside.safetensors", "segments/../../x", "", "a\0b", 3, None])
@pytest.mark.parametrize("where", ["initial", "final", "segments"])
def test_a_manifest_cannot_point_outside_the_memory(memory, where, file):
    raw = _manifest(memory)
    entry = raw["segments"][0] if where == "segments" else raw[where]
    entry["file"] = file
    (memory / "memory.json").write_text(json.dumps(raw))
    with pytest.raises(sl.MemoryFormatError, match=r"memory\.json"):
        sl.open(memory)


@pytest.mark.parametrize("checksum", ["", "nonsense", "0x1f", " 1f"])
def test_a_checksum_that_is_no_number_is_named(memory, checksum):
    raw = _manifest(memory)
    raw["segments"][0]["checksum"] = checksum
    (memory / "memory.json").write_text(json.dumps(raw))
    with pytest.raises(sl.MemoryFormatError, match="checksum"):
        sl.open(memory)


def _leaves(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:2]):
            yield from _leaves(inner, (*path, index))


def _nonsense(memory: Path) -> list[str]:
    raw = _manifest(memory)
    unexpected = []
    for path in list(_leaves(raw))[1:]:
        for nonsense in (None, -1, 10**12, "nonsense", [], {}, [None], {"a": 1}, True, 0.5):
            changed = json.loads(json.dumps(raw))
            place = changed
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = nonsense
            _put(memory / "memory.json", json.dumps(changed).encode())
            try:
                sl.open(memory)
            except sl.SpotlightsError:
                pass
            except Exception as error:
                unexpected.append(f"{'.'.join(map(str, path))} = {nonsense!r}: {error!r}")
    return unexpected


def test_any_field_of_the_manifest_may_be_nonsense(memory):
    """Whatever stands in a field, opening it is an answer or a Spotlights error."""
    unexpected = elsewhere(_nonsense, memory)  # where no run-time type checks stand in for our own
    assert not unexpected, "\n".join(unexpected[:20])


@pytest.mark.parametrize("field", ["layers", "segments", "initial", "columns", "optimizer"])
def test_a_missing_field_of_the_manifest_is_named(memory, field):
    raw = _manifest(memory)
    del raw[field]
    (memory / "memory.json").write_text(json.dumps(raw))
    with pytest.raises(sl.MemoryFormatError, match=rf"memory\.json.*{field}"):
        sl.open(memory)


def test_shapes_that_do_not_fit_the_manifest_are_named(memory):
    raw = _manifest(memory)
    raw["layers"]["2"]["in_features"] = 7
    (memory / "memory.json").write_text(json.dumps(raw))
    with pytest.raises(sl.MemoryFormatError, match=r"safetensors.*2/keys.*memory\.json says"):
        _ask(memory)


@pytest.mark.parametrize("tensor", ["2/keys", "2/errors", "/log/2/probe"])
def test_a_tensor_that_a_segment_lacks_is_named(memory, tensor):
    segment = min((memory / "segments").iterdir())
    content = segment.read_bytes()
    assert f'"{tensor}"'.encode() in content
    segment.write_bytes(content.replace(f'"{tensor}"'.encode(), f'"{tensor[:-1]}_"'.encode()))
    with pytest.raises(sl.MemoryFormatError, match=f"{segment.name} has no '{tensor}'"):
        sl.open(memory).verify()


def test_a_number_that_most_of_many_layers_have_is_written_once(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sl.record(model, optimizer, tmp_path / "run") as recorder:
        for _ in range(3):
            recorder.batch(example=[0, 1, 2])  # keys of the first layer come again
            optimizer.zero_grad()
            model(torch.eye(4)[:3]).square().sum().backward()
            optimizer.step()
    manifest = json.loads((tmp_path / "run" / "memory.json").read_text())
    (segment,) = manifest["segments"]
    assert segment["slots"] == {"": 9}
    assert segment["keys"] == {"": 9, "0": 3}
    memory = sl.open(tmp_path / "run")
    assert [layer.slots for layer in memory.layers.values()] == [9] * 20
    assert memory.verify(model).ok
    del manifest["checksum"]
    for wrong in ("many", -1, None):
        segment["slots"][""] = wrong
        (tmp_path / "run" / "memory.json").write_text(json.dumps(manifest))
        with pytest.raises(sl.MemoryFormatError):
            sl.open(tmp_path / "run")


def test_files_that_the_manifest_does_not_list_do_not_count(memory):
    shutil.copy(memory / "initial.safetensors", memory / "segments" / "000099-rank0.safetensors")
    (memory / "segments" / "000100-rank0.safetensors.part").write_bytes(b"half a segment")
    (memory / "memory.json.part").write_text("{")
    (memory / "notes.txt").write_text("mine")
    assert _ask(memory).verify().ok


def test_a_path_without_a_memory_is_named(tmp_path):
    with pytest.raises(sl.MemoryFormatError, match=r"no memory at .*nowhere"):
        sl.open(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(sl.MemoryFormatError, match=r"has no memory\.json"):
        sl.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(sl.MemoryFormatError, match="file"):
        sl.open(tmp_path / "file")


def test_checkpoints_of_all_processes_are_as_frequent_after_resuming(tmp_path):
    """Processes agree on the steps by the bytes and the steps since the beginning, not since they resumed."""
    model = network()
    with sl.record(model, optimizer := sgd(model), tmp_path / "m", segment_bytes=1000) as recorder:
        train(model, optimizer, 64, recorder)
    nbytes = sl.open(tmp_path / "m").view.reader.nbytes // 64  # so large as a step: every fourth one, or eighth
    resumed = MemoryWriter.resume(store_at(tmp_path / "m"), 64, pool=BufferPool(0), segment_bytes=1000)
    assert resumed.aligned(64, nbytes)
    assert [step for step in range(64, 96) if resumed.aligned(step, nbytes)][1] <= 72
    resumed.close(None)
