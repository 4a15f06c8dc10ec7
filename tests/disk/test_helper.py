"""The line between a trainer and its helpers: messages, descriptors, and what ends a wait for an answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from tests.processes import wait_until
from torchtitan_lite.disk.helper import HelperLost, Line, is_stopped

SECONDS = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket, Line]]:
    """Return one end of a line, and the other one as a socket and as a line."""
    ours, theirs = socket.socketpair()
    line, other = Line(ours), Line(theirs)
    yield line, theirs, other
    line.hang_up()
    other.hang_up()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_messages_of_any_length_arrive_in_order_each_with_its_descriptors(
    ends: tuple[Line, socket.socket, Line],
) -> None:
    line, _, other = ends
    large, fd = bytes(4 << 20), os.memfd_create("sent")
    os.write(fd, b"of the file")
    sending = threading.Thread(target=lambda: (line.send("first"), line.send(large, [fd]), line.send("last")))
    sending.start()
    assert other.receive() == "first"
    data, (received,) = other.receive_with_fds()
    assert data == large
    assert os.pread(received, 100, 0) == b"of the file"
    assert other.receive_with_fds() == ("last", [])
    sending.join()
    os.close(fd)
    os.close(received)


def test_who_receives_at_an_end_that_hangs_up_gets_no_message(ends: tuple[Line, socket.socket, Line]) -> None:
    line, _, other = ends
    found: list[str] = []

    def receive(end: Line) -> None:
        try:
            end.receive()
        except EOFError:
            found.append("the end")

    threads = [threading.Thread(target=receive, args=(end,)) for end in (line, other)]
    for thread in threads:
        thread.start()
    line.hang_up()
    for thread in threads:
        thread.join()
    assert found == ["the end"] * 2
    with pytest.raises(OSError):
        other.send("to none")


@pytest.mark.parametrize("sent", [0, 3, 20])
def test_a_process_that_is_stopped_is_no_longer_waited_for_amid_its_answer_either(
    ends: tuple[Line, socket.socket, Line], process: subprocess.Popen[bytes], sent: int
) -> None:
    line, theirs, other = ends
    line.send("an answer")
    answer = theirs.recv(1000)
    theirs.sendall(answer[:sent])
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid))
    with pytest.raises(HelperLost, match="was stopped"):
        line.answer("a question", (), process.pid, SECONDS)
    assert other.receive() == "a question"


def test_a_process_that_is_silent_is_waited_for_no_longer_than_that(
    ends: tuple[Line, socket.socket, Line], process: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(HelperLost, match="was silent for 0 s"):
        ends[0].answer("a question", (), process.pid, 0.0)
