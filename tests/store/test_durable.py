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
