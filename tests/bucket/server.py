"""An S3 server for tests: moto, in a process of its own on 127.0.0.1."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

SIGNATURE = {"Authorization": "AWS4-HMAC-SHA256 Credential=A/20260101/us-east-1/s3/aws4_request, Signature=0"}
"""The server does not check it, but lets no request without one read what another has written."""
PROGRAM = Path(__file__).with_name("moto_server.py")


@dataclass(frozen=True)
class Server:
    """A server that runs; its buckets are in its memory."""

    endpoint: str
    """http://127.0.0.1:PORT"""
    pid: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a program needs to reach it."""
        return environment_of(self.endpoint)

    def make_bucket(self, name: str) -> None:
        """Create the bucket `name`; it may exist."""
        assert self.request("PUT", f"/{name}")[0] == 200

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return the status and the body of the answer to a request."""
        connection = HTTPConnection(urlsplit(self.endpoint).netloc, timeout=60)
        try:
            connection.request(method, path, body, SIGNATURE)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def environment_of(endpoint: str) -> dict[str, str]:
    """Return the variables that a program needs to reach the S3 server at `endpoint`."""
    return {
        "AWS_ACCESS_KEY_ID": "AKIATESTTESTTEST",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-tests",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        # A proxy of the machine is not for 127.0.0.1.
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextmanager
def running_server() -> Iterator[Server]:
    """Yield a new server without buckets; end it after the block."""
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            # It listens already when it prints its port.
            yield Server(f"http://127.0.0.1:{int(process.stdout.readline())}", process.pid)
        finally:
            process.kill()
