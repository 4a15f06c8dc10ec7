"""Taking digests of folders that change meanwhile, and reading records that another hand wrote."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.filled import flip
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe
from torchtitan_lite.examining.recorded_digests import read_record, states_of, take_digests, write_record
from torchtitan_lite.store.manifest import CheckpointKind


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a file of several blocks, an empty one, and one in a folder below."""
    (tmp_path / "checkpoint" / "below").mkdir(parents=True)
    (tmp_path / "checkpoint" / "large").write_bytes(bytes(range(256)) * (6 * BLOCK_BYTES // 256) + b"rest")
    (tmp_path / "checkpoint" / "empty").touch()
    (tmp_path / "checkpoint" / "below" / "small").write_bytes(b"small")
    return tmp_path / "checkpoint"


def test_the_digests_are_those_of_the_files_and_come_back(folder: Path, tmp_path: Path) -> None:
    read: list[int] = []
    taken = take_digests(folder, states_of(folder), CheckpointKind.FULL, read.append)
    assert dict(taken.files) == {
        name: FileRecord.of((folder / name).read_bytes()) for name in ("large", "empty", "below/small")
    }
    assert sum(read) == 6 * BLOCK_BYTES + 4 + 5
    write_record(tmp_path / "record.json", taken)
    found = read_record(tmp_path / "record.json", folder)
    assert found is not None and (dict(found.files), found.created_at) == (dict(taken.files), taken.created_at)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda folder: append(folder / "large"), "large"),
        (lambda folder: flip(folder / "large", 7), "large"),
        (lambda folder: os.truncate(folder / "large", 5), "large"),
        (lambda folder: (folder / "large").unlink(), "large"),
        (lambda folder: (folder / "below" / "new").touch(), "below/new"),
    ],
)
def test_a_folder_that_is_written_meanwhile_is_refused(
    change: Callable[[Path], object], name: str, folder: Path
) -> None:
    changed: list[object] = []

    def change_once(count: int) -> None:
        if not changed:
            changed.append(change(folder))

    with pytest.raises(CheckpointUnreadable, match=f"written or removed while it was read: {name}"):
        take_digests(folder, states_of(folder), CheckpointKind.FULL, change_once)


def test_a_link_is_not_followed(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "large")
    with pytest.raises(CheckpointUnsafe, match="expected a file, found a symbolic link"):
        states_of(folder)


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a//b", "a/../b", ""])
def test_a_record_that_leads_out_of_the_folder_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    taken = take_digests(folder, states_of(folder), CheckpointKind.FULL)
    write_record(tmp_path / "record.json", dataclasses.replace(taken, files={name: FileRecord.of(b"x")}))
    with pytest.raises(CheckpointDamaged, match="is not the path of a file"):
        read_record(tmp_path / "record.json", folder)
