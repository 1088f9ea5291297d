"""A bucket as a store, through obstore: files are objects, put whole; the manifest is replaced by conditional puts.

Credentials and endpoints come from the environment, as obstore reads it (`AWS_…`, `GOOGLE_…`, `AZURE_…`). No message
repeats what an object store answered without `_told`, which leaves out whatever may be secret.

A request that fails is made again, with growing pauses, until the patience is used up. A put whose answer was lost may
have happened: what is there is then compared with what was sent.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import UInt8

from spotlights.errors import ResumeError, SettingError, UnsupportedError
from spotlights.memory.format.names import MANIFEST, is_name
from spotlights.memory.store.base import Pieces, Store
from spotlights.memory.store.cache import Cache

obstore: Any = None
stores: Any = None
failures: Any = None
with contextlib.suppress(ImportError):
    obstore = importlib.import_module("obstore")
    stores = importlib.import_module("obstore.store")
    failures = importlib.import_module("obstore.exceptions")

SCHEMES = ("s3", "gs", "az")
READING, WRITING, AFTER_FAILURE = 30.0, 300.0, 2.0
"""Seconds for which failing requests are repeated; few once a bucket has used them up, so that nobody waits twice."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_RANGE_BYTES = 8 << 20
"""Larger ranges are read in several requests at a time."""
_WHOLE_BYTES = 1 << 30
"""Larger files are uploaded in parts: no segment is, but the weights of a large network may be."""
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS", re.IGNORECASE)
_CLIENT_ERROR = re.compile(r"status code: 4(?!0[89]|29)\d\d")
"""A timeout (408), a conflict (409) and too many requests (429) pass; other requests that are wrong stay wrong."""

T = TypeVar("T")
_pool = ThreadPoolExecutor(16, thread_name_prefix="spotlights-bucket")


@dataclass
class _Known:
    """What one process has learnt of a bucket."""

    versions: dict[str, str] = field(default_factory=dict)
    """By name, of the files as they were listed when the memory was opened; other content is not read."""
    failed: bool = False
    """Whether the last request used up the patience."""


