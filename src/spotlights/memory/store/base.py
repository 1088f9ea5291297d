"""The protocol of a store: all reading, writing, listing and committing of a memory's files goes through these verbs.

A store holds the files of one memory under names such as `memory.json` and `segments/000000-rank0.safetensors`: parts
of letters, digits, `.`, `_` and `-`, joined by `/`. A file appears whole or not at all, and never changes in part. An
absent name raises FileNotFoundError; whatever else goes wrong raises another OSError.

Nothing here needs a file system: a directory and a bucket of objects are both stores. tests/inside/test_stores.py holds
the contract, which runs on every store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import UInt8

Pieces = tuple[Sequence[int], int]
"""Some parts of a file: where each one starts, and how many bytes each has."""


class Store(ABC):
    """The files of one memory. Stores can be pickled and are safe to use from several threads."""

    streams: ClassVar[bool]
    """Whether a piece of a file is always read at the cost of its bytes, so that nobody need fetch ahead."""

    @abstractmethod
    def __str__(self) -> str:
        """The address, as a user would give it."""

    def describe(self, name: str) -> str:
        """A file's address, for messages."""
        return f"{self}/{name}"

    def is_same_place(self, other: Store) -> bool:
        """Whether another store has its files at the same place: what is deleted in one is gone in the other."""
        return self == other

    @abstractmethod
    def at(self, prefix: str) -> Store:
        """The store of those files whose names begin with `prefix/`, under the rest of their names."""

    @abstractmethod
    def size(self, name: str) -> int:
        """A file's size in bytes."""

    def sizes(self) -> dict[str, int]:
        """The sizes of all files, where one request tells them; nothing where asking for each file is as quick."""
        return {}

    def exists(self, name: str) -> bool:
        """Whether there is something under this name, readable or not."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All of a file."""

    @abstractmethod
    def load(self, name: str, span: range, checksum: str) -> UInt8[np.ndarray, "bytes"]:
        """The bytes in a range that must lie within the file, for tensors to view.

        Under a checksum, a file that was changed or replaced since it was first read is an OSError.

        Args:
            name: the file.
            span: the positions.
            checksum: that of the file's content, by which a cache may know it; empty if the content may change.
        """

    @abstractmethod
    def load_pieces(
        self, name: str, span: range, checksum: str, pieces: Pieces, into: UInt8[np.ndarray, "bytes"]
    ) -> bool:
        """Loads pieces of such a range, one behind the other, into a buffer, if that costs no more than their bytes.

        False if it would cost more: then nothing is loaded, and `load` gets the whole range. Without pieces, this tells
        which it is.
        """

    def will_be_read(self, name: str) -> None:  # noqa: B027 (a store need not do anything)
        """A hint that all of a file will soon be read, where it lies on a disk that can read ahead."""

    @abstractmethod
    def write(self, name: str, blocks: Iterable[UInt8[np.ndarray, "bytes"]], *, new: bool = False) -> None:
        """Writes a file from blocks of bytes, one after the other. When this returns, the file survives a power cut.

        A file of the same name is replaced; or, if the file is to be new, raises a FileExistsError. If writing fails,
        nothing has changed.
        """

    @abstractmethod
    def committed(self) -> tuple[bytes, str]:
        """The manifest, and its version: what `commit` expects."""

    @abstractmethod
    def commit(self, manifest: bytes, expected: str | None) -> str:
        """Replaces the manifest if its version is the expected one (None: if there is none); returns the new version.

        Of several processes that expect the same version, one succeeds. The others get a ResumeError.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """The names that begin with a prefix, in no particular order. They may include unfinished files of a killed
        process (`format.names.UNFINISHED`)."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Deletes a file; nothing happens if there is none."""

    @abstractmethod
    def lock(self) -> Callable[[], None]:
        """Keeps other writers out until the returned function is called, or the process ends.

        A convenience: a second writer hears at once, by a ResumeError, what else its first `commit` would tell. A store
        that cannot lock does nothing.
        """
