"""What goes over a socket arrives completely or not at all; what a descriptor is, is found out without trusting it."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.descriptors import num_open, wait_for_open
from torchtitan_lite.memory.keeper import messages
from torchtitan_lite.memory.keeper.messages import BadMessage

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in ends:
        end.settimeout(60.0)
    yield ends
    for end in ends:
        end.close()


def message_of(num_bytes: int) -> dict[str, str]:
    """Return a message that is sent as `num_bytes`."""
    return {"text": "x" * (num_bytes - len('{"version":1,"text":""}'))}


def test_the_longest_message_arrives_and_a_longer_one_is_not_sent(pair: Pair) -> None:
    longest = message_of(messages.MAX_MESSAGE_BYTES)
    messages.send(pair[0], longest)
    assert messages.receive(pair[1]) == ({"version": messages.VERSION, **longest}, [])
    with pytest.raises(BadMessage, match=f"a message of {messages.MAX_MESSAGE_BYTES + 1} bytes is too long"):
        messages.send(pair[0], message_of(messages.MAX_MESSAGE_BYTES + 1))
    pair[0].close()
    with pytest.raises(EOFError):
        messages.receive(pair[1])


def test_a_message_that_was_cut_is_refused(pair: Pair) -> None:
    pair[0].send(b"7" * (messages.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(BadMessage, match="longer than 131072 bytes"):
        messages.receive(pair[1])


@pytest.mark.parametrize("count", range(5))
def test_two_descriptors_arrive_and_more_are_refused_and_closed(pair: Pair, count: int) -> None:
    before = num_open()
    own = [os.memfd_create(f"{number}") for number in range(count)]
    messages.send(pair[0], {}, own)
    if count <= messages.MAX_FDS:
        _, received = messages.receive(pair[1])
        assert len(received) == count
        assert all(map(os.path.sameopenfile, own, received))
        assert not any(map(os.get_inheritable, received)), "a program that is started gets none"
        messages.close_all(received)
    else:
        with pytest.raises(BadMessage, match="more descriptors than expected"):
            messages.receive(pair[1])
    messages.close_all(own)
    wait_for_open(before)


def test_descriptors_that_this_process_may_not_open_are_an_error(pair: Pair) -> None:
    fds = (os.memfd_create("a"), os.memfd_create("b"))
    messages.send(pair[0], {}, fds)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(fds) + 2, limits[1]))
    try:
        with pytest.raises(BadMessage, match="than this process may open"):
            messages.receive(pair[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        messages.close_all(fds)


@pytest.mark.parametrize("data", [b"{}", b'{"version": 0}', b'{"version": "1"}', b"[]", b"\xff", b'{"version": 1'])
def test_what_is_no_message_closes_the_descriptors_that_came_with_it(pair: Pair, data: bytes) -> None:
    fd = os.memfd_create("a")
    before = num_open()
    socket.send_fds(pair[0], [data], [fd])
    with pytest.raises(BadMessage):
        messages.receive(pair[1])
    wait_for_open(before)
    os.close(fd)


def test_the_other_end_is_known_by_its_user_and_process(pair: Pair) -> None:
    assert messages.peer_of(pair[0]) == (os.getpid(), os.geteuid())


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("a", True),
        (" ", True),
        ("a" * 200, True),
        ("a" * 201, False),
        ("", False),
        ("é", False),
        ("a\n", False),
        (7, False),
        (None, False),
        (["a"], False),
    ],
)
def test_a_name_is_a_short_line_of_printable_ascii(name: object, is_one: bool) -> None:
    assert messages.is_name(name) == is_one


def test_shared_memory_is_a_file_in_memory_without_a_name_that_can_be_written(tmp_path: Path) -> None:
    memory = os.memfd_create("a")
    on_disk = tmp_path / "file"
    on_disk.touch()
    others = {
        "read only": os.open(f"/proc/self/fd/{memory}", os.O_RDONLY),
        "write only": os.open(f"/proc/self/fd/{memory}", os.O_WRONLY),
        "a file": os.open(on_disk, os.O_RDWR),
        "a folder": os.open(tmp_path, os.O_RDONLY),
        "a device": os.open(os.devnull, os.O_RDWR),
        "a pidfd": os.pidfd_open(os.getpid()),
    }
    assert messages.is_shared_memory(memory)
    fcntl.fcntl(memory, fcntl.F_SETFL, os.O_APPEND)
    assert messages.is_shared_memory(memory), "other flags do not matter"
    assert [what for what, fd in others.items() if messages.is_shared_memory(fd)] == []
    on_disk.unlink()
    assert not messages.is_shared_memory(others["a file"]) or _is_in_memory(tmp_path)
    messages.close_all([memory, *others.values()])
    assert not messages.is_shared_memory(memory), "it is closed"


def _is_in_memory(folder: Path) -> bool:
    """Return whether `folder` is in a tmpfs, whose files without a name are as good as a memfd."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    point = max((mount for mount in mounts if folder.is_relative_to(mount[1])), key=lambda mount: len(mount[1]))
    return point[2] == "tmpfs"


def test_a_process_is_known_by_its_pidfd_until_it_has_ended() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    pidfd, own, pipe = os.pidfd_open(child), os.pidfd_open(os.getpid()), os.pipe()
    os.waitpid(child, 0)
    assert [messages.is_process(fd) for fd in (pidfd, own, *pipe)] == [True, True, False, False]
    assert [messages.pid_of(fd) for fd in (pidfd, own, *pipe)] == [0, os.getpid(), 0, 0]
    messages.close_all([pidfd, own, *pipe])
    assert not messages.is_process(own)
    assert messages.pid_of(own) == 0