@dataclass(frozen=True)
class BucketStore(Store):
    """The files of a memory as the objects under one address."""

    streams = False
    address: str
    """`s3://bucket/run.memory`"""
    cache: Cache | None = None
    patience: tuple[float, float] = (READING, WRITING)
    _known: _Known = field(default_factory=_Known, compare=False, repr=False)

    def __post_init__(self) -> None:
        if obstore is None:
            scheme = self.address.partition(":")[0]
            raise SettingError(f"{scheme}:// addresses need obstore: pip install 'spotlights[cloud]'.")
        with contextlib.suppress(ValueError):
            scheme, rest = self.address.split("://")
            bucket, _, folder = rest.partition("/")
            if bucket and "@" not in bucket and is_name(folder):
                return
        shown = re.sub(r"//.*@", "//…@", self.address.partition("?")[0])
        raise SettingError(
            f"{shown} is not the address of a memory in a bucket. Give one such as s3://bucket/run.memory; credentials "
            "belong in the environment."
        )

    def __str__(self) -> str:
        return self.address

    def is_same_place(self, other: Store) -> bool:
        return isinstance(other, BucketStore) and self.address == other.address

    def at(self, prefix: str) -> BucketStore:
        self._key(prefix)
        return BucketStore(f"{self.address}/{prefix}", self.cache, self.patience)

    @property
    def _folder(self) -> str:
        return self.address.split("/", 3)[3]

    @property
    def _objects(self) -> Any:
        return _connection(self.address[: -len(self._folder) - 1])

    def _key(self, name: str) -> str:
        if not is_name(name):
            raise ValueError(f"{name!r} is not a name of a file in a memory")
        return f"{self._folder}/{name}"

    # -- reading ---------------------------------------------------------------------------------

    def size(self, name: str) -> int:
        key = self._key(name)
        return self._patiently(name, lambda: obstore.head(self._objects, key)["size"])

    def sizes(self) -> dict[str, int]:
        listed = {meta["path"]: meta for meta in self._listed("")}
        start = len(self._folder) + 1
        self._known.versions |= {key[start:]: meta["e_tag"] for key, meta in listed.items() if meta["e_tag"]}
        return {key[start:]: meta["size"] for key, meta in listed.items()}

    def read(self, name: str) -> bytes:
        key = self._key(name)
        return self._patiently(name, lambda: bytes(obstore.get(self._objects, key).bytes()))

    def load(self, name: str, span: range, checksum: str) -> UInt8[np.ndarray, "bytes"]:
        key, cache = self._kept_as(name, span, checksum), self.cache if checksum else None
        cached = None if cache is None else cache.get(key, len(span))
        if cached is not None:
            return cached
        parts = [range(start, min(start + _RANGE_BYTES, span.stop)) for start in range(*_ends(span), _RANGE_BYTES)]
        # One part in this thread: so many threads may wait for their parts that none is left to read them.
        others = [_pool.submit(self._range, name, part) for part in parts[1:]]
        blocks = [self._range(name, part) for part in parts[:1]] + [other.result() for other in others]
        if cache is not None:
            cache.put(key, blocks)
        return np.frombuffer(bytearray().join(blocks), dtype=np.uint8)

    def _kept_as(self, name: str, span: range, checksum: str) -> str:
        self._key(name)
        return f"{self.describe(name)} {checksum} {span.start}-{span.stop}"

    def load_pieces(
        self, name: str, span: range, checksum: str, pieces: Pieces, into: UInt8[np.ndarray, "bytes"]
    ) -> bool:
        if self.cache is None or not checksum:
            return False
        starts, width = pieces
        within = [start - span.start for start in starts]
        return self.cache.load(self._kept_as(name, span, checksum), len(span), (within, width), into)

    def _range(self, name: str, span: range) -> Any:
        """The bytes of a range that must lie within the file."""
        key, version = self._key(name), self._known.versions.get(name)
        options: dict[str, Any] = {"range": _ends(span)} | ({"if_match": version} if version else {})
        try:
            content = self._patiently(name, lambda: obstore.get(self._objects, key, options=options).bytes())
        except failures.PreconditionError:
            raise OSError(f"{self.describe(name)} was replaced since the memory was opened. Open it again") from None
        if len(content) != len(span):
            raise OSError(f"{self.describe(name)} has fewer than {span.stop:,} bytes")
        return content

    def list(self, prefix: str = "") -> Iterator[str]:
        start = len(self._folder) + 1
        for meta in self._listed(prefix.rpartition("/")[0]):
            if meta["path"].startswith(prefix, start):
                yield meta["path"][start:]

    def _listed(self, folder: str) -> list[Any]:
        within = f"{self._folder}/{folder}".rstrip("/")
        return self._patiently(
            folder, lambda: [meta for some in obstore.list(self._objects, within, chunk_size=1000) for meta in some]
        )

    # -- writing ---------------------------------------------------------------------------------

    def write(self, name: str, blocks: Iterable[UInt8[np.ndarray, "bytes"]], *, new: bool = False) -> None:
        key, stream = self._key(name), iter(blocks)
        collected: list[Any] = []
        size = 0
        for block in stream:
            collected.append(block.data)
            size += len(block)
            if size > _WHOLE_BYTES:
                if new and self.exists(name):
                    raise FileExistsError(f"{self.describe(name)} exists")
                parts = itertools.chain(collected, (block.data for block in stream))
                self._patiently(name, partial(_put_in_parts, self.address, key, parts), patience=0.0)
                return
        content = b"".join(collected)
        mode = "create" if new else "overwrite"
        try:
            self._put(name, content, mode)
        except (failures.AlreadyExistsError, failures.PreconditionError):
            raise FileExistsError(f"{self.describe(name)} exists") from None

    def _put(self, name: str, content: bytes, mode: Any) -> str:
        """Puts an object and returns its version. If an earlier answer was lost, the object may be there already."""
        key, unsure = self._key(name), False

        def put() -> str:
            nonlocal unsure
            try:
                return _version(obstore.put(self._objects, key, content, mode=mode, use_multipart=False))
            except (failures.AlreadyExistsError, failures.PreconditionError):
                if unsure:
                    held = obstore.get(self._objects, key)
                    if bytes(held.bytes()) == content:
                        return _version(held.meta)
                raise
            except Exception:
                unsure = True
                raise

        return self._patiently(name, put, patience=self.patience[1])

    def committed(self) -> tuple[bytes, str]:
        key = self._key(MANIFEST)

        def get() -> tuple[bytes, str]:
            held = obstore.get(self._objects, key)
            return bytes(held.bytes()), _version(held.meta)

        return self._patiently(MANIFEST, get)

    def commit(self, manifest: bytes, expected: str | None) -> str:
        changed = (failures.AlreadyExistsError, failures.PreconditionError, *([FileNotFoundError] if expected else []))
        try:
            return self._put(MANIFEST, manifest, "create" if expected is None else _update(expected))
        except changed:
            raise ResumeError(
                f"{self.describe(MANIFEST)} was changed by another process since this one last wrote or read it. "
                "Let only one run record to a memory."
            ) from None

    def delete(self, name: str) -> None:
        key = self._key(name)
        with contextlib.suppress(FileNotFoundError):
            self._patiently(name, lambda: obstore.delete(self._objects, key), patience=self.patience[1])

    def lock(self) -> Callable[[], None]:
        return lambda: None

    # -- patience --------------------------------------------------------------------------------

    def _patiently(self, name: str, request: Callable[[], T], *, patience: float | None = None) -> T:
        """Makes a request until it succeeds; what cannot succeed later is not repeated."""
        patience = self.patience[0] if patience is None else patience
        deadline = time.monotonic() + min(patience, AFTER_FAILURE if self._known.failed else patience)
        pause = _FIRST_PAUSE
        while True:
            try:
                answer = request()
                self._known.failed = False
                return answer
            except (FileNotFoundError, failures.AlreadyExistsError, failures.PreconditionError) as error:
                if isinstance(error, FileNotFoundError):  # obstore's words may hold a signed address
                    raise FileNotFoundError(f"{self.describe(name)} does not exist") from None
                raise
            except (failures.NotSupportedError, NotImplementedError) as error:
                raise UnsupportedError(
                    f"{self}: this object store cannot do what a memory needs, such as conditional puts: {_told(error)}"
                ) from None
            except (failures.BaseError, OSError) as error:
                if _is_permanent(error) or time.monotonic() + pause > deadline:
                    self._known.failed = not _is_permanent(error)
                    raise OSError(f"{self.describe(name)}: {_told(error)}") from None
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)


