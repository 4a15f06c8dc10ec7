"""Files of a checkpoint are opened in place, and anything but a regular file is refused."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from tests.descriptors import num_open, wait_for_open
from torchtitan_lite.disk.plain_file import is_plain_name, opened_plain_file, read_plain, sizes_of
from torchtitan_lite.errors import CheckpointUnsafe


def test_the_sizes_of_existing_files_are_returned(tmp_path: Path) -> None:
    for name, size in (("a", 3), ("c", 0), ("d", 5000)):
        (tmp_path / name).write_bytes(bytes(size))
    assert sizes_of(tmp_path, ["a", "b", "c", "e", "d"]) == {"a": 3, "c": 0, "d": 5000}


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "a//b", "/etc/passwd", "a\\b", "a\0"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    assert not is_plain_name(name)
    with pytest.raises(CheckpointUnsafe, match="is not the name of a file"):
        sizes_of(tmp_path, [name])


def test_a_file_in_a_folder_below_has_a_size_and_one_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "a").write_bytes(b"abc")
    assert sizes_of(tmp_path, ["below/a", "below/b"]) == {"below/a": 3}
    assert not is_plain_name("below/a")
    (tmp_path / "link").symlink_to(tmp_path / "below")
    with pytest.raises(CheckpointUnsafe, match="expected a folder, found a symbolic link"):
        sizes_of(tmp_path, ["link/a"])


@pytest.mark.parametrize("name", ["a", "...", ".metadata", "__0_0.distcp", "a b"])
def test_any_other_name_can_be_that_of_a_file(name: str) -> None:
    assert is_plain_name(name)


def test_anything_but_a_regular_file_is_refused_and_its_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        kinds = {"link": "a symbolic link", "folder": "a folder", "pipe": "a pipe", "socket": "a socket"}
        for name, kind in kinds.items():
            for look in (
                lambda name: sizes_of(tmp_path, [name]),
                lambda name: read_plain(tmp_path / name, 100),
            ):
                with pytest.raises(CheckpointUnsafe, match=f"expected a file, found {kind}"):
                    look(name)
    with pytest.raises(CheckpointUnsafe, match="expected a file, found a device"):
        read_plain(Path("/dev/zero"), 100)


def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_plain(tmp_path / "file", 5) == b"12345"
    with pytest.raises(CheckpointUnsafe, match="expected at most 4 bytes, found 5"):
        read_plain(tmp_path / "file", 4)


def test_a_refusal_of_the_system_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), opened_plain_file(tmp_path / "none"):
        pass
    with pytest.raises(OSError) as caught, opened_plain_file(tmp_path / ("x" * 300)):
        pass
    assert caught.value.errno == errno.ENAMETOOLONG


def test_a_descriptor_is_closed_however_its_use_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    (tmp_path / "folder").mkdir()
    used: list[int] = []
    with pytest.raises(KeyboardInterrupt), opened_plain_file(tmp_path / "file") as fd:
        used.append(fd)
        raise KeyboardInterrupt
    with pytest.raises(OSError):
        os.fstat(used[0])
    before = num_open()
    with pytest.raises(CheckpointUnsafe), opened_plain_file(tmp_path / "folder"):
        pass
    wait_for_open(before)
