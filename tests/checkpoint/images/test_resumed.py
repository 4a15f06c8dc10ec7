"""Starts that follow a SIGKILL: the right step, from memory where that is the run's, else from disk.

The disk may have damaged checkpoints: a start continues from memory where the disk alone would lose steps.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.images.spoiled import keeper_of, other_bytes, spoil
from tests.checkpoint.images.starts import KILLED, run
from tests.keepers import keepers_in
from tests.store.filled import flip

pytestmark = pytest.mark.usefixtures("memory_tier")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The weights of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    return run(folder, 12, memory_ttl_seconds=0.0, memory_interval=0, kills=False).weights


@pytest.mark.slow
def test_a_run_killed_three_times_before_a_save_continues_where_it_was(
    tmp_path: Path, straight: dict[int, str]
) -> None:
    folder = tmp_path / "run"
    first = run(folder, 4)
    assert (first.code, first.loaded, first.error) == (KILLED, None, "")
    second = run(folder, 6)
    assert (second.code, second.loaded, second.error) == (KILLED, (first.ready, "memory"), "")
    assert "From memory" in second.log
    third = run(folder, second.ready)  # It trains nothing: the image is still there, although two starts have used it.
    assert third.loaded == (second.ready, "memory")
    fourth = run(folder, 10, interval=9)
    assert fourth.loaded == (second.ready, "memory")
    assert first.weights | second.weights | fourth.weights == {n: w for n, w in straight.items() if n <= 10}
    extra = json.loads((folder / "step-9" / "manifest.json").read_bytes())["extra"]
    assert extra["resumed_from_memory"] == second.ready
    assert run(folder, 12).loaded == (fourth.ready, "memory")


def test_a_large_job_continues_from_memory_with_what_each_rank_alone_has(
    tmp_path: Path, straight: dict[int, str]
) -> None:
    folder = tmp_path / "run"
    first = run(folder, 5, interval=4, records=True)
    assert (folder / "step-4" / "__0_0.json").exists()
    second = run(folder, 8, records=True)
    assert (second.loaded, second.error) == ((first.ready, "memory"), "")
    assert first.weights | second.weights == {n: w for n, w in straight.items() if n <= 8}


def test_a_run_that_rolled_back_continues_on_its_branch_and_only_there(
    tmp_path: Path, straight: dict[int, str]
) -> None:
    folder = tmp_path / "run"
    first = run(folder, 6, interval=2)
    assert first.loaded is None
    branch = run(folder, 5, load_step=2)
    assert branch.loaded == (2, "disk")
    again = run(folder, 6, load_step=2)
    assert again.loaded == (branch.ready, "memory")
    other = run(folder, again.ready, load_step=4)  # An uncommitted branch from another step does not count.
    # Step 4 may come from memory: the branch's copy of it equals the disk's, byte by byte.
    assert other.loaded in [(4, "disk"), (4, "memory")]
    assert "no branch from step 4" in other.log
    assert branch.weights | again.weights | other.weights == {n: w for n, w in straight.items() if 3 <= n <= 6}


def test_an_uncommitted_branch_does_not_win_over_the_run_that_it_left(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 4, interval=2)
    branch = run(folder, 7, load_step=2)
    assert branch.loaded is not None
    assert branch.loaded[0] == 2
    back = run(folder, 5)
    assert back.loaded == (4, "disk")
    assert "run " in back.log
    assert "is resumed" in back.log


def test_images_of_a_job_that_lost_the_folder_to_another_one_do_not_count(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 5, interval=2)
    run(folder, 6, interval=6, memory_ttl_seconds=0.0, memory_interval=0, load_step=4)  # Like a job on another host.
    later = run(folder, 7)
    assert later.loaded == (6, "disk")


def test_a_folder_that_was_deleted_and_made_again_gets_no_image_of_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 4, interval=2)
    shutil.rmtree(folder)
    again = run(folder, 2)
    assert again.loaded is None
    assert "which is gone" in again.log
    shutil.rmtree(folder)
    last = run(folder, 2)
    assert last.loaded is None
    assert "another folder" in last.log


def test_a_run_that_has_finished_leaves_nothing_in_memory(tmp_path: Path, memory_tier: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 4, interval=2)
    assert run(folder, 6, kills=False, finishes=True).loaded == (4, "memory")
    assert keepers_in(memory_tier) == []
    assert run(folder, 8).loaded == (6, "disk")


def test_load_only_reads_the_disk_and_leaves_the_images_to_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 5, interval=2)
    assert run(folder, 0, load_only=True, kills=False).loaded == (4, "disk")
    assert run(folder, 6).loaded == (first.ready, "memory")


def test_a_named_step_is_loaded_from_memory_only_where_it_is_what_the_disk_has(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, 6, interval=4)
    assert run(folder, 4, load=4).loaded == (4, "memory")  # A copy of what was saved, byte by byte.
    run(folder, 8, interval=4)
    assert run(folder, 4, load=4).loaded == (4, "disk")  # Its image has been overwritten.


def test_a_damaged_image_gives_way_to_the_other_one_and_then_to_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, 6, interval=4)
    spoil(folder, [first.ready], other_bytes)
    second = run(folder, 6)
    assert second.loaded == (first.ready - 1, "memory")
    assert f"The in-memory snapshot of step {first.ready} is not loaded" in second.log
    (skipped,) = [line for line in second.lines if line["event"] == "image_skipped"]
    assert skipped["step"] == first.ready
    assert "expected a block with the digest" in skipped["finding"]
    spoil(folder, [5, 6], other_bytes)
    assert run(folder, 4).loaded == (4, "memory")
    spoil(folder, [4], other_bytes)
    assert run(folder, 4).loaded == (4, "disk")


def test_where_nothing_is_on_disk_a_damaged_image_changes_nothing(tmp_path: Path, straight: dict[int, str]) -> None:
    folder = tmp_path / "run"
    run(folder, 3)
    spoil(folder, [1, 2, 3], other_bytes)
    again = run(folder, 2)
    assert again.loaded is None
    assert again.weights == {n: w for n, w in straight.items() if n <= 2}


@pytest.mark.slow
def test_another_number_of_ranks_loads_all_images_of_one_host(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    two = run(folder, 4, ranks=2, interval=2)
    one = run(folder, 7)
    assert (one.loaded, one.error) == ((4, "memory"), "")
    assert one.loaded_weight == two.weights[4]
    again = run(folder, one.ready, ranks=2)
    assert again.loaded == (one.ready, "memory")
    assert again.loaded_weight == one.weights[one.ready]
    assert two.code == again.code == KILLED


@pytest.mark.slow
def test_ranks_on_several_hosts_load_their_own_images_and_lost_hosts_mean_the_disk(
    tmp_path: Path, memory_tier: Path
) -> None:
    folder = tmp_path / "run"
    hosts = [str(memory_tier / "a"), str(memory_tier / "b")]
    first = run(folder, 5, ranks=2, hosts=hosts, interval=4)
    same = run(folder, 6, ranks=2, hosts=hosts)
    assert same.error == ""
    assert same.loaded == (first.ready, "memory")  # AdamW counts its steps in tensors that only one host has.
    assert same.loaded_weight == first.weights[first.ready]
    lost = run(folder, 5, ranks=2, hosts=[hosts[0], str(memory_tier / "c")])
    assert lost.loaded == (4, "disk")
    swapped = run(folder, 5, ranks=2, hosts=hosts[::-1])
    assert swapped.loaded == (4, "disk")


@pytest.mark.parametrize("model_only", [True, False])
def test_a_run_with_an_initial_path_continues_from_its_own_images(tmp_path: Path, model_only: bool) -> None:
    old, folder = tmp_path / "old", tmp_path / "new"
    run(old, 4, interval=4, kills=False, memory_ttl_seconds=0.0, memory_interval=0)
    initial = {"initial_load_path": str(old / "step-4"), "initial_load_model_only": model_only}
    first = run(folder, 7, **initial)
    assert first.loaded == (0 if model_only else 4, "disk")
    second = run(folder, 9, **initial)
    assert second.loaded == (first.ready, "memory")
    assert second.loaded_weight == first.weights[first.ready]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"load_step": 4}, marks=pytest.mark.slow)], ids=["latest", "load_step"]
)
def test_a_run_that_counts_again_continues_before_its_first_save(tmp_path: Path, options: dict[str, int]) -> None:
    folder, straight = tmp_path / "run", tmp_path / "straight"
    run(folder, 6, interval=2)
    shutil.copytree(folder, straight)
    again = {"interval": 10, "exclude_from_loading": ("train_state", "lr_scheduler", "dataloader"), **options}
    expected = run(straight, 11, kills=False, memory_ttl_seconds=0.0, memory_interval=0, **again).weights
    first = run(folder, 4, **again)
    assert (first.loaded, min(first.weights)) == ((options.get("load_step", 6), "disk"), 1)
    second = run(folder, 8, **again)
    assert (second.loaded, second.error) == ((first.ready, "memory"), "")
    other = run(folder, 2, **again | {"load_step": 2})  # Another branch than that of the images.
    assert other.loaded == (2, "disk")
    run(folder, 4, **again)
    spoil(folder, [1, 2, 3, 4], other_bytes)
    damaged = run(folder, 8, **again)
    assert (damaged.loaded, min(damaged.weights)) == (first.loaded, 1), "nothing of a damaged image stays"
    last = run(folder, 11, **again)
    assert last.loaded == (damaged.ready, "memory")
    for each in (first, second, damaged, last):
        assert each.weights == {step: expected[step] for step in each.weights}
    names = sorted(path.name for path in folder.iterdir() if path.name.startswith("step-"))
    assert [name for name in names if "abandoned" not in name] == ["step-10"]
    assert len(names) == 4


SLOW = pytest.mark.slow(reason="each starts two to four processes, one after another")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


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