def _ends(span: range) -> tuple[int, int]:
    return span.start, span.stop


def _version(meta: Any) -> str:
    return json.dumps([meta.get("e_tag"), meta.get("version")])


def _update(version: str) -> dict[str, Any]:
    try:
        e_tag, number = json.loads(version)
    except ValueError:
        e_tag, number = version, None
    return {"e_tag": e_tag} | ({"version": number} if number else {})


@lru_cache(maxsize=64)
def _connection(bucket: str, *, retries: int = 0) -> Any:
    """The connection to a bucket; kept, as it holds open connections. Retrying is done here, not in obstore."""
    if bucket.startswith("memory://"):
        return stores.from_url("memory:///")
    plain = any(os.environ.get(name, "").lower() in ("1", "true") for name in ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP"))
    emulated = os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
    options: Any = {"timeout": "600s", "connect_timeout": "10s", "allow_http": plain or emulated}
    try:
        return stores.from_url(bucket, client_options=options, retry_config={"max_retries": retries})
    except (failures.BaseError, ValueError) as error:
        raise SettingError(f"{bucket} cannot be used: {_told(error)}.") from None


def _put_in_parts(address: str, key: str, parts: Iterable[Any]) -> None:
    connection = _connection("/".join(address.split("/", 3)[:3]), retries=10)
    obstore.put(connection, key, iter(parts), use_multipart=True, chunk_size=64 << 20, max_concurrency=2)


def _is_permanent(error: Exception) -> bool:
    kinds = (
        *(failures.PermissionDeniedError, failures.UnauthenticatedError, failures.InvalidPathError),
        failures.UnknownConfigurationKeyError,
    )
    return isinstance(error, kinds) or bool(_CLIENT_ERROR.search(str(error))) or "builder error" in str(error)


def _told(error: Exception) -> str:
    """What an error says, without what may be secret: signatures in addresses, and keys of the environment."""
    text = str(error).partition("\n\nDebug source")[0].replace("\n", " ")
    text = re.sub(r"<\?xml.*?(?:<Code>(\w+)</Code>.*)?$", r"\1", text)
    text = re.sub(r"\?[^\s\"')]*", "", re.sub(r"//[^\s/]*@", "//", text))
    for name, value in os.environ.items():
        if len(value) >= 6 and _SECRET.search(name):
            text = text.replace(value, "…")
    return text[:300].strip()
