"""What a keeper answers to each request, and which it refuses: the descriptors of those stay the caller's."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.descriptors import num_open, opened, wait_for_no_more, wait_for_open
from torchtitan_lite.memory.keeper import messages
from torchtitan_lite.memory.keeper.messages import MAX_ENTRIES, MAX_TTL_SECONDS, BadMessage
from torchtitan_lite.memory.keeper.process import Answer, KeeperContents

TTL_SECONDS = 10.0


class Asked:
    """Contents, the clock that they look at, and what they watch."""

    def __init__(self) -> None:
        self.now = 0.0
        self.watched: list[int] = []
        self.contents = KeeperContents(TTL_SECONDS, self.watched.append, self.watched.remove, lambda: self.now)

    def __call__(self, what: str, fds: tuple[int, ...] = (), **fields: Any) -> Answer:
        answer = self.contents.answer({"what": what, **fields}, list(fds))
        messages.close_all(answer.freed)
        return answer

    def join(self, member: str, start: str = "s") -> Answer:
        return self("join", (os.pidfd_open(os.getpid()),), member=member, start=start, ttl_seconds=5)

    def keep(self, name: str, start: str = "s") -> Answer:
        return self("keep", memory(), name=name, start=start)

    def names(self) -> list[str]:
        return list(self("list", start="").message["names"])

    def close(self) -> None:
        self("drop", names=self.names())
        for pidfd in [*self.watched]:
            self.contents.ended(pidfd)


@pytest.fixture
def ask() -> Iterator[Asked]:
    asked = Asked()
    yield asked
    asked.close()


def memory() -> tuple[int, int]:
    return os.memfd_create("arena"), os.memfd_create("mark")


JOIN = {"what": "join", "member": "m", "start": "s", "ttl_seconds": 5}
KEEP = {"what": "keep", "name": "a", "start": "s"}
REFUSED = [
    ({}, "", "asks for None"),
    ({"what": "burn"}, "", "asks for 'burn'"),
    ({"what": ["join"]}, "", r"asks for \['join'\]"),
    ({"what": "hello"}, "m", "descriptors that it does not need"),
    ({"what": "burn"}, "p", "descriptors that it does not need"),
    ({"what": "list"}, "", "start: expected"),
    ({"what": "take", "name": 7}, "", "name: expected"),
    ({"what": "take", "name": "a" * 201}, "", "name: expected at most 200"),
    ({"what": "drop", "names": "a"}, "", "names: expected a list"),
    ({"what": "drop", "names": ["a", ""]}, "", "names: expected a list"),
    ({"what": "other"}, "", "start: expected"),
    ({"what": "leave"}, "", "member: expected"),
    ({"what": "finish"}, "", "start: expected"),
    ({**JOIN, "ttl_seconds": -0.1}, "p", "ttl_seconds: expected 0 to"),
    ({**JOIN, "ttl_seconds": MAX_TTL_SECONDS * 1.01}, "p", "ttl_seconds: expected 0 to"),
    ({**JOIN, "ttl_seconds": float("nan")}, "p", "ttl_seconds: expected 0 to"),
    ({**JOIN, "ttl_seconds": "5"}, "p", "ttl_seconds: expected 0 to"),
    ({**JOIN, "ttl_seconds": None}, "p", "ttl_seconds: expected 0 to"),
    ({**JOIN, "member": None}, "p", "member: expected"),
    ({**JOIN, "start": None}, "p", "start: expected"),
    (JOIN, "", "pidfd of one process"),
    (JOIN, "pp", "pidfd of one process"),
    (JOIN, "m", "pidfd of one process"),
    ({**KEEP, "name": ""}, "mm", "expected a name and"),
    ({**KEEP, "start": None}, "mm", "start: expected"),
    (KEEP, "", "two files in memory"),
    (KEEP, "m", "two files in memory"),
    (KEEP, "mmm", "two files in memory"),
    (KEEP, "mp", "two files in memory"),
    (KEEP, "pm", "two files in memory"),
]


@pytest.mark.parametrize(("request_", "kinds", "finding"), REFUSED)
def test_a_request_that_is_none_changes_nothing_and_leaves_its_descriptors(
    ask: Asked, request_: dict[str, Any], kinds: str, finding: str
) -> None:
    make = {"p": lambda: os.pidfd_open(os.getpid()), "m": lambda: os.memfd_create("m")}
    fds = [make[kind]() for kind in kinds]
    before, files = Counter(opened()), [os.fstat(fd) for fd in fds]
    with pytest.raises(BadMessage, match=finding):
        ask.contents.answer(request_, fds)
    wait_for_no_more(before)
    assert [os.fstat(fd).st_ino for fd in fds] == [file.st_ino for file in files], "they are open"
    messages.close_all(fds)
    assert ask("list", start="").message["names"] == [] and not ask.watched


def test_a_name_that_is_held_gets_its_descriptors_and_another_one_an_error(ask: Asked) -> None:
    fds = memory()
    ask("keep", fds, name="a", start="s")
    assert tuple(ask("take", name="a").fds) == fds
    assert ask("take", name="b") == Answer({"error": "there is no such name"})


def test_what_takes_a_name_frees_what_had_it_and_what_is_dropped_twice_is_freed_once(ask: Asked) -> None:
    ask.keep("a")
    before = num_open()
    assert len(ask.keep("a").freed) == 2
    ask.keep("b")
    assert len(ask("drop", names=["a", "b", "a", "c"]).freed) == 4
    wait_for_open(before - 2)


def test_the_last_image_and_the_last_process_that_fit_are_taken_and_one_more_is_not(ask: Asked) -> None:
    before = num_open()
    for number in range(MAX_ENTRIES):
        assert ask.keep(f"{number}").message == ask.join(f"{number}").message == {}
    assert ask.keep("more").message == {"error": "256 in-memory snapshots are held already"}
    assert ask.join("more").message == {"error": "256 processes are registered already"}
    assert ask.keep("7").message == ask.join("7").message == {}, "in place of what had that name"
    assert (len(ask.names()), len(ask.watched)) == (MAX_ENTRIES, MAX_ENTRIES)
    assert num_open() - before == 3 * MAX_ENTRIES


def test_its_time_begins_with_the_end_of_the_last_process_and_is_that_of_the_last_one_that_joined(ask: Asked) -> None:
    assert ask("hello").message["seconds_left"] == TTL_SECONDS
    ask.now = 3.0
    assert ask("hello", renew=1).message["seconds_left"] == 7.0
    assert ask("hello", renew=True).message["seconds_left"] == TTL_SECONDS
    ask.join("m")
    ask.now = 50.0
    described = ask("hello").message
    assert (described["seconds_left"], described["ttl_seconds"], described["living"]) == (None, 5.0, [os.getpid()])
    assert ask("end").message == described
    ask("leave", member="unknown")
    assert ask("hello").message["seconds_left"] is None
    ask("leave", member="m")
    ask.now = 52.0
    assert ask("hello").message["seconds_left"] == 3.0
    ask("leave", member="m")
    assert ask("hello").message["seconds_left"] == 3.0, "it had left before"
    assert ask("list", start="").message == {"names": [], "is_mapped": False}
    assert ask("hello").message["seconds_left"] == 3.0
    ask("list", start="s")
    assert ask("hello").message["seconds_left"] == 5.0, "whoever looks comes back"


def test_another_start_is_a_process_that_can_still_write(ask: Asked) -> None:
    ask.join("m", "s")
    assert ask("other", start="s").fds == ()
    assert ask("other", start="t").fds == tuple(ask.watched)
    assert ask("list", start="t").message["is_mapped"] and not ask("list", start="s").message["is_mapped"]


def test_a_start_that_finishes_while_another_one_lives_leaves_that_its_images(ask: Asked) -> None:
    for start in ("s", "t"):
        ask.join(start, start)
        ask.keep(f"of {start}", start)
    answer = ask("finish", start="s")
    assert (answer.message, answer.fds, len(answer.freed)) == ({}, (), 2)
    assert ask.names() == ["of t"] and len(ask.watched) == 1
    assert ask("hello").message["seconds_left"] is None
    last = ask("finish", start="t")
    assert [messages.pid_of(fd) for fd in last.fds] == [os.getpid()]
    assert ask.contents.seconds_left() == 0.0
    messages.close_all(last.fds)


def test_a_process_that_joins_after_sigterm_stays(ask: Asked) -> None:
    ask.contents.end_once_unused()
    assert ask("hello").message["seconds_left"] == 0.0
    ask.join("m")
    ask("leave", member="m")
    assert ask("hello").message["seconds_left"] == 5.0
