"""Which process holds a folder, and whether it has ended: real processes, and an unreadable /proc."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.store.holder import Holder

READ_TEXT = Path.read_text


@contextmanager
def started() -> Iterator[subprocess.Popen[str]]:
    """Start a process that waits until its standard input ends; its name has brackets, spaces and invalid UTF-8."""
    rename = r"pathlib.Path('/proc/self/comm').write_bytes(b') Z 1 (\xff')"
    code = f"import pathlib, sys; {rename}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        yield process


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    with started() as process:
        yield process


def holder_of(pid: int) -> Holder:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return dataclasses.replace(Holder.this_process("theirs", 1_700_000_000), pid=pid, started=int(fields[19]))


def hide(monkeypatch: pytest.MonkeyPatch, pid: int) -> None:
    """Make /proc/PID/stat unreadable, as with the mount option hidepid."""

    def read_text(path: Path, *arguments: str, **settings: str) -> str:
        if path == Path(f"/proc/{pid}/stat"):
            raise PermissionError(f"{path} is hidden")
        return READ_TEXT(path, *arguments, **settings)

    monkeypatch.setattr(Path, "read_text", read_text)


def test_a_running_process_has_not_ended_whatever_its_name(process: subprocess.Popen[str]) -> None:
    assert not holder_of(process.pid).has_ended()


def test_a_running_process_with_an_unreadable_start_time_has_not_ended(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = holder_of(process.pid)
    hide(monkeypatch, process.pid)
    assert not holder.has_ended()


def test_a_running_process_without_a_start_time_in_its_lock_file_has_not_ended(
    process: subprocess.Popen[str],
) -> None:
    assert not dataclasses.replace(holder_of(process.pid), started=0).has_ended()


@pytest.mark.parametrize("hidden", [True, False])
def test_a_process_of_another_user_is_judged_by_its_start_time_if_that_is_readable(
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


def test_a_process_in_another_pid_space_is_never_known_to_have_ended() -> None:
    with started() as process:
        holder = holder_of(process.pid)
        process.kill()
    assert holder.has_ended()
    assert not dataclasses.replace(holder, space="another kernel pid:[1]").has_ended()


@pytest.mark.parametrize("missing", ["/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"])
def test_without_a_boot_id_the_host_name_is_the_pid_space(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
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
    assert Holder.this_process("ours", 0).space.split(" ")[0] == platform.node()


def test_the_pid_space_of_this_process_is_its_boot_and_its_pid_namespace() -> None:
    boot, namespace = Holder.this_process("ours", 0).space.split(" ")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert namespace == str(Path("/proc/self/ns/pid").readlink())


def test_with_a_garbled_boot_id_the_host_name_is_the_pid_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def garbled(path: Path, *arguments: str, **settings: str) -> str:
        return b"\xff".decode("ascii")

    monkeypatch.setattr(Path, "read_text", garbled)
    monkeypatch.setattr("torchtitan_lite.store.holder.state_and_start", lambda pid: ("S", 1))
    assert Holder.this_process("ours", 0).space == platform.node()


def say(monkeypatch: pytest.MonkeyPatch, pid: int, stat: str) -> None:
    """Let /proc/PID/stat hold `stat`."""

    def read_text(path: Path, *arguments: str, **settings: str) -> str:
        return stat if path == Path(f"/proc/{pid}/stat") else READ_TEXT(path, *arguments, **settings)

    monkeypatch.setattr(Path, "read_text", read_text)


STAT = "41 (python) {state} " + " ".join(["1"] * 18) + " 500 1 1"
"""The fields after the name are the third to the 24th; the 22nd is the start time."""


@pytest.mark.parametrize(("state", "ended"), [*((state, False) for state in "RSDTtIW"), ("Z", True), ("X", True)])
def test_a_zombie_has_ended_and_a_process_in_any_other_state_has_not(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, state: str, ended: bool
) -> None:
    holder = dataclasses.replace(holder_of(process.pid), started=500)
    say(monkeypatch, process.pid, STAT.format(state=state))
    assert holder.has_ended() is ended
    assert dataclasses.replace(holder, started=501).has_ended()


@pytest.mark.parametrize("num_fields", [0, 1, 18, 19])
def test_a_process_with_a_truncated_state_is_taken_to_run(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, num_fields: int
) -> None:
    holder = holder_of(process.pid)
    fields = STAT.format(state="Z").partition(") ")[2].split()[:num_fields]
    say(monkeypatch, process.pid, f"41 (python) {' '.join(fields)}")
    assert not holder.has_ended()


SOUND = Holder("t0ken", "r1", "node7", "boot pid:[1]", 41, 5, 1_700_000_000)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in ("token", "run_id", "host", "space") for value in (5, None, ["a"])),
        *(("pid", value) for value in (0, -1, 2**31, 1.5, "41", True, None)),
        *(("started", value) for value in (-1, 2**63, 1.5, "5", True, None)),
        *(("since", value) for value in (-1, 253402300800, 1.5, "5", True, None)),
    ],
)
def test_a_lock_file_with_a_wrong_field_names_no_holder(field: str, value: object) -> None:
    document = json.loads(SOUND.to_bytes(1, 0))
    assert Holder.parse(json.dumps(document).encode()) == SOUND
    assert Holder.parse(json.dumps(document | {field: value}).encode()) is None
    del document[field]
    assert Holder.parse(json.dumps(document).encode()) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("pid", 1), ("pid", 2**31 - 1), ("started", 0), ("started", 2**63 - 1), ("since", 0), ("since", 253402300799)],
)
def test_the_smallest_and_the_largest_number_of_a_field_are_read_back_and_can_be_printed(
    field: str, value: int
) -> None:
    change: dict[str, Any] = {field: value}
    holder = dataclasses.replace(SOUND, **change)
    assert Holder.parse(holder.to_bytes(3, 7)) == holder
    assert str(holder).startswith("run r1 (process ")


def test_a_lock_file_says_who_holds_it_with_a_beat_and_a_time_at_its_end() -> None:
    data = SOUND.to_bytes(12, 1_700_000_007.9)
    assert data.endswith(b'"beat":           12, "at":   1700000007}\n')
    assert {len(SOUND.to_bytes(beat, at)) for beat, at in ((0, 0), (1, 1.5), (10**11, 10**11))} == {len(data)}
    assert json.loads(data)["beat"] == 12
    assert str(SOUND) == "run r1 (process 41 on node7, since 2023-11-14 22:13:20 UTC)"


@pytest.mark.parametrize("field", ["space", "pid", "started"])
def test_a_process_is_its_pid_space_its_pid_and_its_start_time(field: str) -> None:
    other = dataclasses.replace(SOUND, token="other", run_id="r2", host="node8", since=0)
    assert SOUND.is_same_process_as(other)
    change: dict[str, Any] = {field: "another" if field == "space" else 77}
    assert not SOUND.is_same_process_as(dataclasses.replace(other, **change))


def test_a_process_has_a_new_token_each_time_it_takes_a_folder() -> None:
    one, two = (Holder.this_process("ours", 5.9) for _ in range(2))
    assert one.token != two.token
    assert (one.pid, one.host, one.since, one.run_id) == (os.getpid(), platform.node(), 5, "ours")
    assert one.is_same_process_as(two) and not one.has_ended()
