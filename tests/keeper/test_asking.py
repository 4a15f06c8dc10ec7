"""A keeper that ends between a request and its answer is none, whatever it said before."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.descriptors import num_open, wait_for_open
from tests.keeper.listening import listening
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.memory.keeper import messages
from torchtitan_lite.memory.keeper.client import Keeper, socket_path


@contextmanager
def ending_at(path: Path, last: str) -> Iterator[list[str]]:
    """Answer requests at `path`, and hang up at the first one that asks for `last`; yield the requests."""
    asked: list[str] = []

    def serve(listener: socket.socket) -> None:
        while last not in asked:
            try:
                connection, _ = listener.accept()
            except OSError:  # The test has failed.
                return
            with connection, suppress(OSError):
                while request := connection.recv(1 << 17):
                    asked.append(json.loads(request)["what"])
                    if asked[-1] == last:
                        break
                    messages.send(connection, {})

    with listening(path, serve):
        yield asked


@contextmanager
def ending_with(path: Path, process: int) -> Iterator[None]:
    """Answer one request, to end, with the process `process` as the keeper's own, as a keeper does that ends."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 17)
            pidfd = os.pidfd_open(process)
            messages.send(connection, {}, [pidfd])
            os.close(pidfd)

    with listening(path, serve):
        yield


@pytest.fixture
def asking(runtime: Path, tmp_path: Path) -> Keeper:
    """The client of a keeper that a test plays."""
    socket_path(tmp_path, runtime).parent.mkdir(mode=0o700)
    return Keeper(tmp_path, 600.0, runtime=runtime)


def test_one_that_ends_before_its_process_is_watched_is_not_joined(asking: Keeper, runtime: Path) -> None:
    before = num_open()
    with ending_at(socket_path(asking.folder, runtime), "hello") as asked:
        with pytest.raises(KeeperUnavailable, match="the keeper closed the connection without an answer"):
            asking.join("first")
        assert asked == ["join", "hello"]
    assert not asking.has_ended(), "its process may be another one by now"
    wait_for_open(before)


def test_one_that_ends_while_an_image_is_kept_keeps_none(asking: Keeper, runtime: Path) -> None:
    fds = (os.memfd_create("arena"), os.memfd_create("mark"))
    with ending_at(socket_path(asking.folder, runtime), "keep") as asked:
        with pytest.raises(KeeperUnavailable, match="the keeper closed the connection without an answer"):
            asking.keep("a", fds)
        assert asked == ["hello", "keep"], "first whether it answers at all"
    messages.close_all(fds)


def test_nothing_has_to_be_dropped_left_or_finished_at_one_that_ends(asking: Keeper, runtime: Path) -> None:
    path = socket_path(asking.folder, runtime)
    acts = {"drop": lambda: asking.drop(["a"]), "leave": asking.leave, "finish": asking.finish}
    for what, act in acts.items():
        with ending_at(path, what) as asked:
            act()
            assert asked[-1] == what
        path.unlink()
    with ending_at(path, "list"):
        assert asking.held() == []
    path.unlink()
    with ending_at(path, "other"):
        assert asking.wait_until_unmapped(0.0, "")
    path.unlink()
    with ending_at(path, "hello"):
        assert asking.describe() is None


def test_a_person_who_ends_one_waits_until_its_memory_is_free(asking: Keeper, runtime: Path) -> None:
    with (
        subprocess.Popen(["sleep", "0.5"]) as keeper,
        ending_with(socket_path(asking.folder, runtime), keeper.pid),
    ):
        assert asking.end() == ()
        assert keeper.poll() == 0, "it had ended before the answer came back"
