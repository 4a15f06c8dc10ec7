import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from torchtitan_lite.store import durable


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writing_atomically_replaces_the_contents_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for data in (b"old", b"", b"new"):
        durable.write_atomically(path, data)
        assert path.read_bytes() == data
    assert names(tmp_path) == ["config.json"]


def test_a_write_that_is_cut_before_its_end_leaves_the_old_contents(tmp_path: Path) -> None:
    class CutBeforeReplace(durable.Durable):
        def replace(self, src: Path, dst: Path) -> None:
            raise KeyboardInterrupt

    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        CutBeforeReplace().write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    durable.write_atomically(path, b"newer")
    assert (path.read_bytes(), names(tmp_path)) == (b"newer", ["metrics.jsonl"])


def test_writing_where_there_is_no_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        durable.write_atomically(tmp_path / "nowhere" / "file", b"")


def test_an_exchange_swaps_two_folders_or_does_nothing(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    (a / "of a").mkdir(parents=True)
    (b / "of b").mkdir(parents=True)
    swapped = durable.exchange(a, b)
    assert (names(a), names(b)) == ((["of b"], ["of a"]) if swapped else (["of a"], ["of b"]))


def test_an_exchange_with_nothing_fails_and_names_both(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    try:
        assert durable.exchange(tmp_path / "a", tmp_path / "b") is False
    except FileNotFoundError as error:
        assert (error.filename, error.filename2) == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert names(tmp_path) == ["a"]


def test_a_folder_is_made_with_its_parents_and_may_be_there_already(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "checkpoint" / "step-1.staging"
    durable.make_dir(folder)
    durable.make_dir(folder)
    assert folder.is_dir()


def test_a_folder_is_not_made_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "outputs").write_bytes(b"")
    with pytest.raises(OSError, match="outputs"):
        durable.make_dir(tmp_path / "outputs" / "checkpoint")


def test_removing_a_tree_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_bytes(b"kept")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    durable.remove_tree(tmp_path / "tree")
    assert names(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "file").read_bytes() == b"kept"


class Refusing:
    """Replaces a function of the C library: fails with each of `codes`, and then does what `then` does."""

    def __init__(self, codes: Sequence[int], then: Callable[..., int] = lambda *arguments: 0) -> None:
        self._codes, self._then = iter(codes), then
        self.num_calls = 0

    def __call__(self, *arguments: object) -> int:
        self.num_calls += 1
        code = next(self._codes, None)
        if code is None:
            return self._then(*arguments)
        ctypes.set_errno(code)
        return -1


def two_folders(folder: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        (folder / name / f"of {name}").mkdir(parents=True)
    return folder / "a", folder / "b"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_an_exchange_is_refused_as_unknown_nothing_is_done_and_it_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    a, b = two_folders(tmp_path)
    monkeypatch.setattr(durable, "_renameat2", lambda: Refusing([code]))
    assert durable.exchange(a, b) is False
    assert (names(a), names(b)) == (["of a"], ["of b"])


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EROFS, errno.ENOSPC])
def test_an_exchange_that_fails_otherwise_is_the_systems_error_and_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    a, b = two_folders(tmp_path)
    monkeypatch.setattr(durable, "_renameat2", lambda: Refusing([code]))
    with pytest.raises(OSError) as caught:
        durable.exchange(a, b)
    error = caught.value
    assert (error.errno, error.strerror) == (code, os.strerror(code))
    assert (error.filename, error.filename2) == (str(a), str(b))


def test_the_system_itself_refuses_to_exchange_a_folder_with_one_inside_it_and_nothing_is_done(tmp_path: Path) -> None:
    a, _ = two_folders(tmp_path)
    assert durable.exchange(a, a / "of a") is False
    assert (names(tmp_path), names(a)) == (["a", "b"], ["of a"])


def test_where_the_c_library_has_no_exchange_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two_folders(tmp_path)
    monkeypatch.setattr(durable, "_renameat2", lambda: None)
    assert durable.exchange(a, b) is False
    assert (names(a), names(b)) == (["of a"], ["of b"])
