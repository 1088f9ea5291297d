"""Memories in buckets: the same as in a directory, whatever the bucket does."""

from __future__ import annotations

import os
import pickle
import random
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import spotlights as sl
from buckets import SECRET, new_bucket
from spotlights.memory import files, layer_reader
from spotlights.memory.store import BucketStore, Cache, bucket, store_at
from training import EXACT, FEATURES, assert_exact, distance, examples, network, processes, same, sgd, state, train

pytest.importorskip("obstore", reason="obstore is not installed (pip install 'spotlights[cloud]')")

STEPS = 40
SEGMENT_BYTES = 3000
"""Some steps: a run makes several segments."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is left in the user's own cache."""
    monkeypatch.setenv("SPOTLIGHTS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place in a bucket that this process keeps in main memory."""
    monkeypatch.setattr(bucket, "SCHEMES", (*bucket.SCHEMES, "memory"))
    monkeypatch.setattr("spotlights.memory.store.SCHEMES", (*bucket.SCHEMES, "memory"))
    return str(new_bucket("memory"))


def run(
    address: str | Path,
    start: int = 0,
    end: int = STEPS,
    *,
    after_step: Callable[[int], object] = lambda step: None,
    **options: Any,
) -> torch.nn.Module:
    """The one run of these tests, recorded from some step on."""
    model = network()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    train(model, optimizer, start)
    with sl.record(
        model, optimizer, address, **{"dtype": "float64", "segment_bytes": SEGMENT_BYTES, **options}
    ) as recorder:
        train(model, optimizer, range(start, end), recorder, after_step=after_step)
    return model


class Between:
    """Stands between the store and obstore: counts requests and bytes, and does what a test wants with each."""

    def __init__(
        self, patch: pytest.MonkeyPatch, around: Callable[[str, Callable[[], Any]], Any] | None = None
    ) -> None:
        self.requests: Counter[str] = Counter()
        self.read = 0
        self._obstore, self._around = bucket.obstore, around or (lambda name, request: request())
        patch.setattr(bucket, "obstore", self)

    def __getattr__(self, name: str) -> Any:
        original = getattr(self._obstore, name)

        def requested(*args: Any, **kwargs: Any) -> Any:
            self.requests[name] += 1
            answer = self._around(name, lambda: original(*args, **kwargs))
            if name == "get":
                start, end = answer.range
                self.read += end - start
            return answer

        return requested


def generic(text: str = "the wire was cut") -> Exception:
    return bucket.failures.GenericError(text)


def content_of(address: str | Path) -> dict[str, bytes]:
    """All files but the manifest, which has a date."""
    store = store_at(address)
    return {name: store.read(name) for name in store.list() if name != "memory.json"}


# -- the same memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "fold"), [("s3", None), ("s3", "example"), ("az", None)])
def test_a_memory_in_a_bucket_is_the_same_as_in_a_directory(tmp_path: Path, kind: str, fold: str | None):
    address = str(new_bucket(kind))
    model = run(address, fold=fold, segment_bytes=10_000)
    run(tmp_path / "here", fold=fold, segment_bytes=10_000)
    assert content_of(address) == content_of(tmp_path / "here")
    here, there = sl.open(tmp_path / "here"), sl.open(address)
    assert address in repr(there)
    assert sl.open(there.path).steps == there.steps == STEPS
    for layer, attention in there.attend(model, examples()[0]).items():
        expected = here.attend(model, examples()[0])[layer]
        assert list(attention.top(10).rows(0)) == list(expected.top(10).rows(0))
        assert list(attention.totals("label").rows(0)) == list(expected.totals("label").rows(0))
    if fold is None:
        assert_exact(there.path, model)
        run(address, 20, resume=True)
        assert_exact(there.path, model)


def test_a_bucket_that_fails_now_and_then_has_the_same_memory_in_the_end(tmp_path, address, monkeypatch):
    """Every tenth request fails: half of these before they happen, half after; others are late."""
    chance, lost = random.Random(3), Counter()

    def around(name: str, request: Callable[[], Any]) -> Any:
        drawn = chance.random()
        if drawn < 0.05:
            lost["before"] += 1
            raise generic()
        answer = request()
        if drawn < 0.10:
            lost["after"] += 1
            raise generic()
        time.sleep(0.01 * (drawn > 0.95))
        return answer

    monkeypatch.setattr(bucket, "_FIRST_PAUSE", 0.001)
    between = Between(monkeypatch, around)
    model = run(address, segment_bytes=1000)
    memory = sl.open(address)
    assert memory.verify(model).ok
    top = memory.attend(model, examples()[0])["0"].top(5)
    assert min(lost.values()) > 3, (lost, between.requests)
    monkeypatch.undo()
    monkeypatch.setattr("spotlights.memory.store.SCHEMES", ("memory",))
    run(tmp_path / "here", segment_bytes=1000)
    assert content_of(address) == content_of(tmp_path / "here")
    assert list(top.rows(0)) == list(sl.open(tmp_path / "here").attend(model, examples()[0])["0"].top(5).rows(0))


def test_a_dead_bucket_stops_recording_with_one_warning_and_training_goes_on(address, monkeypatch):
    alive = True

    def around(name: str, request: Callable[[], Any]) -> Any:
        if not alive:
            raise generic(f"no route; key={SECRET}")
        return request()

    Between(monkeypatch, around)
    monkeypatch.setenv("MY_SECRET_KEY", SECRET)
    monkeypatch.setattr(bucket, "AFTER_FAILURE", 0.1)
    model, patience = network(), (0.3, 0.3)
    monkeypatch.setattr("spotlights.recording.recorder.store_at", lambda path: BucketStore(path, None, patience))
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with sl.record(model, optimizer, address, dtype="float64", segment_bytes=SEGMENT_BYTES) as recorder:
            train(model, optimizer, range(20), recorder)
            recorder.flush()
            alive = False
            train(model, optimizer, range(20, STEPS), recorder)
            recorder.flush()
            train(model, optimizer, range(STEPS, STEPS + 5), recorder)
    (warning,) = warned
    assert warning.category is sl.RecordingStoppedWarning
    assert address in str(warning.message)
    assert "no route" in str(warning.message)
    assert SECRET not in str(warning.message)
    alive = True
    memory = sl.open(address)
    assert memory.steps == 20
    assert memory.verify().ok
    alone = network()
    train(alone, sgd(alone), STEPS + 5)
    assert same(state(model), state(alone))


# -- two writers -----------------------------------------------------------------------------------------


def test_a_second_run_does_not_touch_the_first_one(address):
    model = run(address)
    with pytest.raises(sl.MemoryExistsError, match="already holds a memory"):
        run(address)
    assert_exact_at(address, model)


def test_of_two_runs_that_begin_together_one_records(address, monkeypatch):
    """Both look while nothing is there; what the loser writes never replaces what the winner has written."""
    looked = threading.Barrier(2)

    def around(name: str, request: Callable[[], Any]) -> Any:
        answer = request()
        if name == "list" and threading.current_thread().name in "ab" and not listed.get(threading.get_ident()):
            listed[threading.get_ident()] = True
            looked.wait(60)
        return answer

    listed: dict[int, bool] = {}
    Between(monkeypatch, around)
    ended: dict[str, Any] = {}

    def record(name: str) -> None:
        model = network()
        with torch.no_grad():
            model[0].weight.mul_({"a": 1.0, "b": 2.0}[name])  # other initial weights than the other one's
        optimizer = sgd(model)
        try:
            with sl.record(model, optimizer, address, dtype="float64", segment_bytes=SEGMENT_BYTES) as recorder:
                train(model, optimizer, STEPS, recorder)
            ended[name] = model
        except sl.ResumeError as error:
            ended[name] = str(error)

    threads = [threading.Thread(target=record, args=(name,), name=name) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (message,) = [end for end in ended.values() if isinstance(end, str)]
    assert "another process" in message
    (winner,) = [end for end in ended.values() if not isinstance(end, str)]
    assert_exact_at(address, winner)


def test_a_run_that_is_resumed_elsewhere_stops_there_and_goes_on_here(address):
    """The run that everybody thought was dead: it hears of it by its next commit, and its files harm nobody."""
    model = network()
    optimizer = sgd(model, momentum=0.9, weight_decay=0.01)
    with sl.record(model, optimizer, address, dtype="float64", segment_bytes=SEGMENT_BYTES) as recorder:
        train(model, optimizer, range(20), recorder)
        recorder.flush()
        resumed = run(address, 20, resume=True)
        with pytest.warns(sl.RecordingStoppedWarning, match="changed by another process"):
            train_and_flush(model, optimizer, recorder)
    assert_exact_at(address, resumed)


def train_and_flush(model: torch.nn.Module, optimizer: torch.optim.Optimizer, recorder: sl.Recorder) -> None:
    train(model, optimizer, range(20, STEPS + 5), recorder)
    recorder.flush()
    train(model, optimizer, 1, recorder)


def assert_exact_at(address: str, model: torch.nn.Module) -> None:
    memory = sl.open(address)
    verified = memory.verify(model)
    assert verified.ok, verified
    assert not verified.damaged
    assert memory.status == "closed"
    assert distance(memory.primal(model).state_dict(), state(model)) <= EXACT


# -- reading ---------------------------------------------------------------------------------------------


@pytest.fixture
def wide(address: str) -> torch.nn.Module:
    """A memory with some large columns, in segments of about 300 KB."""
    model = network(FEATURES, 200, 3, dtype=torch.float32)
    optimizer = sgd(model)
    with sl.record(model, optimizer, address, segment_bytes=600_000) as recorder:
        train(model, optimizer, 150, recorder, size=40)
    return model


def test_a_question_reads_the_columns_that_it_needs_and_the_next_one_nothing(address, wide, monkeypatch):
    between = Between(monkeypatch)
    memory = sl.open(address)
    opened = between.read
    spot = memory.attend(wide, examples(torch.float32)[0][:3])
    first = spot["2"].scores()
    layouts = [segment.layout for segment in memory.view.reader.segments]
    needed = sum(layout["2/keys"].shape[0] * 200 * 4 for layout in layouts)
    headers = len(layouts) * files._HEADER_BYTES
    assert len(layouts) > 5
    log = len(layouts) * 16384  # of each segment, the log of its few steps: whether answers are exact
    assert needed <= between.read - opened <= 1.1 * needed + headers + log
    read = between.read
    assert torch.equal(sl.open(address).attend(wide, examples(torch.float32)[0][:3])["2"].scores(), first)
    assert between.read - read <= opened, "the second question read more than the manifest"


def test_a_scan_has_several_requests_in_flight(address, wide, monkeypatch):
    lock, flying, most = threading.Lock(), 0, 0

    def around(name: str, request: Callable[[], Any]) -> Any:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        time.sleep(0.01)
        with lock:
            flying -= 1
        return request()

    Between(monkeypatch, around)
    sl.open(address).attend(wide, examples(torch.float32)[0][:3])["2"].scores()
    assert most > 2


def test_the_cache_stays_within_its_limit_and_may_be_lost(address, wide, tmp_path, monkeypatch: pytest.MonkeyPatch):
    expected = sl.open(address).attend(wide, examples(torch.float32)[0][:3])["2"].scores()
    small = tmp_path / "small"
    for _ in range(2):
        # What is read ahead may arrive after the answer.
        with ThreadPoolExecutor() as ahead, monkeypatch.context() as patch:
            patch.setattr(layer_reader, "_ahead", ahead)
            memory = sl.open(address, cache=small, cache_bytes=700_000)
            assert torch.equal(memory.attend(wide, examples(torch.float32)[0][:3])["2"].scores(), expected)
        assert 0 < sum(file.stat().st_size for file in small.iterdir()) <= 700_000
        for file in small.iterdir():
            file.write_bytes(b"short")
    none = sl.open(address, cache=tmp_path / "none", cache_bytes=0)
    assert torch.equal(none.attend(wide, examples(torch.float32)[0][:3])["2"].scores(), expected)
    assert not (tmp_path / "none").exists()


def test_a_cache_that_loses_files_in_the_middle_of_a_scan_changes_no_answer(address, wide, monkeypatch):
    def scores() -> torch.Tensor:
        return sl.open(address).attend(wide, examples(torch.float32)[0][:3])["2"].scores()

    expected, load, calls, chance = scores(), Cache.load, [], random.Random(2)

    def now_and_then(*args: Any) -> bool:
        calls.append(chance.random() < 0.6 and load(*args))
        return calls[-1]

    monkeypatch.setattr(Cache, "load", now_and_then)
    assert torch.equal(scores(), expected)
    assert calls.count(True) > 5
    assert calls.count(False) > 5


def test_damage_in_the_cache_changes_no_answer_though_it_is_read_some_rows_at_a_time(address, wide, cache):
    asked = sl.open(address).attend(wide, examples(torch.float32)[0][:3])["2"]
    expected = asked.scores()
    for _ in range(2):  # in files that this process has written, and once more
        for file in cache.iterdir():
            file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
        assert torch.equal(asked.scores(), expected)


@pytest.mark.parametrize("wrong", [{"cache": 7}, {"cache_bytes": "10 GB"}])
def test_what_is_no_cache_is_refused(address, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(sl.SettingError, match=f"{name}={value!r} is no"):
        sl.open(address, **wrong)


def test_the_files_used_last_stay_in_the_cache(tmp_path):
    cache = Cache(tmp_path, 3 * 108)  # with their checksums
    for number, key in enumerate("abc"):
        cache.put(key, [bytes(100)])
        time.sleep(0.01 * (number + 1))
    assert cache.get("a", 100) is not None
    cache.put("d", [bytes(100)])
    assert [key for key in "abcd" if cache.get(key, 100) is not None] == ["a", "c", "d"]


def test_the_limit_of_a_cache_holds_for_its_checksums_too(tmp_path):
    cache = Cache(tmp_path, 2 * 108 - 1)
    for key in "ab":
        cache.put(key, [bytes(100)])
    assert [len(file.read_bytes()) for file in tmp_path.iterdir()] == [108]


def test_a_memory_that_is_replaced_while_it_is_read_is_not_mixed_up(address):
    run(address)
    before = sl.open(address)
    model = run(address, overwrite=True, end=STEPS)
    with pytest.raises(sl.MemoryFormatError, match="was replaced since the memory was opened"):
        before.attend(model, examples()[0])["0"].scores()
    assert_exact_at(address, model)


def test_a_missing_and_a_shorter_segment_are_named(address):
    run(address)
    store = store_at(address)
    name = next(iter(store.list("segments/")))
    content = store.read(name)
    store.write(name, iter([torch.frombuffer(bytearray(content[:-1]), dtype=torch.uint8).numpy()]))
    with pytest.raises(sl.MemoryFormatError, match=r"segments/.*truncated"):
        sl.open(address)
    store.delete(name)
    with pytest.raises(sl.MemoryFormatError, match=r"segments/.* is missing"):
        sl.open(address)


# -- addresses and secrets -------------------------------------------------------------------------------


def test_nothing_at_an_address_is_said_so(address):
    with pytest.raises(sl.MemoryFormatError, match=f"no memory at {address}: nothing is there"):
        sl.open(address)


@pytest.mark.parametrize(
    "wrong", ["s3://bucket", f"s3://key:{SECRET}@bucket/x", f"s3://bucket/x?token={SECRET}", "s3:///x"]
)
def test_addresses_that_name_no_memory_are_refused_without_showing_secrets(wrong):
    for ask in (sl.open, store_at):
        with pytest.raises(sl.SettingError, match="not the address of a memory") as raised:
            ask(wrong)
        assert SECRET not in str(raised.value)


def test_a_bucket_without_obstore_says_what_to_install(monkeypatch):
    monkeypatch.setattr(bucket, "obstore", None)
    with pytest.raises(sl.SettingError, match=r"pip install 'spotlights\[cloud\]'"):
        sl.open("s3://bucket/run.memory")


def test_secrets_appear_in_no_message_no_log_no_file_and_nothing_that_is_sent_to_workers(monkeypatch, caplog):
    caplog.set_level("DEBUG")
    store = new_bucket("s3")
    model = run(str(store))
    memory = sl.open(str(store))
    memory.attend(model, examples()[0])["0"].top(3)
    assert not [name for name in store.list() if SECRET.encode() in store.read(name)]
    for said in (repr(store), repr(memory), str(memory.info), caplog.text):
        assert SECRET not in said
    assert SECRET.encode() not in pickle.dumps((memory.view.reader.store, memory.view.reader.ranks))
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=1&sig=hidden-signature")
    for text in (
        f"GET http://host/x?sv=1&sig={SECRET} failed",
        f"the key {SECRET} is wrong",
        f"http://a:{SECRET}@host/",
    ):
        told = bucket._told(generic(text))
        assert SECRET not in told
        assert "host" in told or "key" in told
    absent = BucketStore(f"s3://no-such-bucket/{SECRET[:6]}", None, (0.1, 0.1))
    with pytest.raises(OSError, match="no-such-bucket") as raised:
        absent.commit(b"{}", None)
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


# -- kills -----------------------------------------------------------------------------------------------

KILLS = int(os.environ.get("SPOTLIGHTS_BUCKET_KILLS", "3"))
"""`make bucket-kills` has 100."""


def _record_until_killed(address: str, start: int, done: Any, environment: dict[str, str]) -> None:
    os.environ |= environment  # the server of forks may be older than the bucket's credentials
    done.release()
    run(address, start, resume=True, segment_bytes=1000, after_step=lambda step: done.release())
    time.sleep(60)  # if the kill comes late, it still comes


def test_a_run_killed_at_random_moments_is_always_readable_and_resumable():
    """kill -9 of a process that records to a bucket. The next one resumes from a step that the last one left."""
    address, chance, start, seen = str(new_bucket("s3")), random.Random(7), 0, []
    weights, context = [state(network())], processes()
    model = network()
    train(
        model, sgd(model, momentum=0.9, weight_decay=0.01), STEPS, after_step=lambda step: weights.append(state(model))
    )
    for kill in range(KILLS):
        done = context.Semaphore(0)
        process = context.Process(target=_record_until_killed, args=(address, start, done, dict(os.environ)))
        process.start()
        for _ in range(chance.randint(1, STEPS - start + 1)):  # so many steps, and some more time for the bucket
            assert done.acquire(timeout=600), "the recording process does not get on"
        time.sleep(chance.uniform(0.0, 0.2))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        try:
            memory = sl.open(address)
        except sl.MemoryFormatError:
            assert start == 0, "a memory with committed steps does not open any more"
            continue
        assert memory.steps >= start, "committed steps were lost"
        verified = memory.verify()
        assert verified.ok, verified
        assert not verified.damaged
        assert distance(memory.primal(network()).state_dict(), weights[memory.steps]) <= EXACT
        seen.append(memory.steps)
        start = min(STEPS - 15, chance.choice([memory.steps, chance.randint(0, memory.steps)]))
        if kill % 10 == 9 or kill == KILLS - 1:
            assert_exact_at(address, run(address, start, resume=True, segment_bytes=1000))
            start = chance.randint(0, STEPS // 2)
    assert KILLS < 20 or len(set(seen)) > 5, f"the kills did not spread over the run: {seen}"
    print(f"{KILLS} kills; steps that were there after each: {seen}")


@pytest.mark.parametrize("way", ["flipped", "of another key", "cut", "a folder", "a pipe"])
def test_a_damaged_file_of_the_cache_does_not_count_and_others_are_never_deleted(tmp_path, way):
    cache = Cache(tmp_path, 108)
    (tmp_path / "mine.bytes").write_bytes(b"mine")
    cache.put("b", [bytes(100)])
    (other,) = {*tmp_path.iterdir()} - {tmp_path / "mine.bytes"}
    content = other.read_bytes()
    cache.put("a", [bytes(100)])
    assert cache.get("a", 100) is not None
    (file,) = {*tmp_path.iterdir()} - {tmp_path / "mine.bytes"}
    if way == "flipped":
        content = bytes([1]) + file.read_bytes()[1:]
    file.unlink()
    if way == "a folder":
        file.mkdir()
    elif way == "a pipe":
        os.mkfifo(file)
    else:
        file.write_bytes(content[:50] if way == "cut" else content)
    assert cache.get("a", 100) is None
    assert (tmp_path / "mine.bytes").exists()
