"""What answers in the place of a keeper may be anything: it is refused with one line, and nothing of it is kept."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.keeper.listening import listening
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.memory.keeper import client, messages
from torchtitan_lite.memory.keeper.client import Keeper, socket_path

Image = tuple[int, int]
Reply = tuple[bytes, Sequence[int]]
OTHER_USER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def asking(runtime: Path, tmp_path: Path) -> Keeper:
    """The client of a keeper that a test plays."""
    return Keeper(tmp_path, 600.0, runtime=runtime)


@pytest.fixture
def path(runtime: Path, tmp_path: Path) -> Path:
    """The path of the keeper's socket, in a private folder."""
    path = socket_path(tmp_path, runtime)
    path.parent.mkdir(mode=0o700)
    return path


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))  # noqa: PTH208  # numbers, not paths


def message(**fields: Any) -> bytes:
    return json.dumps({"version": messages.VERSION, **fields}).encode()


@contextmanager
def answering(path: Path, answer: Callable[[bytes], Reply | None]) -> Iterator[list[bytes]]:
    """Answer each request at `path` with what `answer` returns, which is sent as it is; hang up at None."""
    asked: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):  # The client has hung up.
                while request := connection.recv(1 << 17):
                    asked.append(request)
                    if (reply := answer(request)) is None:
                        break
                    data, fds = reply
                    socket.send_fds(connection, [data], list(fds)) if fds else connection.send(data)

    with listening(path, serve):
        yield asked


