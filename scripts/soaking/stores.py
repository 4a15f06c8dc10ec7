"""Where a soak's runs upload to: a folder, or a bucket behind a proxy that can be slow and can hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.soaking.expected import digests, listed
from tests.bucket.proxy import Exchange, Proxy, passes, running_proxy
from tests.bucket.server import Server, running_server

BUCKET = "soak"
SLOW_SECONDS = 0.2


class Stores:
    """The folder `folder` and a bucket of the server behind `proxy`."""

    def __init__(self, folder: Path, server: Server, proxy: Proxy) -> None:
        self._folder, self._server, self._proxy = folder, server, proxy
        server.make_bucket(BUCKET)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process that uploads."""
        return self._proxy.environment

    def keys(self, kind: str, run: str) -> dict[str, Any]:
        """Return the keys for uploads of `run` to a `folder` or a `bucket`; none without a kind."""
        if not kind:
            return {}
        return {"upload_folder": f"s3://{BUCKET}/{run}" if kind == "bucket" else str(self._folder / run)}

    def slow(self) -> Callable[[], None]:
        """Let each request wait, until what this returns is called."""

        def waits(exchange: Exchange) -> None:
            time.sleep(SLOW_SECONDS)
            passes(exchange)

        rule = lambda request: waits  # noqa: E731
        self._proxy.rules.append(rule)
        return lambda: self._proxy.rules.remove(rule)

    def hang(self) -> Callable[[], None]:
        """Answer no request, until what this returns is called."""
        is_over = threading.Event()

        def waits(exchange: Exchange) -> None:
            is_over.wait()
            passes(exchange)

        rule = lambda request: waits  # noqa: E731
        self._proxy.rules.append(rule)

        def undo() -> None:
            self._proxy.rules.remove(rule)
            is_over.set()

        return undo

    def differences(self, run: str, root: Path, intact: set[int]) -> list[str]:
        """Return which files of steps in both folders differ. What is only in one is not compared."""
        wrong = []
        for step in sorted(listed(self._folder / run) & intact):
            here, there = digests(root / f"step-{step}"), digests(self._folder / run / f"step-{step}")
            if {name: text for name, text in here.items() if name.endswith(".distcp")} != {
                name: text for name, text in there.items() if name.endswith(".distcp")
            }:
                wrong.append(f"step {step} has other bytes in the folder of uploads")
        return wrong


@contextmanager
def running_stores(folder: Path) -> Iterator[Stores]:
    """Yield stores in `folder` and in a server of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_server() as server, running_proxy(server.endpoint) as proxy:
        yield Stores(folder, server, proxy)
