"""An Azure Blob server for tests: azurite, if it is installed, on 127.0.0.1."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.client import HTTPConnection

PROGRAM = shutil.which("azurite-blob")
ACCOUNT = "devstoreaccount1"
# The one that azurite's documentation gives to everybody.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_VERSION = "2021-12-02"


@contextmanager
def running_azurite(container: str) -> Iterator[dict[str, str]]:
    """Yield the variables that a program needs to reach a new server with the empty `container`."""
    assert PROGRAM is not None
    port = _free_port()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    with subprocess.Popen([PROGRAM, *options, "--blobPort", str(port)], stdout=subprocess.DEVNULL) as process:
        try:
            _make_container(port, container)
            yield {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                "AZURE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
                "AZURE_ALLOW_HTTP": "true",
                "NO_PROXY": "127.0.0.1",
                "no_proxy": "127.0.0.1",
            }
        finally:
            process.kill()


def _make_container(port: int, name: str) -> None:
    """Create a container, as soon as the server listens."""
    date = formatdate(usegmt=True)
    signed = f"PUT{11 * chr(10)}\nx-ms-date:{date}\nx-ms-version:{_VERSION}\n"
    signed += f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": date, "x-ms-version": _VERSION, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}
    deadline = time.monotonic() + 60
    while True:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
            answer = connection.getresponse()
            assert answer.status == 201, answer.read()
            return
        except ConnectionError:
            assert time.monotonic() < deadline, "azurite does not listen"
            time.sleep(0.05)
        finally:
            connection.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
