"""Where the socket of a keeper is: in a private folder, with a name for each folder of checkpoints and a short path."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_lite.errors import KeeperUnavailable
from torchtitan_lite.memory.keeper import messages
from torchtitan_lite.memory.keeper.client import make_private, refuse_shared, socket_path

NAME_BYTES = len("/torchtitan_lite/") + 32
"""What is added to the user's folder."""


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as folder:
        yield Path(folder)


def runtime_of(short: Path, num_bytes: int) -> Path:
    """Return a folder of this user for which the path of a socket has `num_bytes`."""
    folder = short / ("x" * (num_bytes - NAME_BYTES - len(os.fsencode(short)) - 1))
    folder.mkdir()
    return folder


def test_a_path_that_an_address_just_holds_is_used_and_can_be_bound(short: Path) -> None:
    runtime = runtime_of(short, 107)
    path = socket_path(short, runtime)
    assert path.parent == runtime / "torchtitan_lite" and len(os.fsencode(path)) == 107
    make_private(path.parent)
    with messages.new_socket() as listener:
        listener.bind(str(path))
    assert path.is_socket()


def test_a_longer_one_gives_way_to_the_folder_for_temporary_files(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    path = socket_path(short, runtime_of(short, 108))
    assert path.parent == short / f"torchtitan_lite-{os.geteuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(runtime_of(short, 120)))
    with pytest.raises(KeeperUnavailable, match="the address of a socket holds 107 bytes"):
        socket_path(short, None)


def test_only_an_absolute_folder_of_this_user_is_used(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short)
    (short / "file").touch()
    (short / "own").mkdir()
    for runtime in (None, Path("own"), short / "file", short / "gone"):
        assert socket_path(short, runtime).parent.parent == Path(tempfile.gettempdir())
    assert socket_path(short, short / "own").parent.parent == short / "own"


def test_a_folder_has_one_name_however_it_is_written_and_another_one_has_another(short: Path) -> None:
    (short / "a").mkdir()
    (short / "link").symlink_to("a")
    names = [socket_path(short / each, short).name for each in ("a", "link", "link/../a", "b")]
    assert names[0] == names[1] == names[2] != names[3]


def test_a_folder_is_made_private_and_stays_as_it_was(short: Path) -> None:
    before = os.umask(0)
    try:
        for _ in range(2):
            make_private(short / "new")
    finally:
        os.umask(before)
    assert (short / "new").stat().st_mode & 0o777 == 0o700
    refuse_shared(short / "gone")


@pytest.mark.parametrize("mode", [0o701, 0o702, 0o704, 0o710, 0o720, 0o740, 0o777])
def test_a_folder_that_others_can_use_is_refused(short: Path, mode: int) -> None:
    (short / "open").mkdir()
    (short / "open").chmod(mode)
    found = re.escape(stat.filemode(stat.S_IFDIR | mode))
    with pytest.raises(KeeperUnavailable, match=f"expected a drwx------ of user .*, found {found} of user"):
        make_private(short / "open")


def test_a_link_and_a_file_are_refused_by_what_they_are(short: Path) -> None:
    (short / "file").touch(mode=0o600)
    (short / "folder").mkdir(mode=0o700)
    (short / "link").symlink_to("folder")
    for name, mode in (("file", "-rw-------"), ("link", "lrwxrwxrwx")):
        with pytest.raises(KeeperUnavailable, match=f"{name}: expected a drwx------ of user .*, found {mode} of user"):
            refuse_shared(short / name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused_and_not_used(short: Path) -> None:
    (short / "other").mkdir(mode=0o700)
    os.chown(short / "other", 65534, -1)
    with pytest.raises(KeeperUnavailable, match=f"of user {os.geteuid()}, found drwx------ of user 65534"):
        refuse_shared(short / "other")
    assert socket_path(short, short / "other").parent.parent == Path(tempfile.gettempdir())
