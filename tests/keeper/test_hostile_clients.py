"""A keeper answers whatever it is sent, stays alive, and holds nothing but memory and processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.descriptors import opened
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.memory.keeper import messages
from torchtitan_lite.memory.keeper.client import Keeper, socket_path

Image = tuple[int, int]
OTHER_USER = 65534
NO_REQUESTS = [
    b"x",
    b"[]",
    b"null",
    b'{"what": "hello"}',
    b'{"version": 2, "what": "hello"}',
    b'{"version": 1}',
    b'{"version": 1, "what": "explode"}',
    b'{"version": 1, "what": ["list"]}',
    b'{"version": 1, "what": "list"}',
    b'{"version": 1, "what": "take", "name": 7}',
    b'{"version": 1, "what": "drop", "names": "all"}',
    b'{"version": 1, "what": "drop", "names": [1]}',
    b'{"version": 1, "what": "leave", "member": "\\u0000"}',
    b'{"version": 1, "what": "join", "member": "a", "start": "b", "ttl_seconds": "long"}',
    b'{"version": 1, "what": "join", "member": "a", "start": "b", "ttl_seconds": 1}',
    b'{"version": 1, "what": "join", "member": "a", "start": "b", "ttl_seconds": -1}',
    b'{"version": 1, "what": "join", "member": "a", "start": "b", "ttl_seconds": NaN}',
    b'{"version": 1, "what": "join", "member": "a", "start": "b", "ttl_seconds": 1' + b"0" * 400 + b"}",
    b'{"version": 1, "what": "keep", "name": "", "start": "b"}',
    b"[" * 100_000,
    b" " * 200_000,
]


@pytest.fixture
def path(keeper: Keeper, runtime: Path) -> Path:
    return socket_path(keeper.folder, runtime)


def sent(path: Path, data: bytes, fds: Sequence[int] = ()) -> bytes:
    """Send `data` as it is; return the answer, empty if it hangs up."""
    with messages.new_socket() as connection:
        connection.settimeout(30.0)
        connection.connect(str(path))
        if fds:
            socket.send_fds(connection, [data], list(fds))
        else:
            connection.send(data)
        return connection.recv(1 << 17)


def targets(keeper: Keeper) -> list[str]:
    """Return what the keeper's descriptors are, without its connections."""
    described = keeper.describe()
    assert described is not None
    return sorted(name for name in opened(described.pid) if not name.startswith("socket:"))


def test_a_request_that_is_none_gets_an_error_and_changes_nothing(keeper: Keeper, path: Path, image: Image) -> None:
    before = targets(keeper)
    for data in NO_REQUESTS:
        for fds in ((), image):
            assert b'"error"' in sent(path, data, fds), data[:99]
    assert targets(keeper) == before
    assert keeper.held() == []


def test_it_holds_no_pipe_no_file_and_no_process_in_the_place_of_memory(
    keeper: Keeper, path: Path, image: Image, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    before = targets(keeper)
    ours, its = os.pipe()
    on_disk, own = os.open(tmp_path / "file", os.O_RDWR), os.pidfd_open(os.getpid())
    keep = b'{"version": 1, "what": "keep", "name": "a", "start": "b"}'
    join = b'{"version": 1, "what": "join", "member": "a", "start": "b", "ttl_seconds": 1}'
    for fd in (ours, its, on_disk, own):
        assert b'"error"' in sent(path, keep, (image[0], fd))
    for fds in ((ours,), (on_disk,), image[:1], (own, own)):
        assert b'"error"' in sent(path, join, fds)
    for fds in ((ours,), image, (ours, *image)):
        assert b'"error"' in sent(path, b'{"version": 1, "what": "hello"}', fds)
    for fd in (ours, its, on_disk, own):
        os.close(fd)
    assert targets(keeper) == before


def test_it_holds_256_images_and_refuses_one_more(keeper: Keeper, image: Image) -> None:
    keeper.join("first")
    for number in range(256):
        keeper.keep(f"{number:0>200}", image)
    with pytest.raises(KeeperUnavailable, match="256 in-memory snapshots are held already"):
        keeper.keep("another", image)
    keeper.keep(f"{7:0>200}", image)
    found = keeper.held()
    assert len(found) == 256
    for each in found:
        each.close()
    keeper.drop([each.name for each in found])
    assert keeper.held() == []
    assert not [target for target in targets(keeper) if "memfd" in target]


def test_a_name_that_is_none_is_refused_before_it_is_sent(keeper: Keeper, image: Image) -> None:
    for name in ("", "a" * 201, "a\nb", "é", "\x7f"):
        with pytest.raises(KeeperUnavailable, match="is no name"):
            keeper.keep(name, image)


def test_connections_that_say_nothing_do_not_keep_others_out(keeper: Keeper, path: Path) -> None:
    silent = [messages.new_socket() for _ in range(600)]
    for connection in silent:
        connection.connect(str(path))
    assert keeper.describe() is not None
    for connection in silent:
        connection.close()


def test_one_that_hangs_up_before_its_answer_is_forgotten(keeper: Keeper, path: Path, image: Image) -> None:
    before = targets(keeper)
    for _ in range(20):
        with messages.new_socket() as connection:
            connection.connect(str(path))
            messages.send(connection, {"what": "keep", "name": "a", "start": ""}, image)
    keeper.drop(["a"])
    # What was replaced is closed while answers are sent, and the one who would have waited for it has gone.
    assert any(targets(keeper) == before for _ in range(10_000))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_user_gets_no_answer(keeper: Keeper, path: Path) -> None:
    for each in (path, path.parent, path.parent.parent):
        each.chmod(0o777)  # Else the folder keeps it out.
    os.seteuid(OTHER_USER)
    try:
        with messages.new_socket() as connection:
            connection.settimeout(30.0)
            connection.connect(str(path))
            assert connection.recv(100) == b""
    finally:
        os.seteuid(0)
        path.parent.chmod(0o700)
