"""Pinned steps: their file, its changes, and what a job that runs makes of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.logged import logged_warnings
from tests.store.crashing import Crash, Cut
from tests.store.filled import contents, fill, names
from torchtitan_lite.disk.durable import Durable
from torchtitan_lite.disk.lock_file import locked
from torchtitan_lite.errors import PinsUnreadable
from torchtitan_lite.events import ignore
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.pins import Pins
from torchtitan_lite.store.retention import KeepLatest


def pin(root: Path, *steps: int, durable: Durable | None = None) -> None:
    with (Pins(root, durable) if durable else Pins(root)).changing() as pinned:
        pinned.update(steps)


def keeper() -> Housekeeping:
    return Housekeeping(KeepLatest(1), ignore)


MALFORMED = {
    "empty": b"",
    "cut": b'{"version": 1, "pinn',
    "not JSON": b"10, 20",
    "a list": b"[10]",
    "no version": b'{"pinned": [10]}',
    "a later version": b'{"version": 2, "pinned": [10]}',
    "no steps": b'{"version": 1}',
    "text as a step": b'{"version": 1, "pinned": ["10"]}',
    "true as a step": b'{"version": 1, "pinned": [true]}',
    "a negative step": b'{"version": 1, "pinned": [-1]}',
    "a step beyond 64 bits": b'{"version": 1, "pinned": [9223372036854775808]}',
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "huge": b'{"version": 1, "pinned": []}' + b" " * (1 << 20),
}


def test_without_a_file_nothing_is_pinned(tmp_path: Path) -> None:
    assert Pins(tmp_path).read() == frozenset()
    assert Pins(tmp_path / "gone").read() == frozenset()


def test_pins_are_one_line_of_json_next_to_the_checkpoints(tmp_path: Path) -> None:
    pin(tmp_path, 20, 10)
    assert contents(tmp_path) == {"pins.json": b'{"version": 1, "pinned": [10, 20]}\n'}


def test_nothing_is_written_where_nothing_changes(tmp_path: Path) -> None:
    pin(tmp_path)
    pin(tmp_path, 10)
    before = (tmp_path / "pins.json").stat().st_ino
    pin(tmp_path, 10)
    assert (tmp_path / "pins.json").stat().st_ino == before


@given(st.sets(st.integers(0, 2**63 - 1)))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, steps: set[int]) -> None:
    root = tmp_path_factory.mktemp("pins")
    pin(root, *steps)
    assert Pins(root).read() == steps


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_named_and_not_replaced(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "pins.json").write_bytes(data)
    with pytest.raises(PinsUnreadable, match=r"pins\.json does not say which steps are pinned"):
        Pins(tmp_path).read()
    with pytest.raises(PinsUnreadable):
        pin(tmp_path, 5)
    assert contents(tmp_path) == {"pins.json": data}


def test_a_link_a_pipe_and_a_folder_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_bytes(b'{"version": 1, "pinned": []}')
    path = tmp_path / "pins.json"
    path.symlink_to("real.json")
    with pytest.raises(PinsUnreadable, match="a symbolic link"):
        Pins(tmp_path).read()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(PinsUnreadable, match="a pipe"):
        Pins(tmp_path).read()
    path.unlink()
    path.mkdir()
    with pytest.raises(PinsUnreadable, match="a folder"):
        Pins(tmp_path).read()


@pytest.mark.parametrize("pinned", [(), (1,)])
def test_a_pin_that_is_cut_anywhere_leaves_the_old_pins_or_the_new_ones(
    tmp_path: Path, pinned: tuple[int, ...]
) -> None:
    for at in range(1, 100):
        root = tmp_path / str(at)
        fill(root, 1, 2)
        pin(root, *pinned)
        before = contents(root)
        try:
            pin(root, 2, durable=Cut(at))
        except Crash:
            assert Pins(root).read() in ({*pinned}, {*pinned, 2})
            assert {name: data for name, data in contents(root).items() if name in before}.keys() == before.keys()
            pin(root, 2)
            assert Pins(root).read() == {*pinned, 2}
            assert names(root) == ["pins.json", "step-1", "step-2"]
        else:
            assert at > 4, "no operation was cut"
            return
    raise AssertionError("more operations than expected")


def test_a_purge_leaves_pinned_steps_and_reads_them_each_time(tmp_path: Path) -> None:
    store, housekeeping = fill(tmp_path, 1, 2, 3, 4), keeper()
    pin(tmp_path, 1, 3)
    housekeeping.purge(store)
    assert names(tmp_path) == ["pins.json", "step-1", "step-3", "step-4"]
    with Pins(tmp_path).changing() as pinned:
        pinned.discard(1)
    housekeeping.purge(store)
    assert names(tmp_path) == ["pins.json", "step-3", "step-4"]


@pytest.mark.promise("While the file of pins cannot be read, nothing is removed.", section="kept")
@pytest.mark.parametrize("data", [MALFORMED["cut"], MALFORMED["a later version"]])
def test_while_the_pins_are_unknown_nothing_is_purged_and_one_warning_names_the_file(
    tmp_path: Path, data: bytes
) -> None:
    store, housekeeping = fill(tmp_path, 1, 2, 3), keeper()
    (tmp_path / "pins.json").write_bytes(data)
    with logged_warnings() as warnings:
        housekeeping.purge(store)
        housekeeping.purge(store)
    assert len(warnings) == 1 and str(tmp_path / "pins.json") in warnings[0]
    assert names(tmp_path) == ["pins.json", "step-1", "step-2", "step-3"]
    (tmp_path / "pins.json").unlink()
    housekeeping.purge(store)
    assert names(tmp_path) == ["step-3"]


@pytest.mark.promise("A pinned step stays.", section="kept")
def test_a_step_that_is_pinned_after_the_decision_stays(tmp_path: Path) -> None:
    store, housekeeping = fill(tmp_path, 1, 2, 3), keeper()
    verdicts = housekeeping.verdicts(store)
    pin(tmp_path, 1)
    housekeeping.remove([verdict.info for verdict in verdicts if verdict.goes], store)
    assert names(tmp_path) == ["pins.json", "step-1", "step-3"]


def test_what_becomes_malformed_after_the_decision_stops_the_removal(tmp_path: Path) -> None:
    store, housekeeping = fill(tmp_path, 1, 2, 3), keeper()
    verdicts = housekeeping.verdicts(store)
    (tmp_path / "pins.json").write_bytes(b"{")
    with logged_warnings() as warnings:
        housekeeping.remove([verdict.info for verdict in verdicts if verdict.goes], store)
    assert len(warnings) == 1
    assert names(tmp_path) == ["pins.json", "step-1", "step-2", "step-3"]


def test_a_job_does_not_wait_for_a_process_that_keeps_the_lock(tmp_path: Path) -> None:
    store, housekeeping = fill(tmp_path, 1, 2), keeper()
    with locked(tmp_path, 0.05), logged_warnings() as warnings:
        housekeeping.purge(store)
    assert names(tmp_path) == ["step-1", "step-2"]
    assert len(warnings) == 1 and "another process has locked it" in warnings[0]
    housekeeping.purge(store)
    assert names(tmp_path) == ["step-2"]


def test_of_two_processes_one_has_the_lock_until_its_block_ends(tmp_path: Path) -> None:
    slept: list[float] = []
    with locked(tmp_path, 0.05):
        with (
            pytest.raises(BlockingIOError, match="another process has locked it for 1 s"),
            locked(tmp_path, 1.0, slept.append),
        ):
            raise AssertionError("two had the lock")
        assert 0.9 < sum(slept) < 1.1
    with locked(tmp_path, 0.05):
        assert names(tmp_path) == []


def test_the_lock_ends_with_its_block_although_a_forked_process_lives_on(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    with locked(tmp_path, 0.05):
        child = os.fork()
        if child == 0:
            os.read(reads, 1)
            os._exit(0)
    with locked(tmp_path, 0.05):
        pass
    os.write(writes, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(reads)
    os.close(writes)


def test_a_full_disk_leaves_the_old_pins(tmp_path: Path) -> None:
    class Full(Durable):
        def write_file(self, path: Path, data: bytes) -> None:
            path.write_bytes(data[:3])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    pin(tmp_path, 1)
    with pytest.raises(OSError, match="No space left"):
        pin(tmp_path, 2, durable=Full())
    assert Pins(tmp_path).read() == {1}
