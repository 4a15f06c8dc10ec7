"""The mount that a path is on is named as findmnt names it."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from torchtitan_lite.disk.mounts import is_fuse, is_fuse_in, mount_in, mount_of

MOUNTINFO = r"""21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
22 21 0:45 / /data rw,relatime shared:3 - nfs4 server:/export rw,vers=4.2
23 21 0:46 / /data/my\040disk rw - tmpfs tmpfs rw
24 22 254:0 /tmp/other /data/run rw - ext4 /dev/vda rw
25 22 0:47 / /data/over rw - tmpfs first rw
26 22 0:48 / /data/over rw - tmpfs second rw
a line that says nothing
"""


@pytest.mark.parametrize(
    ("path", "mount"),
    [
        ("/home/a", "ext4 /dev/vda at /"),
        ("/data", "nfs4 server:/export at /data"),
        ("/database", "ext4 /dev/vda at /"),
        ("/data/my disk/x", "tmpfs tmpfs at /data/my disk"),
        ("/data/run/checkpoint", "ext4 /dev/vda[/tmp/other] at /data/run"),
        ("/data/over/x", "tmpfs second at /data/over"),
    ],
)
def test_the_innermost_mount_counts_and_of_two_in_one_place_the_last(path: str, mount: str) -> None:
    assert mount_in(MOUNTINFO, PurePosixPath(path)) == mount


def test_a_path_that_does_not_exist_yet_is_on_the_mount_of_its_folder(tmp_path: Path) -> None:
    assert mount_of(tmp_path / "a" / "b") == mount_of(tmp_path) != ""


def test_a_circle_of_links_is_on_no_mount(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert mount_of(tmp_path / "a") == ""


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("fuse mfs#10.0.0.1:9421", True), ("fuse.glusterfs a:/b", True), ("nfs4 server:/export", False)],
)
def test_a_file_system_is_of_fuse_by_the_kind_of_its_device(kind: str, answer: bool) -> None:
    mounts = f"29 22 0:50 / /data/run rw shared:3 - {kind} rw\n30 22 0:51 / /other rw - fuse.sshfs sshfs rw\n"
    assert is_fuse_in(mounts, os.makedev(0, 50)) is answer


def test_the_disk_that_tests_write_to_is_no_fuse_or_is_named_so(tmp_path: Path) -> None:
    assert is_fuse(tmp_path.stat().st_dev) == mount_of(tmp_path).startswith("fuse")
