"""What `verify` found is recorded next to the checkpoints, and nothing but a person reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.store.crashing import Crash, Cut, contents
from tests.store.filled import commit
from tests.store.recording import Disk, Recorder, lay_out
from torchtitan_lite.examining.verified import FULL, SIZES, Verified, content_identity, record, verified, verified_in
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore

FILE = layout.VERIFIED


def save(root: Path, step: int, data: bytes = b"data") -> Path:
    return commit(CheckpointStore(root, durable=Cut()), step, data, b"metadata of " + data).path


def entry_of(folder: Path, num_findings: int = 0, depth: str = FULL) -> Verified:
    identity = content_identity(folder)
    assert identity is not None
    return Verified(identity, 1000.5, depth, num_findings)


def test_a_record_is_read_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    record(folder, entry_of(folder, 3, SIZES))
    assert verified(folder, verified_in(tmp_path)) == entry_of(folder, 3, SIZES)


def test_the_identity_is_the_digest_in_the_manifest(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    assert content_identity(folder) == json.loads((folder / "manifest.json").read_bytes())["digest"]


def test_a_record_holds_for_a_copy_of_the_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 1)
    record(folder, entry_of(folder))
    lay_out(Disk.of(tmp_path / "a").tree({}), tmp_path / "b")
    assert verified(tmp_path / "b" / "step-1", verified_in(tmp_path / "b")) == entry_of(folder)


def test_a_step_that_was_saved_again_is_not_verified(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    record(folder, entry_of(folder))
    save(tmp_path, 1, b"others")
    assert verified(folder, verified_in(tmp_path)) is None


def test_a_plain_dcp_checkpoint_is_known_by_its_metadata(tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / ".metadata").write_bytes(b"of DCP")
    record(folder, entry_of(folder))
    assert verified(folder, verified_in(tmp_path)) is not None
    (folder / ".metadata").write_bytes(b"of another")
    assert verified(folder, verified_in(tmp_path)) is None
    assert content_identity(tmp_path) is None
    assert content_identity(tmp_path / "gone") is None


def test_records_of_other_steps_stay_and_those_of_removed_ones_go(tmp_path: Path) -> None:
    folders = [save(tmp_path, step) for step in (1, 2)]
    for folder in folders:
        record(folder, entry_of(folder))
    assert verified_in(tmp_path).keys() == {"step-1", "step-2"}
    store = CheckpointStore(tmp_path)
    store.empty(store.discard(store.get(1)))
    record(folders[1], entry_of(folders[1], 1))
    assert verified_in(tmp_path) == {"step-2": entry_of(folders[1], 1)}


@pytest.mark.parametrize("num_findings", [0, 2])
def test_a_look_at_sizes_does_not_replace_what_reading_every_byte_found(num_findings: int, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    record(folder, entry_of(folder, num_findings))
    record(folder, entry_of(folder, 0, SIZES))
    assert verified_in(tmp_path) == {"step-1": entry_of(folder, num_findings)}
    record(folder, entry_of(folder, 1, SIZES))
    assert verified_in(tmp_path) == {"step-1": entry_of(folder, 1, SIZES)}
    save(tmp_path, 1, b"others")
    record(folder, entry_of(folder, 0, SIZES))
    assert verified_in(tmp_path) == {"step-1": entry_of(folder, 0, SIZES)}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[",
        b"[]",
        b"null",
        b'{"verified": []}',
        b'{"verified": {"step-1": 3}}',
        b'{"verified": {"step-1": {"identity": "a", "verified_at": NaN, "depth": "full", "num_findings": 0}}}',
        b'{"verified": {"step-1": {"identity": "a", "verified_at": 1.0, "depth": "deep", "num_findings": 0}}}',
        b'{"verified": {"../x": {"identity": "a", "verified_at": 1.0, "depth": "full", "num_findings": 0}}}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_record_that_cannot_be_read_is_none_and_is_replaced(text: bytes, tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (tmp_path / FILE).write_bytes(text)
    assert verified_in(tmp_path) == {}
    record(folder, entry_of(folder))
    assert verified_in(tmp_path) == {"step-1": entry_of(folder)}


@pytest.mark.parametrize("name", [FILE, f".{FILE}.tmp"])
def test_a_link_in_place_of_the_file_is_not_followed(name: str, tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    folder = save(root, 1)
    outside.write_bytes(b"theirs")
    (root / name).symlink_to(outside)
    assert verified_in(root) == {}
    record(folder, entry_of(folder))
    assert outside.read_bytes() == b"theirs"
    assert verified_in(root) == {"step-1": entry_of(folder)}


def test_a_pipe_in_place_of_the_file_does_not_block(tmp_path: Path) -> None:
    save(tmp_path, 1)
    os.mkfifo(tmp_path / FILE)
    assert verified_in(tmp_path) == {}


def test_a_record_that_is_cut_anywhere_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    for at in range(1, 20):
        root = tmp_path / str(at)
        folder = save(root, 1)
        record(folder, entry_of(folder))
        before, cut = contents(folder), Cut(at)
        try:
            record(folder, entry_of(folder, 1), cut)
        except Crash:
            assert verified_in(root) in ({"step-1": entry_of(folder)}, {"step-1": entry_of(folder, 1)})
        else:
            break
        assert contents(folder) == before
        CheckpointStore(root).recover()
        record(folder, entry_of(folder, 2))
        assert verified_in(root) == {"step-1": entry_of(folder, 2)}
        assert sorted(path.name for path in root.iterdir()) == sorted(["step-1", FILE])
    assert 3 < at < 19, "every operation was cut"


def test_a_power_cut_leaves_the_old_or_the_new_record(tmp_path: Path) -> None:
    root = tmp_path / "disk" / "root"
    folder = save(root, 1)
    record(folder, entry_of(folder))
    old, new = {"step-1": entry_of(folder)}, {"step-1": entry_of(folder, 1)}
    recorder = Recorder(tmp_path / "disk")
    record(folder, entry_of(folder, 1), recorder)
    disk, states, found = recorder.start.copy(), set(), []
    for done in range(len(recorder.log) + 1):
        if done:
            disk.do(recorder.log[done - 1])
        for lost in disk.losses():
            tree = disk.tree(lost)
            if (state := frozenset(tree.items())) not in states:
                states.add(state)
                lay_out(tree, tmp_path / "state" / str(len(states)))
                found.append(verified_in(tmp_path / "state" / str(len(states)) / "root"))
    assert all(entries in (old, new) for entries in found)
    assert old in found and new in found
    assert len(states) > 5


def test_the_store_neither_counts_nor_removes_the_record(tmp_path: Path) -> None:
    folders = [save(tmp_path, step) for step in (1, 2, 3)]
    for folder in folders:
        record(folder, entry_of(folder))
    store = CheckpointStore(tmp_path)
    assert [info.step for info in store.committed()] == [1, 2, 3]
    store.empty(store.discard(store.get(1)))
    store.recover()
    save(tmp_path, 4)
    store.quarantine(2, ["a finding"])
    assert verified_in(tmp_path).keys() == {"step-1", "step-2", "step-3"}
    assert [info.step for info in store.committed()] == [3, 4]


def test_a_record_in_a_read_only_folder_raises_an_os_error(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (tmp_path / FILE).mkdir()
    with pytest.raises(OSError):
        record(folder, entry_of(folder))
