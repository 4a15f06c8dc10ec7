"""Connections between watchers: complete messages of this job, and nothing else."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Iterator

import pytest

from torchtitan_lite.hangs.link import Link, ready


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_messages_arrive_in_order_and_only_once_they_are_complete(ends: tuple[socket.socket, socket.socket]) -> None:
    link = Link(ends[1], "secret")
    Link(ends[0], "secret").send({"is": "here"})
    data = ends[1].recv(1 << 16)
    ends[0].sendall(data[:20])
    assert link.receive() == []
    ends[0].sendall(data[20:] + data)
    assert link.receive() == [{"is": "here"}, {"is": "here"}]


def test_a_message_without_the_secret_of_the_job_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    Link(ends[0], "another").send({"is": "leave"})
    with pytest.raises(ConnectionError, match="code of this job"):
        Link(ends[1], "secret").receive()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\n", b"{}\n", b"\xff \xff\n"])
def test_what_is_no_message_is_an_error(data: bytes, ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(data)
    with pytest.raises(OSError, match="code of this job"):
        Link(ends[1], "secret").receive()


def test_what_can_be_read_is_ready_with_a_descriptor_of_any_number(ends: tuple[socket.socket, socket.socket]) -> None:
    """A job of thousands of ranks has as many connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    high = fcntl.fcntl(ends[1].fileno(), fcntl.F_DUPFD_CLOEXEC, 2000)
    with socket.socket(fileno=high) as other:
        assert ready([other], 0.0) == []
        ends[0].sendall(b"x")
        assert ready([other], 0.0) == [other]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_end_of_the_other_one_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].close()
    with pytest.raises(ConnectionError, match="hung up"):
        Link(ends[1], "secret").receive()
