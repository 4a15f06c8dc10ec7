"""A proxy in front of the S3 server, which does to requests what networks and stores do.

Requests are numbered as they arrive. Each rule looks at a request and returns an action or None; the first action
counts, and a request without one passes. An action forwards the request, or does not, and answers, or does not.
"""

from __future__ import annotations

import fnmatch
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.bucket.server import environment_of
from tests.http_server import serving

PRIVATE_TEXT = "https://signed.example/?X-Amz-Signature=5ecret"
"""In the body of every error that the proxy answers with: no message of ours may have it."""
CONDITIONS = ("if-match", "if-none-match")


class Request(NamedTuple):
    number: int
    """From 1."""
    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    """Names in lower case."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Entry(NamedTuple):
    """One line of the log."""

    number: int
    method: str
    path: str
    status: int | None
    """What the client was sent; None if the connection was cut without an answer."""


@dataclass
class Exchange:
    """One request under way, as an action sees it."""

    request: Request
    body: bytes
    proxy: Proxy
    _handler: BaseHTTPRequestHandler
    _is_over: bool = False

    def forward(self, without: tuple[str, ...] = ()) -> Answer:
        """Send the request to the server, without the headers `without`; return the answer."""
        connection = HTTPConnection(self.proxy.upstream, timeout=60)
        headers = {name: value for name, value in self.request.headers.items() if name not in ("host", *without)}
        try:
            connection.request(self.request.method, self.request.path, self.body, headers)
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def send(self, answer: Answer, num_bytes: int | None = None) -> None:
        """Send `answer` to the client, of its body the first `num_bytes` only, after which the connection is cut."""
        # Before the client hears: a test that has its answer finds it in the log.
        self._end(answer.status if num_bytes is None else None)
        handler = self._handler
        handler.send_response_only(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                handler.send_header(name, value)
        length = next((v for n, v in answer.headers.items() if n.lower() == "content-length"), len(answer.body))
        handler.send_header("Content-Length", str(length if self.request.method == "HEAD" else len(answer.body)))
        handler.end_headers()
        if self.request.method != "HEAD":
            handler.wfile.write(answer.body[:num_bytes])
        if num_bytes is not None:
            self.reset()

    def reset(self) -> None:
        """Cut the connection."""
        self._end(None)
        connection = self._handler.connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._handler.close_connection = True
        os.close(connection.detach())

    def _end(self, status: int | None) -> None:
        if not self._is_over:
            self._is_over = True
            self.proxy.note(Entry(self.request.number, self.request.method, self.request.path, status))


Action = Callable[[Exchange], None]
Rule = Callable[[Request], Action | None]


def passes(exchange: Exchange) -> None:
    exchange.send(exchange.forward())


def resets(exchange: Exchange) -> None:
    """Cut the connection before the server hears of the request."""
    exchange.reset()


def loses_answer(exchange: Exchange) -> None:
    """Have the request carried out, and cut the connection instead of an answer."""
    exchange.forward()
    exchange.reset()


def hangs(exchange: Exchange) -> None:
    """Neither forward nor answer, until the proxy ends."""
    exchange.proxy.ending.wait()
    exchange.reset()


def strips_conditions(exchange: Exchange) -> None:
    """Forward without the conditions: a store that ignores them."""
    exchange.send(exchange.forward(without=CONDITIONS))


def answers(status: int, code: str) -> Action:
    """Return the action that answers with an error of S3, without forwarding."""
    text = f"<Error><Code>{code}</Code><Message>{PRIVATE_TEXT}</Message></Error>"
    return lambda exchange: exchange.send(Answer(status, {"Content-Type": "application/xml"}, text.encode()))


def cuts(num_bytes: int) -> Action:
    """Return the action that forwards, and cuts the connection after `num_bytes` of the body of the answer."""
    return lambda exchange: exchange.send(exchange.forward(), num_bytes)


def waits_for(event: threading.Event) -> Action:
    """Return the action that holds the request until `event`."""

    def action(exchange: Exchange) -> None:
        event.wait()
        passes(exchange)

    return action


def calls(before: Callable[[], object] = bool, after: Callable[[], object] = bool, then: Action = passes) -> Action:
    """Return the action `then` with a call before the request is forwarded and one after it was answered."""

    def action(exchange: Exchange) -> None:
        before()
        then(exchange)
        after()

    return action


def at(number: int, action: Action) -> Rule:
    """Return the rule that request `number` meets `action`."""
    return lambda request: action if request.number == number else None


def where(action: Action, method: str = "*", path: str = "*", times: float = float("inf")) -> Rule:
    """Return the rule that the first `times` requests with a method and a path of these patterns meet `action`."""
    lock, left = threading.Lock(), times

    def rule(request: Request) -> Action | None:
        nonlocal left
        if not (fnmatch.fnmatchcase(request.method, method) and fnmatch.fnmatchcase(request.path, path)):
            return None
        with lock:
            left -= 1
            return action if left >= 0 else None

    return rule


@dataclass
class Proxy:
    """A proxy that runs."""

    upstream: str
    """HOST:PORT of the server."""
    endpoint: str = ""
    rules: list[Rule] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)
    _log: list[Entry] = field(default_factory=list)
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a program needs to reach the server through this proxy."""
        return environment_of(self.endpoint)

    @property
    def log(self) -> list[Entry]:
        """What became of each request that is over, in the order of the numbers."""
        with self._lock:
            return sorted(self._log, key=lambda entry: entry.number)

    def again(self, *rules: Rule) -> None:
        """Empty the log, number from 1 again, and replace the rules."""
        with self._lock:
            self._log.clear()
            self._count = 0
            self.rules[:] = rules

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Carry out one request."""
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self._lock:
            self._count += 1
            request = Request(self._count, handler.command, handler.path, headers)
            rules = list(self.rules)
        action = next((action for rule in rules if (action := rule(request)) is not None), passes)
        try:
            action(Exchange(request, body, self, handler))
        except OSError:
            # The client gave up waiting, or the server has ended.
            handler.close_connection = True

    def note(self, entry: Entry) -> None:
        """Add `entry` to the log."""
        with self._lock:
            self._log.append(entry)


FATES = ("before", "during", "after")
"""When a request is cut: before it is sent on, while its answer is on its way, or once that has arrived."""


def killing(started: Future[int], fate: str) -> Action:
    """Return an action that kills the process `started` around a request, as `fate` says."""

    def action(exchange: Exchange) -> None:
        answer = None if fate == "before" else exchange.forward()
        if answer is not None and fate == "after":
            exchange.send(answer)
        os.kill(started.result(60), signal.SIGKILL)
        if fate != "after":
            exchange.reset()

    return action


@contextmanager
def running_proxy(endpoint: str) -> Iterator[Proxy]:
    """Yield a proxy in front of the server at `endpoint`."""
    proxy = Proxy(urlsplit(endpoint).netloc)
    with serving(_handler_of(proxy)) as address:
        proxy.endpoint = f"http://{address}"
        try:
            yield proxy
        finally:
            proxy.ending.set()


def _handler_of(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            proxy.handle(self)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