@pytest.mark.parametrize(
    ("answer", "finding"),
    [
        (b"", "closed the connection without an answer"),
        (b"\xff\x00", "not JSON"),
        (b'{"version": 1, "names": ["a"', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"names": []}', "format version None, this one is 1"),
        (b'{"version": 2, "names": []}', "format version 2, this one is 1"),
        (b'{"version": ' + b"9" * 4000 + b"}", "format version 999"),
        (message(error="no\nno"), "refuses: no no"),
        (message(names={"a": 1}), "expected a list of names"),
        (message(names=["a", 1]), "expected a list of names"),
        (message(names=["a\n"]), "expected a list of names"),
        (message(names=["é"]), "expected a list of names"),
        (message(names=["a" * 201]), "expected a list of names"),
        (message(names=["a"] * 257), "257 names, expected at most 256"),
        (message(names=["a"] * 40_000), "longer than 131072 bytes"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_answer_that_is_none_is_refused_with_one_line(
    asking: Keeper, path: Path, answer: bytes, finding: str
) -> None:
    with answering(path, lambda _: (answer, ())), pytest.raises(KeeperUnavailable, match=finding) as refusal:
        asking.held() if answer else asking.join("first")
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_a_keeper_of_another_version_is_neither_used_nor_replaced(asking: Keeper, path: Path) -> None:
    with answering(path, lambda _: (b'{"version": 2}', ())):
        for act in (asking.start, lambda: asking.join("first"), asking.leave, asking.finish, asking.end):
            with pytest.raises(KeeperUnavailable, match="format version 2"):
                act()
        assert path.is_socket()


def test_a_silent_keeper_costs_no_more_than_a_bounded_wait(
    asking: Keeper, path: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_lite.memory.keeper.client.ANSWER_SECONDS", 0.05)
    with messages.new_socket() as listener:
        listener.bind(str(path))
        listener.listen(1)
        acts = (asking.held, asking.start, lambda: asking.join("first"), asking.leave, asking.finish, asking.end)
        for act in (*acts, lambda: asking.keep("a", image), lambda: asking.drop(["a"]), lambda: asking.describe()):
            with pytest.raises(KeeperUnavailable, match=r"did not answer within 0\.05 s"):
                act()


def test_a_keeper_that_answers_for_ever_costs_no_more_than_one_bounded_wait(
    asking: Keeper, path: Path, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchtitan_lite.memory.keeper.client.ANSWER_SECONDS", 0.05)
    before = open_fds()
    silence = threading.Event()

    def answer(request: bytes) -> Reply:
        if b"take" not in request:
            return message(names=["a"] * 256), ()
        silence.wait(0.01)
        return message(), image

    with answering(path, answer) as asked, pytest.raises(KeeperUnavailable, match=r"did not answer within 0\.05 s"):
        asking.held()
    assert len(asked) < 256
    assert open_fds() == before


@pytest.mark.parametrize("kind", ["pipe", "file", "read only", "device", "one", "none", "three", "in a named file"])
def test_descriptors_that_are_no_memory_are_refused_and_closed(
    asking: Keeper, path: Path, image: Image, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "file").write_bytes(b"x" * 4096)
    (path.parent / "file").write_bytes(b"x" * 4096)  # In the memory of the system, but others can open it.
    opened = [*os.pipe(), os.open(tmp_path / "file", os.O_RDWR), os.open(path.parent / "file", os.O_RDWR)]
    opened += [os.open(f"/proc/self/fd/{image[0]}", os.O_RDONLY), os.open("/dev/zero", os.O_RDWR)]
    pipe, _, on_disk, named, read_only, device = opened
    sent = {
        "pipe": (image[0], pipe),
        "file": (image[0], on_disk),
        "in a named file": (image[0], named),
        "read only": (read_only, image[1]),
        "device": (device, image[1]),
        "one": image[:1],
        "none": (),
        "three": (*image, image[0]),
    }[kind]
    finding = "something other than memory" if kind != "three" else "more descriptors"
    before = open_fds()

    def answer(request: bytes) -> Reply:
        return (message(), sent) if b"take" in request else (message(names=["a", "b"]), ())

    with answering(path, answer), pytest.raises(KeeperUnavailable, match=finding):
        asking.held()
    assert open_fds() == before
    with pytest.raises(KeeperUnavailable, match="none of a file in memory"):
        asking.keep("a", (sent + image)[:2] if kind not in ("one", "none", "three") else (pipe, on_disk))
    for fd in opened:
        os.close(fd)


def test_descriptors_with_a_bad_answer_are_closed(asking: Keeper, path: Path, image: Image) -> None:
    before = open_fds()
    for data in (b"no message", message(error="no"), message(names=[])):
        with answering(path, lambda _, data=data: (data, image)):
            for act in (asking.held, lambda: asking.join("first"), asking.leave, lambda: asking.keep("a", image)):
                with suppress(KeeperUnavailable):
                    act()
        path.unlink()
    assert open_fds() == before


def test_an_image_that_goes_while_it_is_listed_is_skipped(asking: Keeper, path: Path, image: Image) -> None:
    def answer(request: bytes) -> Reply:
        if b"take" not in request:
            return message(names=["a", "b"]), ()
        return (message(error="there is no such name"), ()) if b'"a"' in request else (message(), image)

    with answering(path, answer):
        (found,) = asking.held()
    assert (found.name, found.is_mapped) == ("b", True), "an answer without is_mapped counts as mapped"
    found.close()


@as_root
def test_a_socket_of_another_user_gets_no_request(asking: Keeper, path: Path) -> None:
    with messages.new_socket() as listener:
        listener.bind(str(path))
        os.seteuid(OTHER_USER)
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        for act in (asking.held, asking.start, lambda: asking.join("first"), asking.finish):
            with pytest.raises(KeeperUnavailable, match=f"user {OTHER_USER} answers in place of the keeper"):
                act()
            connection, _ = listener.accept()
            assert connection.recv(1) == b""
            connection.close()


@pytest.mark.parametrize(
    ("kind", "finding"),
    [
        ("symbolic link", "expected a drwx------ of user .*, found lrwxrwxrwx of user"),
        ("file", "found -rw------- of user"),
        ("shared", "found drwxrwx--- of user"),
        pytest.param("another user's", f"found drwx------ of user {OTHER_USER}; remove it", marks=as_root),
    ],
)
def test_a_folder_that_is_not_private_is_refused(
    asking: Keeper, runtime: Path, tmp_path: Path, kind: str, finding: str
) -> None:
    folder = runtime / "torchtitan_lite"
    match kind:
        case "symbolic link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(tmp_path / "elsewhere")
        case "file":
            folder.touch(mode=0o600)
        case "shared":
            folder.mkdir()
            folder.chmod(0o770)
        case "another user's":
            folder.mkdir(mode=0o700)
            os.chown(folder, OTHER_USER, OTHER_USER)
    for act in (asking.start, asking.held, lambda: asking.join("first"), asking.end):
        with pytest.raises(KeeperUnavailable, match=finding):
            act()
    assert not list((tmp_path / "elsewhere").iterdir() if (tmp_path / "elsewhere").exists() else ())


def test_a_folder_with_a_long_path_gets_a_socket_with_a_short_one(runtime: Path, tmp_path: Path) -> None:
    long = runtime / ("x" * 100)
    long.mkdir()
    assert socket_path(tmp_path, runtime).parent == runtime / "torchtitan_lite"
    assert len(os.fsencode(socket_path(tmp_path, long))) < 108
    assert long not in socket_path(tmp_path, long).parents
    assert socket_path(tmp_path, runtime / "missing") == socket_path(tmp_path, None)
    assert socket_path(tmp_path, runtime) != socket_path(tmp_path / "other", runtime)


def test_two_names_of_a_folder_lead_to_one_keeper(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert socket_path(tmp_path / "link", runtime) == socket_path(tmp_path / "real" / ".." / "real", runtime)


def test_without_memfd_or_pidfd_one_line_says_so(
    asking: Keeper, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(KeeperUnavailable, match=r"refuses memfd_create or pidfd_open: .*Function not implemented"):
        asking.start()
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(KeeperUnavailable, match=r"refuses memfd_create or pidfd_open: .*pidfd_open"):
        asking.start()
    assert not list(runtime.iterdir())


def test_hosts_that_share_a_folder_have_sockets_of_their_own(
    asking: Keeper, path: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "host_id", lambda: "another")
    assert socket_path(tmp_path, runtime) != path


def test_a_folder_that_is_a_loop_of_links_has_no_keeper(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert Keeper(tmp_path / "loop", 600.0, runtime=runtime).held() == []


def test_without_such_sockets_there_is_no_keeper_to_look_at(asking: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> socket.socket:
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(messages, "new_socket", refused)
    assert asking.held() == []
    asking.finish()
