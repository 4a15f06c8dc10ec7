"""Which process holds a folder, and whether it has ended: real processes, and a /proc that does not say."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_lite.store.holder import Holder

READ_TEXT = Path.read_text


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """Start a process that waits until its standard input ends, under a name with brackets and spaces in it."""
    rename = "pathlib.Path('/proc/self/comm').write_text(') Z 1 (')"
    code = f"import pathlib, sys; {rename}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        yield process


def holder_of(pid: int) -> Holder:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return dataclasses.replace(Holder.this_process("theirs", 1_700_000_000), pid=pid, started=int(fields[19]))


def hide(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    """Make /proc/PID/stat unreadable, as with the mount option hidepid."""

    def read_text(path: Path, *arguments: str, **settings: str) -> str:
        if path == Path(f"/proc/{pid}/stat"):
            raise PermissionError(f"{path} is hidden")
        return READ_TEXT(path, *arguments, **settings)

    monkeypatch.setattr(Path, "read_text", read_text)


def test_a_process_that_lives_has_not_ended_whatever_it_is_called(process: subprocess.Popen[str]) -> None:
    assert not holder_of(process.pid).has_ended()


def test_a_process_that_lives_and_whose_start_time_cannot_be_read_has_not_ended(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = holder_of(process.pid)
    hide(monkeypatch, process.pid)
    assert not holder.has_ended()


def test_a_process_that_lives_and_whose_lock_file_does_not_say_when_it_started_has_not_ended(
    process: subprocess.Popen[str],
) -> None:
    assert not dataclasses.replace(holder_of(process.pid), started=0).has_ended()


@pytest.mark.parametrize("hidden", [True, False])
def test_a_process_of_another_user_is_judged_by_its_start_time_where_that_can_be_read(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, hidden: bool
) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError("Operation not permitted")

    holder = holder_of(process.pid)
    if hidden:
        hide(monkeypatch, process.pid)
    monkeypatch.setattr(os, "kill", refuse)
    assert not holder.has_ended()
    assert dataclasses.replace(holder, started=holder.started + 1).has_ended() is not hidden


def test_of_a_process_in_another_pid_space_it_is_not_known_that_it_has_ended(process: subprocess.Popen[str]) -> None:
    holder = holder_of(process.pid)
    process.kill()
    process.wait()
    assert holder.has_ended()
    assert not dataclasses.replace(holder, space="another kernel pid:[1]").has_ended()


@pytest.mark.parametrize("missing", ["/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"])
def test_where_the_system_does_not_say_which_boot_this_is_the_host_s_name_is_the_pid_space(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    readlink = Path.readlink

    def refuse_text(path: Path, *arguments: str, **settings: str) -> str:
        if path == Path(missing):
            raise FileNotFoundError(missing)
        return READ_TEXT(path, *arguments, **settings)

    def refuse_link(path: Path) -> Path:
        if path == Path(missing):
            raise FileNotFoundError(missing)
        return readlink(path)

    monkeypatch.setattr(Path, "read_text", refuse_text)
    monkeypatch.setattr(Path, "readlink", refuse_link)
    assert Holder.this_process("ours", 0).space == platform.node()


def test_the_pid_space_of_this_process_is_its_boot_and_its_pid_namespace() -> None:
    boot, namespace = Holder.this_process("ours", 0).space.split(" ")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert namespace == str(Path("/proc/self/ns/pid").readlink())
