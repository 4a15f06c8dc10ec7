"""All ranks together look at each file of a checkpoint once, and raise together what one of them finds."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.ranks import Ranks
from torchtitan_lite.checkpoint.reading.files import FilesOnDisk
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder, Verify
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged

SAVED = Path(__file__).parents[2] / "golden" / "format-7" / "five-ranks" / "checkpoint" / "step-7"
FILES = [f"__{rank}_0.distcp" for rank in range(5)]


class Asked(FilesOnDisk):
    """The files in a folder, and whose sizes a rank asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[str] = []

    def sizes_of(self, names: Iterable[str]) -> dict[str, int]:
        asked = [*names]
        self.asked += asked
        return super().sizes_of(asked)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAVED, tmp_path / "step-1"))


@pytest.mark.parametrize("verify", ["off", "size", "full"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 16])
def test_each_file_is_looked_at_by_one_rank(folder: Path, verify: Verify, world_size: int) -> None:
    names: list[str] = []
    for rank in range(world_size):
        files = Asked(folder)
        opened = CheckpointFolder(folder, verify, files=files, rank=rank, world_size=world_size)
        assert opened.contents.files == {*FILES}
        names += files.asked
    assert sorted(names) == sorted([".metadata", *FILES])


def test_without_a_manifest_every_rank_looks_at_all_files(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    for rank in range(2):
        files = Asked(folder)
        assert CheckpointFolder(folder, files=files, rank=rank, world_size=2).contents.files == {*FILES}
        assert {*files.asked} >= {*FILES}


def refusals(rank: int, folder: Path) -> list[str]:
    """Return what is raised for each folder in `folder`, in which a file is short, empty or missing."""
    found = []
    for each in sorted(folder.iterdir()):
        peers = Peers(timedelta(seconds=60))
        stored = StoredCheckpoint(each, peers, verify="size")
        with pytest.raises(CheckpointDamaged) as raised:
            peers.together(lambda stored=stored: stored.contents)
        found.append(str(raised.value).partition(": ")[2])
    return found


def test_a_file_that_one_rank_finds_short_or_missing_is_damage_for_all(two_ranks: Ranks, tmp_path: Path) -> None:
    for name in FILES:
        whole = (SAVED / name).stat().st_size
        for size in (whole - 1, 0, -1):
            path = Path(shutil.copytree(SAVED, tmp_path / "damaged" / f"{name} {size}")) / name
            if size < 0:
                path.unlink()
            else:
                with path.open("r+b") as file:
                    file.truncate(size)
    first, second = two_ranks.run(refusals, folder=tmp_path / "damaged")
    assert first == second
    for at, each in enumerate(sorted((tmp_path / "damaged").iterdir())):
        assert each.name.split()[0] in first[at], first[at]
