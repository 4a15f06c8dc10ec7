"""A step in an object store is copied to a disk as it is, and a copy that was cut is continued."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bucket.proxy import Proxy, answers, where
from tests.bucket.stored import flip, held, write
from tests.cli.command import command
from tests.disk.sources import bounced
from torchtitan_lite.bucket.objects import connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.digest import BLOCK_BYTES
from torchtitan_lite.disk.lock_file import locked
from torchtitan_lite.store.manifest import CheckpointInfo

LARGE = "__9_0.distcp"
DATA = os.urandom(3 * BLOCK_BYTES + 5) + bytes(BLOCK_BYTES)
FIRST = "__0_0.distcp"


@pytest.fixture
def info(folder: str, proxy: Proxy) -> Iterator[CheckpointInfo]:
    """A checkpoint with a file of several blocks, in a folder that this process holds; all goes through the proxy."""
    with held(folder) as store:
        place, manifest = write(store, 7)
        record = store.new_file(place, LARGE).write(bounced(DATA))
        with_large = dataclasses.replace(manifest, files=manifest.files | {LARGE: record})
        yield store.commit(7, with_large, place=place)


def assert_same(out: Path, folder: str, info: CheckpointInfo) -> None:
    objects = connect(parse_address(folder))
    keys = [each.key for each in objects.list(f"{info.path.name}/")]
    assert {path.name for path in out.iterdir()} == {key.rpartition("/")[2] for key in keys}
    for key in keys:
        assert (out / key.rpartition("/")[2]).read_bytes() == objects.get(key)[0]


def cut_copy(out: Path, proxy: Proxy, folder: str) -> Path:
    """Begin a copy to `out` while the store refuses the large file; return the folder with what is there of it."""
    proxy.again(where(answers(403, "AccessDenied"), method="GET", path=f"*/{LARGE}"))
    ended = command("convert", folder, out, "--layout", "ours")
    left = out.parent / f".{out.name}.unfinished"
    assert ended.code == 1
    assert f"note: What was copied stays in {left}: run the same command again to continue" in ended.err
    proxy.again()
    return left


def fetched(proxy: Proxy) -> list[str]:
    """Return the names of the files of which data was fetched."""
    return [entry.path.rpartition("/")[2] for entry in proxy.log if entry.method == "GET" and ".distcp" in entry.path]


def test_each_file_is_the_same_byte_for_byte(folder: str, info: CheckpointInfo, tmp_path: Path) -> None:
    ended = command("convert", folder, tmp_path / "step-7", "--layout", "ours")
    assert (ended.code, ended.err) == (0, "")
    assert_same(tmp_path / "step-7", folder, info)
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]
    assert command("verify", tmp_path / "step-7").code == 0


def test_a_copy_that_was_cut_is_continued(folder: str, info: CheckpointInfo, proxy: Proxy, tmp_path: Path) -> None:
    left = cut_copy(tmp_path / "out", proxy, folder)
    assert (left / FIRST).is_file()
    (left / LARGE).write_bytes(DATA[: BLOCK_BYTES + 9])
    (left / "other").mkdir()
    (left / "note.txt").write_text("of another command")
    ended = command("convert", folder, tmp_path / "out", "--layout", "ours")
    assert (ended.code, ended.err) == (0, "")
    assert fetched(proxy) == [LARGE]
    assert_same(tmp_path / "out", folder, info)
    assert not left.exists()


@pytest.mark.slow
def test_what_is_wrong_in_a_copy_that_was_cut_is_fetched_again(
    folder: str, info: CheckpointInfo, proxy: Proxy, tmp_path: Path
) -> None:
    left = cut_copy(tmp_path / "out", proxy, folder)
    with (left / FIRST).open("r+b") as file:
        file.write(b"wrong")
    (left / LARGE).write_bytes(DATA + b"more")
    assert command("convert", folder, tmp_path / "out", "--layout", "ours").code == 0
    assert fetched(proxy) == [FIRST]
    assert_same(tmp_path / "out", folder, info)


@pytest.mark.slow
def test_a_damaged_step_leaves_no_copy(folder: str, info: CheckpointInfo, tmp_path: Path) -> None:
    flip(info, LARGE, BLOCK_BYTES + 1)
    ended = command("convert", folder, tmp_path / "out", "--layout", "ours")
    assert (ended.code, f"bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES} of {LARGE}" in ended.err) == (3, True)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_removed_while_it_is_copied_leaves_no_copy(
    folder: str, info: CheckpointInfo, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.again(where(answers(404, "NoSuchKey"), method="GET", path=f"*/{LARGE}"))
    ended = command("convert", folder, tmp_path / "out", "--layout", "ours")
    assert (ended.code, "run the same command again to continue" in ended.err) == (1, False)
    assert list(tmp_path.iterdir()) == []


def test_a_copy_that_another_process_writes_is_left_alone(folder: str, info: CheckpointInfo, tmp_path: Path) -> None:
    left = tmp_path / ".out.unfinished"
    left.mkdir()
    with locked(left, wait_seconds=0):
        ended = command("convert", folder, tmp_path / "out", "--layout", "ours")
    assert (ended.code, "is being written by another process" in ended.err) == (2, True)
