"""Where a memory's files are. `store_at` finds the store for an address."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from spotlights.errors import SettingError
from spotlights.memory.store.base import Store
from spotlights.memory.store.bucket import SCHEMES, BucketStore
from spotlights.memory.store.cache import CACHE_BYTES, Cache
from spotlights.memory.store.local import LocalStore

__all__ = ["CACHE_BYTES", "BucketStore", "Cache", "LocalStore", "Store", "store_at"]


def store_at(address: str | os.PathLike[str], cache: Cache | None = None) -> Store:
    """The store at an address: a path, `file://…`, or a bucket's `s3://…`, `gs://…`, `az://…`.

    Args:
        address: where the files are.
        cache: for what is read from a bucket; no other store needs one.
    """
    text = os.fspath(address)
    if "\0" in text:
        raise SettingError(f"{text!r} is not a path: it has a null character.")
    if not isinstance(address, str):  # pathlib makes one slash of two
        text = re.sub(rf"^({'|'.join(SCHEMES)}):/(?!/)", r"\1://", text)
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        return LocalStore(Path(text))
    split = urlsplit(text)
    if split.scheme in SCHEMES:
        return BucketStore(f"{split.scheme}://{text.partition('://')[2].rstrip('/')}", cache)
    if split.scheme != "file":
        known = ", ".join(f"{scheme}://" for scheme in ("file", *SCHEMES))
        raise SettingError(
            f"{text}: there is no store for {split.scheme}:// addresses. Give a path, or an address with one of these "
            f"schemes: {known}."
        )
    if split.netloc not in ("", "localhost"):
        raise SettingError(f"{text} is on another machine, {split.netloc}. Give file:///PATH with three slashes.")
    return LocalStore(Path(unquote(split.path)))
