"""The contract of stores: whatever keeps a memory's files, these claims hold."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import save_file

import spotlights as sl
from buckets import new_bucket
from spotlights.memory.files import FileTensors, write_tensors
from spotlights.memory.format.manifest import FileEntry
from spotlights.memory.format.names import MANIFEST
from spotlights.memory.store import Cache, LocalStore, Store, store_at

NAMES = ["a", "segments/000000-rank0.safetensors", "rank1/segments/b.c", "x-y_z.0"]
ODD_NAMES = [
    *("", "/a", "a/", "a//b", "..", "../a", "a/../b", ".", "./a"),
    *("a\\b", "a\0b", "a b", "é", "C:/a", "a\n", "\ud800"),
]

STORES: dict[str, Callable[[Path], Store]] = {
    "local": lambda folder: LocalStore(folder / "run.memory"),
    "bucket in main memory": lambda folder: new_bucket("memory", Cache(folder / "cache")),
    "s3": lambda folder: new_bucket("s3", Cache(folder / "cache")),
    "azure": lambda folder: new_bucket("az"),
}
"""Every kind of store: how to make an empty one."""


@pytest.fixture(params=list(STORES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return STORES[request.param](tmp_path)


def blocks(content: bytes, *sizes: int) -> Iterator[np.ndarray]:
    """The content, cut into blocks of these sizes and a rest."""
    for size in (*sizes, len(content)):
        yield np.frombuffer(content[:size], dtype=np.uint8)
        content = content[size:]


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


class TestStores:
    # -- files -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 200_000, 3_000_000])
    def test_what_was_written_is_read(self, store: Store, size: int):
        written = content(size)
        store.write("segments/a", blocks(written, 0, 7, 4096, 70_000))
        assert store.size("segments/a") == size
        assert store.read("segments/a") == written

    @pytest.mark.parametrize("name", NAMES)
    def test_files_are_found_under_their_names(self, store: Store, name: str):
        assert not store.exists(name)
        store.write(name, blocks(b"here"))
        assert store.exists(name)
        assert store.read(name) == b"here"
        assert list(store.list()) == [name]

    def test_a_file_is_replaced_whole(self, store: Store):
        store.write("a", blocks(content(10_000)))
        store.write("a", blocks(b"short"))
        assert store.read("a") == b"short"
        assert store.size("a") == 5

    def test_a_new_file_replaces_none(self, store: Store):
        store.write("a", blocks(b"first"), new=True)
        with pytest.raises(FileExistsError):
            store.write("a", blocks(b"second"), new=True)
        assert store.read("a") == b"first"

    @pytest.mark.parametrize("span", [range(0), range(8), range(3, 5), range(90, 100)])
    @pytest.mark.parametrize("checksum", ["", "c0ffee"])
    def test_ranges_are_loaded_again_and_again(self, store: Store, span: range, checksum: str):
        written = content(100)
        store.write("a", blocks(written))
        for _ in range(2):
            assert store.load("a", span, checksum).tobytes() == written[span.start : span.stop]
        with pytest.raises(OSError, match="fewer"):
            store.load("a", range(90, 101), checksum)

    def test_what_is_listed_has_its_size(self, store: Store):
        store.write("a", blocks(b"12345"))
        assert store.sizes() in ({}, {"a": 5})

    @pytest.mark.parametrize("before", [None, b"before"])
    def test_a_write_that_fails_changes_nothing(self, store: Store, before: bytes | None):
        def failing() -> Iterator[np.ndarray]:
            yield from blocks(content(2_000_000))
            raise RuntimeError("pulled the plug")

        if before is not None:
            store.write("segments/a", blocks(before))
        with pytest.raises(RuntimeError, match="plug"):
            store.write("segments/a", failing())
        assert list(store.list()) == ([] if before is None else ["segments/a"])
        assert before is None or store.read("segments/a") == before

    def test_a_file_is_not_seen_before_it_is_whole(self, store: Store):
        def looking() -> Iterator[np.ndarray]:
            for block in blocks(content(3_000_000), 1_500_000):
                assert not store.exists("a")
                yield block

        store.write("a", looking())
        assert store.size("a") == 3_000_000

    def test_absent_names_are_told_apart_from_other_failures(self, store: Store):
        store.write("there", blocks(b"x"))
        for ask in (store.size, store.read, lambda name: store.load(name, range(1), "")):
            for name in ("absent", "segments/absent", "there/absent"):
                with pytest.raises(FileNotFoundError):
                    ask(name)
        with pytest.raises(FileNotFoundError):
            store.committed()

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_names_are_refused(self, store: Store, name: str):
        asks: list[Callable[[], object]] = [
            lambda: store.size(name),
            lambda: store.read(name),
            lambda: store.load(name, range(1), "c0ffee"),
            lambda: store.write(name, blocks(b"x")),
            lambda: store.delete(name),
            lambda: store.at(name),
        ]
        for ask in asks:
            with pytest.raises(ValueError, match="not a name"):
                ask()

    # -- tensors ---------------------------------------------------------------------------------

    def test_tensors_are_read_back(self, store: Store):
        tensors = {name: torch.randn(rows, 16) for name, rows in (("a", 1000), ("b", 3), ("c", 4096))}
        entry = write_tensors(store, "t", {name: [t.numpy()[:2], t.numpy()[2:]] for name, t in tensors.items()})
        assert entry == FileEntry("t", store.size("t"), xxhash.xxh3_64_hexdigest(store.read("t")))
        mapped = FileTensors(store, entry)
        assert mapped.keys() == tensors.keys()
        assert all(torch.equal(mapped[name], tensor) for name, tensor in tensors.items())

    def test_what_was_read_stays_after_the_file_is_replaced_and_deleted(self, store: Store):
        entry = write_tensors(store, "t", {"a": [np.arange(100_000)]})
        read = FileTensors(store, entry)["a"]
        write_tensors(store, "t", {"a": [np.zeros(100_000, np.int64)]})
        store.delete("t")
        assert torch.equal(read, torch.arange(100_000))

    @pytest.mark.parametrize("width", [1, 4, 3000])
    def test_some_rows_are_those_of_the_whole_tensor(self, store: Store, width: int):
        """Whether they lie side by side, near each other or far apart, and however often one is asked for."""
        whole = torch.arange(60.0 * width).view(60, width)
        tensors = FileTensors(store, write_tensors(store, "t", {"a": [whole.numpy()], "b": [np.ones(3)]}))
        for rows in ([0], [59], [3, 4, 5], [3, 3, 5], [0, 59], [1, 1, 1], [2, 20, 20, 58], list(range(60))):
            made = tensors.rows("a", torch.tensor(rows), torch.empty(60, width))
            assert torch.equal(made, whole[rows])
        assert torch.equal(tensors.rows("a", slice(7, 9), torch.empty(5, width)), whole[7:9])
        with pytest.raises(sl.MemoryFormatError, match="no row 60"):
            tensors.rows("a", slice(7, 61), torch.empty(60, width))

    def test_a_file_that_is_too_short_is_an_error(self, store: Store):
        store.write("a", blocks(b"short"))
        for checksum in ("", "c0ffee"):
            with pytest.raises(OSError, match="fewer than"):
                store.load("a", range(100), checksum)

    def test_pieces_of_a_range_are_loaded_at_their_cost_or_not_at_all(self, store: Store):
        written, span = content(100), range(20, 90)
        store.write("a", blocks(written))
        for _ in range(2):
            into = np.zeros(20, np.uint8)
            loaded = store.load_pieces("a", span, "c0ffee", ([25, 20, 80], 5), into)
            assert loaded == store.load_pieces("a", span, "c0ffee", ([], 0), into[:0])
            expected = written[25:30] + written[20:25] + written[80:85] if loaded else bytes(15)
            assert into.tobytes() == expected + bytes(5)
            store.load("a", span, "c0ffee")

    # -- listing and deleting --------------------------------------------------------------------

    def test_names_are_listed_by_prefix(self, store: Store):
        assert list(store.list()) == list(store.list("segments/")) == []
        for name in NAMES:
            store.write(name, blocks(b"x"))
        for prefix in ("", "a", "seg", "segments/", "rank1/segments/", "rank1/segments/b", "rank", "x-y", "none/", "b"):
            assert sorted(store.list(prefix)) == sorted(name for name in NAMES if name.startswith(prefix))

    def test_what_is_deleted_is_gone_and_may_be_deleted_again(self, store: Store):
        for name in NAMES:
            store.write(name, blocks(b"x"))
        store.delete(NAMES[1])
        store.delete(NAMES[1])
        assert sorted(store.list()) == sorted(set(NAMES) - {NAMES[1]})
        store.write(NAMES[1], blocks(b"again"))
        assert store.read(NAMES[1]) == b"again"

    def test_a_store_within_a_store_has_the_rest_of_the_names(self, store: Store):
        inner = store.at("rank1")
        inner.write("segments/a", blocks(b"x"))
        inner.commit(b"{}", None)
        assert sorted(store.list()) == ["rank1/memory.json", "rank1/segments/a"]
        assert sorted(inner.list()) == ["memory.json", "segments/a"]
        assert str(inner).startswith(str(store))
        assert not store.exists(MANIFEST)

    # -- committing ------------------------------------------------------------------------------

    def test_commits_follow_each_other(self, store: Store):
        version = None
        for number in range(3):
            version = store.commit(f"{number}".encode(), version)
            assert store.committed() == (f"{number}".encode(), version)
            assert store.read(MANIFEST) == f"{number}".encode()
        assert list(store.list()) == [MANIFEST]

    def test_a_manifest_that_is_not_the_expected_one_is_not_replaced(self, store: Store):
        first = store.commit(b"first", None)
        second = store.commit(b"second", first)
        for expected in (None, first, "nonsense"):
            with pytest.raises(sl.ResumeError, match=r"memory\.json"):
                store.commit(b"mine", expected)
        assert store.committed() == (b"second", second)
        store.delete(MANIFEST)
        with pytest.raises(sl.ResumeError):
            store.commit(b"mine", second)
        assert not store.exists(MANIFEST)

    def test_of_several_commits_with_one_expectation_one_succeeds(self, store: Store):
        """Threads that count together in the manifest lose no count."""
        store.commit(b"0", None)

        def count() -> None:
            counted = 0
            while counted < 20:
                content, version = store.committed()
                try:
                    store.commit(str(int(content) + 1).encode(), version)
                except sl.ResumeError:
                    continue
                counted += 1

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.committed()[0] == b"80"

    def test_a_lock_keeps_others_out_until_it_is_released(self, store: Store):
        """Or it keeps nobody out, in a store that cannot lock."""
        release = store.lock()
        with contextlib.suppress(sl.ResumeError):
            store.lock()()
        release()
        store.lock()()

    # -- the rest --------------------------------------------------------------------------------

    def test_stores_can_be_pickled(self, store: Store):
        store.write("a", blocks(b"here"))
        assert pickle.loads(pickle.dumps(store)).read("a") == b"here"

    def test_messages_name_an_address(self, store: Store):
        assert str(store) in store.describe("segments/a")
        assert store.describe("segments/a").endswith("segments/a")


# -- addresses ---------------------------------------------------------------------------------------


def test_paths_and_file_addresses_are_local(tmp_path: Path):
    folder = tmp_path / "a folder"
    for address in (folder, str(folder), folder.as_uri()):
        assert store_at(address) == LocalStore(folder)


@pytest.mark.parametrize("address", ["http://host/x", "ftp://host/x"])
def test_other_schemes_are_refused_with_those_that_exist(address: str):
    for ask in (sl.open, store_at):
        with pytest.raises(sl.SettingError, match=r"no store for \w+:// addresses.*file://, s3://"):
            ask(address)


def test_a_file_address_names_no_other_machine():
    with pytest.raises(sl.SettingError, match="another machine"):
        store_at("file://run.memory")


# -- what only directories have ------------------------------------------------------------------------


def test_a_locked_directory_is_named(tmp_path: Path):
    release = store_at(tmp_path).lock()
    with pytest.raises(sl.ResumeError, match=f"{tmp_path} is being recorded by another process"):
        store_at(tmp_path).lock()
    release()


def test_no_memory_is_taken_for_bytes_that_are_not_there(tmp_path: Path):
    store = store_at(tmp_path)
    store.write("a", blocks(b"short"))
    with pytest.raises(OSError, match="fewer than"):
        store.load("a", range(1 << 50), "c0ffee")


def test_only_regular_files_are_read(tmp_path: Path):
    store = store_at(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        assert store.exists(name)
        for ask in (store.size, store.read, lambda name: store.load(name, range(1), "c0ffee")):
            with pytest.raises(OSError, match="Not a regular file"):
                ask(name)


@pytest.mark.parametrize("files", [["notes.txt"], ["initial.safetensors"], ["segments/000000-rank0.safetensors", "x"]])
def test_files_of_somebody_else_are_never_deleted(tmp_path: Path, files: list[str]):
    """Not even with the names that a memory gives its files."""
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        save_file({"w": torch.ones(3)}, tmp_path / file)
    model = torch.nn.Linear(2, 2)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        recording = sl.record(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, **options)
        with pytest.raises(sl.MemoryExistsError, match="is not a memory"), recording:
            model(torch.ones(1, 2)).sum().backward()
    assert sorted(store_at(tmp_path).list()) == sorted(files)
