"""Object stores on this machine, for tests: obstore's own in main memory, S3 by moto, Azure by azurite.

Each server is started once for the tests of a process and stopped at its end. A test that needs one which is not
installed is skipped, and says so.
"""

from __future__ import annotations

import atexit
import base64
import datetime
import hashlib
import hmac
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from functools import lru_cache
from pathlib import Path

import pytest

from spotlights.memory.store.bucket import BucketStore, _connection
from spotlights.memory.store.cache import Cache

BUCKET = "spotlights-tests"
SECRET = "not-to-be-seen-in-any-message"
_ACCOUNT = "devstoreaccount1"
_ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Published by Microsoft: every emulator has it."""


def new_bucket(kind: str, cache: Cache | None = None) -> BucketStore:
    """An empty place in a bucket of some kind: "memory", "s3" or "az"."""
    pytest.importorskip("obstore", reason="obstore is not installed (pip install 'spotlights[cloud]')")
    {"memory": lambda: None, "s3": s3_server, "az": azure_server}[kind]()
    return BucketStore(f"{kind}://{BUCKET}/{uuid.uuid4().hex}/run.memory", cache, patience=(2.0, 2.0))


@lru_cache
def s3_server() -> str:
    """The endpoint of an S3 server, with the environment set for it."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask_cors") is None:
        pytest.skip("the S3 server moto is not installed (pip install 'moto[s3]' flask flask-cors)")
    command = [sys.executable, str(Path(__file__).with_name("s3_server.py"))]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    atexit.register(server.kill)
    assert server.stdout is not None
    endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
    _open(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"))
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    _connection.cache_clear()
    return endpoint


@lru_cache
def azure_server() -> str:
    """The endpoint of an Azure server, with the environment set for it."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("the Azure server azurite is not installed (make azurite)")
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    options = ["--silent", "--inMemoryPersistence", "--skipApiVersionCheck"]
    _start([program, "--blobHost", "127.0.0.1", "--blobPort", str(port), *options], port)
    _create_container(endpoint)
    os.environ |= {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": endpoint}
    _connection.cache_clear()
    return endpoint


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def _start(command: list[str], port: int) -> None:
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(server.kill)
    deadline = time.monotonic() + 60
    while server.poll() is None and time.monotonic() < deadline:
        try:
            return socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.05)
    pytest.skip(f"{command[0]} did not start")


def _open(request: urllib.request.Request) -> None:
    with urllib.request.urlopen(request, timeout=30):
        pass


def _create_container(endpoint: str) -> None:
    date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    lines = ["PUT", *[""] * 11, f"x-ms-date:{date}", "x-ms-version:2021-12-02", f"/{_ACCOUNT}/{_ACCOUNT}/{BUCKET}"]
    signed = "\n".join([*lines, "restype:container"])
    digest = hmac.new(base64.b64decode(_ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": "2021-12-02",
        "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    url = f"{endpoint}/{_ACCOUNT}/{BUCKET}?restype=container"
    _open(urllib.request.Request(url, method="PUT", headers=headers))
