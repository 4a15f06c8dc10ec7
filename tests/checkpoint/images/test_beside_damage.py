"""Images with damaged checkpoints on disk: a start continues from memory where the disk alone would lose steps."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.images.spoiled import keeper_of
from tests.checkpoint.images.starts import run

pytestmark = pytest.mark.usefixtures("memory_tier")
SLOW = pytest.mark.slow(reason="each starts two to four processes, one after another")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))


@pytest.mark.parametrize(("name", "damage"), [("manifest.json", cut), ("manifest.json", flip), (".metadata", cut)])
def test_an_image_counts_next_to_its_latest_step_on_disk_that_is_damaged_and_again_after_a_kill(
    tmp_path: Path, name: str, damage: object
) -> None:
    folder = tmp_path / "run"
    first = run(folder, 5, interval=2)
    assert callable(damage)
    damage(folder / "step-4" / name)
    for _ in range(2):  # The first one sets the damaged step aside, and is killed before it has made an image.
        again = run(folder, 5)
        assert again.loaded == (5, "memory")
        assert again.loaded_weight == first.weights[5]
        assert names(folder) == ["step-2", "step-4.corrupt"]


@pytest.mark.parametrize(("until", "kept"), [(5, 0), (7, 1)], ids=["next to the run that it left", "alone"])
def test_an_image_of_a_branch_counts_next_to_a_step_of_the_branch_that_is_damaged(
    tmp_path: Path, until: int, kept: int
) -> None:
    folder = tmp_path / "run"
    run(folder, 3, interval=2)
    branch = run(folder, until, interval=2, load_step=2, keep_latest_k=kept)
    if kept:  # The kill may have come before the removal of what the branch does not keep.
        for name in {*names(folder)} - {f"step-{until - 1}"}:
            shutil.rmtree(folder / name)
    flip(folder / f"step-{until - 1}" / "manifest.json")
    again = run(folder, until)
    assert (again.loaded, again.error) == ((until, "memory"), "")
    assert again.loaded_weight == branch.weights[until]


@SLOW
@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp"])
def test_where_all_on_disk_is_damaged_the_run_continues_from_memory_and_nothing_is_renamed_before_a_save(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "run"
    run(folder, 5, interval=4)
    cut(folder / "step-4" / name)
    assert run(folder, 5).loaded == (5, "memory")
    assert names(folder) == ["step-4"], "else a start without the images would begin from scratch"
    with keeper_of(folder) as (keeper, _):
        assert keeper.end() == ()
    lost = run(folder, 5, memory_ttl_seconds=0.0, memory_interval=0)
    assert lost.loaded is None and "every checkpoint in" in lost.error


@SLOW
def test_a_damaged_step_that_its_owner_deletes_leaves_the_step_before(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 5, interval=2)
    cut(folder / "step-4" / "manifest.json")
    shutil.rmtree(folder / "step-4")
    assert run(folder, 2).loaded == (2, "disk")


@SLOW
def test_a_damaged_step_that_another_start_has_saved_is_not_that_of_the_image(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 5, interval=2)
    other = {"memory_ttl_seconds": 0.0, "memory_interval": 0}  # Like a job on another host.
    run(folder, 4, interval=4, load_step=2, **other)
    cut(folder / "step-4" / "manifest.json")
    assert run(folder, 2).loaded == (2, "disk")


@SLOW
def test_an_image_does_not_count_after_another_start_fell_back_and_has_saved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 7, interval=2)
    cut(folder / "step-6" / "manifest.json")
    run(folder, 5, interval=5, memory_ttl_seconds=0.0, memory_interval=0)  # Like a job on another host.
    assert names(folder) == ["step-2", "step-4", "step-5", "step-6.corrupt"]
    assert run(folder, 5).loaded == (5, "disk")
