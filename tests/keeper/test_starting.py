"""The start of a keeper: what it needs of the system, and a child that ends, hangs or is reaped by the system."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.descriptors import num_open, wait_for_open
from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.memory.keeper import starting
from torchtitan_lite.memory.keeper.starting import refuse_system


def child(act: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        act()
        os._exit(0)
    return pid


def test_a_system_that_has_what_it_needs_is_not_refused_and_nothing_stays_open() -> None:
    before = num_open()
    refuse_system()
    wait_for_open(before)


def test_a_program_without_an_interpreter_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(
        KeeperUnavailable, match=r"sys.executable is empty, so no Python is known to start the keeper with"
    ):
        refuse_system()


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (lambda: os._exit(0), 0),
        (lambda: os._exit(7), 7),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    ],
)
def test_the_exit_code_of_a_child_is_found_and_the_child_reaped(act: Callable[[], object], code: int) -> None:
    before = num_open()
    pid = child(act)
    assert starting._exit_code(pid) == code
    wait_for_open(before)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "START_SECONDS", 0.2)
    pid = child(signal.pause)
    with pytest.raises(TimeoutError):
        starting._exit_code(pid)
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_where_the_system_reaps_children_a_start_counts_as_done() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        while_it_is_watched = child(lambda: (select.select([], [], [], 0.05), os._exit(7)))
        assert starting._exit_code(while_it_is_watched) == 0
        pid = child(lambda: os._exit(7))
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, 0)  # Returns once it has ended.
        assert starting._exit_code(pid) == 0
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    ("script", "finding"),
    [
        ("exit 3", "the keeper did not start: exit code 3"),
        ("kill -9 $$", "the keeper did not start: exit code -9"),
        ("printf 'first\\nno \\377 room\\n\\n' >&2; exit 1", "the keeper did not start: no \ufffd room"),
        ("printf '%0300d' 0 >&2; exit 1", "the keeper did not start: " + "0" * 200),
        ("echo ignored; read -r line; exit 0", ""),
    ],
)
def test_the_last_line_of_one_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, finding: str
) -> None:
    before = num_open()
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    found = ""
    try:
        starting.spawn(tmp_path / "socket", 60.0)
    except KeeperUnavailable as error:
        found = str(error)
    assert bool(found) == bool(finding) and finding in found
    assert "0" * 201 not in found and "first" not in found
    wait_for_open(before)
