"""Connections between helper processes: complete messages of this job, and nothing else."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchtitan_lite.distributed.job_link import JobLink, LinkBroken, ready

SECRET = b"of this start"

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    with called, caller:
        yield called, caller


def linked(ends: Ends, other: bytes = SECRET) -> tuple[JobLink, JobLink]:
    """Return both ends of a connection, the called one first. Raise what that one finds."""
    with ThreadPoolExecutor() as pool:
        caller = pool.submit(JobLink, ends[1], other, is_caller=True)
        try:
            called = JobLink(ends[0], SECRET, is_caller=False)
        except LinkBroken:
            assert ends[0].fileno() == -1, "it is closed"
            assert isinstance(caller.exception(), LinkBroken), "the caller finds out, too"
            raise
        return called, caller.result()


def test_messages_and_data_arrive_in_order(ends: Ends) -> None:
    called, caller = linked(ends)
    caller.send({"what": "image"}, b"a card")
    caller.send({"what": "more"})
    assert called.receive() == {"what": "image"}
    assert ready([called], 0.0) == [called], "nothing of what follows was read"
    assert called.receive_data() == b"a card"
    assert called.receive() == {"what": "more"}
    assert ready([called], 0.0) == []
    called.send({"has_it": False})
    assert caller.receive() == {"has_it": False}


def test_whoever_does_not_know_the_secret_is_refused(ends: Ends) -> None:
    with pytest.raises(LinkBroken, match="does not know the secret"):
        linked(ends, b"another")


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n" * 8, b"\n" * 99, b"{}" * 99])
def test_a_stranger_who_says_anything_is_refused(data: bytes, ends: Ends) -> None:
    ends[1].sendall(data)
    with pytest.raises(LinkBroken, match="no process of this job"):
        JobLink(ends[0], SECRET, is_caller=False)


def test_a_message_that_was_heard_before_is_refused(ends: Ends) -> None:
    called, caller = linked(ends)
    caller.send({"is": "leave"})
    heard = ends[0].recv(1 << 16)
    for expected in ({"is": "leave"}, None):
        ends[1].sendall(heard)
        if expected:
            assert called.receive() == expected
            continue
        with pytest.raises(LinkBroken, match="does not know the secret"):
            called.receive()


def test_an_end_that_says_nothing_is_given_up(ends: Ends) -> None:
    with pytest.raises(LinkBroken, match=r"silent for 0\.05 s"):
        JobLink(ends[0], SECRET, is_caller=False, silence_seconds=0.05)


def test_the_end_of_the_other_one_is_an_error(ends: Ends) -> None:
    called, caller = linked(ends)
    caller.close()
    with pytest.raises(LinkBroken, match="hung up"):
        called.receive()


def test_what_can_be_read_is_ready_with_a_descriptor_of_any_number(ends: Ends) -> None:
    """A job of thousands of ranks has as many connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    high = fcntl.fcntl(ends[1].fileno(), fcntl.F_DUPFD_CLOEXEC, 2000)
    with socket.socket(fileno=high) as other:
        assert ready([other], 0.0) == []
        ends[0].sendall(b"x")
        assert ready([other], 0.0) == [other]
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
