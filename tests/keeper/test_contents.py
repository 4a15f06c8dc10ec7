"""What a keeper holds, over any order of requests: every descriptor is closed once, and it ends when it should."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.descriptors import num_open_of
from tests.examples import examples
from torchtitan_lite.memory.keeper import messages
from torchtitan_lite.memory.keeper.process import EMPTY_SECONDS, KeeperContents

TTL_SECONDS = 10.0
NAMES, MEMBERS, STARTS = st.sampled_from("abc"), st.sampled_from("mno"), st.sampled_from("st")


class Keeping(RuleBasedStateMachine):
    """A model: who lives under which start, and which start's image is under which name."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.watched: set[int] = set()
        self.images: dict[str, str] = {}
        self.living: dict[str, str] = {}
        self.unused_since, self.is_expected = 0.0, True
        self.is_finished = self.is_terminated = False
        gc.disable()  # Else what other tests left would be closed meanwhile.
        self.before = num_open_of("arena", "mark")
        self.contents = KeeperContents(TTL_SECONDS, self.watched.add, self.watched.remove, lambda: self.now)

    def ask(self, what: str, fds: tuple[int, ...] = (), **fields: Any) -> dict[str, Any]:
        answer = self.contents.answer({"what": what, **fields}, list(fds))
        messages.close_all(answer.freed)
        if self.contents.seconds_left() == 0.0 and what in ("finish", "end"):
            messages.close_all(answer.fds)
        return answer.message

    def left(self, *members: str) -> None:
        for member in members:
            if self.living.pop(member, None) is not None:
                self.unused_since = self.now

    @rule(seconds=st.sampled_from([1.0, 9.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=NAMES, start=STARTS)
    def keep(self, name: str, start: str) -> None:
        fds = os.memfd_create("arena"), os.memfd_create("mark")
        assert self.ask("keep", fds, name=name, start=start) == {}
        self.images[name] = start

    @rule(names=st.lists(NAMES))
    def drop(self, names: list[str]) -> None:
        assert self.ask("drop", names=names) == {}
        for name in names:
            self.images.pop(name, None)

    @rule(member=MEMBERS, start=STARTS)
    def join(self, member: str, start: str) -> None:
        fields = {"member": member, "start": start, "ttl_seconds": TTL_SECONDS}
        assert self.ask("join", (os.pidfd_open(os.getpid()),), **fields) == {}
        self.left(member)
        self.living[member] = start
        self.is_terminated = self.is_expected = False

    @rule(member=MEMBERS)
    def leave(self, member: str) -> None:
        assert self.ask("leave", member=member) == {}
        self.left(member)

    @rule(data=st.data())
    def a_process_ends(self, data: st.DataObject) -> None:
        if self.watched:
            pidfd = data.draw(st.sampled_from(sorted(self.watched)))
            (member,) = (name for name, each in self.contents._members.items() if each.pidfd == pidfd)
            self.contents.ended(pidfd)
            self.left(member)

    @rule()
    def sigterm(self) -> None:
        self.contents.end_once_unused()
        self.is_terminated = True

    @rule()
    def renew(self) -> None:
        described = self.ask("hello", renew=True)
        self.unused_since, self.is_expected = self.now, True
        assert described["living"] == ([os.getpid()] if self.living else [])

    @rule(start=STARTS)
    def finish(self, start: str) -> None:
        assert self.ask("finish", start=start) == {}
        if {*self.living.values()} - {start}:
            self.left(*[name for name, each in self.living.items() if each == start])
            self.images = {name: each for name, each in self.images.items() if each != start}
        else:
            self.is_finished = True

    @rule()
    def end(self) -> None:
        assert ("living" in self.ask("end")) == bool(self.living)
        self.is_finished |= not self.living

    @rule(start=st.sampled_from(["", "s", "t"]))
    def listing(self, start: str) -> None:
        listed = self.ask("list", start=start)
        if start:
            self.unused_since, self.is_expected = self.now, True
        others = {*self.living.values()} - {start}
        assert listed == {"names": list(listed["names"]), "is_mapped": bool(others)}
        assert sorted(listed["names"]) == sorted(self.images)
        other = self.contents.answer({"what": "other", "start": start}, [])
        assert bool(other.fds) == bool(others)

    @invariant()
    def every_descriptor_is_held_or_closed(self) -> None:
        if hasattr(self, "contents"):
            assert num_open_of("arena", "mark") - self.before == 2 * len(self.images) + len(self.living)
            assert len(self.watched) == len(self.living)

    @invariant()
    def it_ends_when_it_should(self) -> None:
        if not hasattr(self, "contents"):
            return
        left = self.contents.seconds_left()
        if self.is_finished:
            assert left == 0.0
        elif self.living:
            assert left is None
        elif self.is_terminated:
            assert left == 0.0
        else:
            is_of_use = self.images or self.is_expected
            assert left == self.unused_since + (TTL_SECONDS if is_of_use else EMPTY_SECONDS) - self.now

    def teardown(self) -> None:
        gc.enable()
        if hasattr(self, "contents"):
            self.drop(list(self.images))
            for member in list(self.living):
                self.leave(member)
            self.every_descriptor_is_held_or_closed()


Keeping.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=30)
TestKeeping = Keeping.TestCase


def test_a_refused_request_leaves_its_descriptors_to_the_caller() -> None:
    contents = KeeperContents(TTL_SECONDS, set().add, set().remove)
    pidfd = os.pidfd_open(os.getpid())
    with pytest.raises(messages.BadMessage):
        contents.answer({"what": "keep", "name": "a", "start": "s"}, [pidfd, pidfd])
    os.close(pidfd)
