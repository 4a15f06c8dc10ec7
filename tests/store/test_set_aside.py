"""A checkpoint that was set aside gets its name back: when, what gives way, and what a crash leaves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.examples import mostly_slow
from tests.store import filled
from tests.store.crashing import Contents, Crash, Cut, contents
from tests.store.filled import fill, flip, names, save
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, FormatTooNew
from torchtitan_lite.examining.verification import check_set_aside
from torchtitan_lite.store.set_aside import names_of, refuse_harm
from torchtitan_lite.store.store import CheckpointStore


def rolled_back(root: Path) -> CheckpointStore:
    """Return a folder whose run a1 was rolled back from 16 to 4, and whose branch b2 is at 12."""
    store = fill(root, 4, 8, 16)
    save(store, 8, run_id="b2", abandons=[(8, "a1"), (16, "a1")])
    save(store, 12, run_id="b2")
    assert names(root) == ["step-12", "step-16.abandoned-a1", "step-4", "step-8", "step-8.abandoned-a1"]
    return store


def gone_past(root: Path) -> CheckpointStore:
    """Return the same folder, whose branch has gone on to 16 too, as it does with the same interval."""
    store = rolled_back(root)
    save(store, 16, run_id="b2")
    return store


def quarantined(root: Path) -> CheckpointStore:
    """Return a folder whose step 8 was set aside as damaged."""
    store = fill(root, 4, 8)
    store.quarantine(8, ["a block has another digest"])
    return store


def back(store: CheckpointStore, name: str, *, leave_branch: bool = False) -> list[str]:
    """Recover and bring `name` back, as the command does; return the names that were set aside for it."""
    store.recover()
    aside = store.shelf.find(name)
    refuse_harm(store, aside, store.shelf.in_the_way(aside), leave_branch=leave_branch)
    check_set_aside(aside, lambda num_bytes: None)
    return [path.name for path in store.shelf.bring_back(aside)]


def visible(root: Path) -> dict[int, str]:
    return {info.step: info.run_id for info in CheckpointStore(root).committed()}


def test_a_damaged_one_that_is_complete_again_comes_back_without_its_findings(tmp_path: Path) -> None:
    before = contents(fill(tmp_path / "before", 8).get(8).path)
    store = quarantined(tmp_path / "there")
    assert names_of(store.root) == ["step-8.corrupt"]
    assert back(store, "step-8.corrupt") == []
    assert names(store.root) == ["step-4", "step-8"]
    assert contents(store.get(8).path).keys() == before.keys()


def test_every_byte_of_it_is_read(tmp_path: Path) -> None:
    quarantined(tmp_path)
    read: list[int] = []
    aside = CheckpointStore(tmp_path).shelf.find("step-8.corrupt")
    check_set_aside(aside, read.append)
    assert sum(read) == aside.manifest.nbytes


@pytest.mark.parametrize(
    ("harm", "finding"),
    [
        (lambda folder: flip(folder / filled.DATA), "__0_0.distcp: bytes 0 to 100 are not what was saved"),
        (lambda folder: flip(folder / ".metadata"), ".metadata: bytes 0 to 6"),
        (lambda folder: (folder / filled.DATA).unlink(), "__0_0.distcp: it is missing"),
        (lambda folder: (folder / filled.DATA).write_bytes(b"cut"), "__0_0.distcp: it has 3 bytes, not 100"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"{}"), "manifest.json: "),
        (lambda folder: os.truncate(folder / "manifest.json", 20), "manifest.json: "),
    ],
)
def test_one_that_is_still_damaged_stays_set_aside(tmp_path: Path, harm: Callable[[Path], None], finding: str) -> None:
    store = quarantined(tmp_path)
    harm(tmp_path / "step-8.corrupt")
    before = contents(tmp_path)
    with pytest.raises(CheckpointDamaged) as damage:
        back(store, "step-8.corrupt")
    assert finding in damage.value.finding
    assert contents(tmp_path) == before


def test_a_link_in_place_of_a_file_is_damage_and_not_followed(tmp_path: Path) -> None:
    store = quarantined(tmp_path)
    path = tmp_path / "step-8.corrupt" / filled.DATA
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointDamaged, match="a symbolic link"):
        back(store, "step-8.corrupt")


def test_findings_that_are_a_link_are_removed_and_its_target_stays(tmp_path: Path) -> None:
    store = quarantined(tmp_path / "there")
    (tmp_path / "secret").write_bytes(b"theirs")
    findings = store.root / "step-8.corrupt" / "findings.json"
    findings.unlink()
    findings.symlink_to(tmp_path / "secret")
    back(store, "step-8.corrupt")
    assert (tmp_path / "secret").read_bytes() == b"theirs"
    assert not (store.root / "step-8" / "findings.json").exists()


def test_a_manifest_of_another_step_is_damage(tmp_path: Path) -> None:
    quarantined(tmp_path)
    (tmp_path / "step-8.corrupt").rename(tmp_path / "step-9.corrupt")
    with pytest.raises(CheckpointDamaged, match="it is the manifest of step 8"):
        CheckpointStore(tmp_path).shelf.find("step-9.corrupt")


def test_a_newer_format_is_no_damage(tmp_path: Path) -> None:
    filled.of_a_newer_version(tmp_path)
    (tmp_path / "step-10").rename(tmp_path / "step-10.corrupt")
    with pytest.raises(FormatTooNew):
        CheckpointStore(tmp_path).shelf.find("step-10.corrupt")


@pytest.mark.parametrize(
    "name", ["step-4", "step-8.corrupt-2", "step-8.foreign", "step-8.weights", "notes", "step-8.abandoned-", "..", ""]
)
def test_other_names_are_refused_with_those_that_are_there(tmp_path: Path, name: str) -> None:
    quarantined(tmp_path)
    with pytest.raises(CheckpointNotFound, match=r"has step-8\.corrupt\)"):
        CheckpointStore(tmp_path).shelf.find(name)


@pytest.mark.parametrize(
    "put", [lambda path: path.mkdir(), lambda path: path.write_bytes(b""), lambda path: path.symlink_to("gone")]
)
def test_it_never_takes_the_place_of_what_has_its_name(tmp_path: Path, put: Callable[[Path], object]) -> None:
    store = quarantined(tmp_path)
    put(tmp_path / "step-8")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-8\.corrupt stays as it is: .*step-8 is there already"):
        back(store, "step-8.corrupt")
    assert contents(tmp_path) == before


def test_an_abandoned_one_is_refused_by_the_name_of_what_abandons_it(tmp_path: Path) -> None:
    store = rolled_back(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        back(store, "step-16.abandoned-a1")
    assert "step-8 of run b2 has left it behind. With --leave-branch it comes back" in str(refusal.value)
    assert "With --leave-branch it comes back, and step-8, step-12 are set aside in its place" in str(refusal.value)
    assert contents(tmp_path) == before
    shutil.rmtree(tmp_path / "step-12")
    with pytest.raises(CheckpointError, match="it comes back, and step-8 is set aside in its place"):
        back(store, "step-16.abandoned-a1")


def test_its_branch_comes_back_when_the_other_one_is_left(tmp_path: Path) -> None:
    store = rolled_back(tmp_path)
    moved = ["step-12.abandoned-b2", "step-8.abandoned-b2"]
    assert back(store, "step-16.abandoned-a1", leave_branch=True) == moved
    assert visible(tmp_path) == {4: "a1", 16: "a1"}
    assert back(store, "step-8.abandoned-a1") == []
    assert visible(tmp_path) == {4: "a1", 8: "a1", 16: "a1"}
    assert CheckpointStore(tmp_path).recover() == []


@pytest.mark.parametrize(
    ("name", "moved", "then"),
    [
        ("step-16.abandoned-a1", ["step-12.abandoned-b2", "step-16.abandoned-b2", "step-8.abandoned-b2"], {16: "a1"}),
        ("step-8.abandoned-a1", ["step-12.abandoned-b2", "step-16.abandoned-b2", "step-8.abandoned-b2"], {8: "a1"}),
    ],
)
def test_the_branch_also_leaves_the_name_of_the_step_that_comes_back(
    tmp_path: Path, name: str, moved: list[str], then: dict[int, str]
) -> None:
    store = gone_past(tmp_path)
    with pytest.raises(CheckpointError, match=r"With --leave-branch it comes back, and step-8, step-12, step-16 are"):
        back(store, name)
    assert back(store, name, leave_branch=True) == moved
    assert visible(tmp_path) == {4: "a1"} | then
    assert CheckpointStore(tmp_path).recover() == []


def branched_twice(root: Path) -> CheckpointStore:
    """Return a folder whose run a1 was rolled back from 16 to 4, and its branch b2 from 12 to 8, where c3 began."""
    store = fill(root, 4, 16)
    save(store, 8, run_id="b2", abandons=[(16, "a1")], ancestors=[(4, "a1")])
    save(store, 12, run_id="b2", ancestors=[(4, "a1")])
    save(store, 10, run_id="c3", abandons=[(12, "b2")], ancestors=[(8, "b2"), (4, "a1")])
    return store


def test_branches_of_the_branch_are_left_too(tmp_path: Path) -> None:
    store = branched_twice(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-8 of run b2 has left it behind.* step-8, step-10 are set aside"):
        back(store, "step-16.abandoned-a1")
    moved = ["step-10.abandoned-c3", "step-8.abandoned-b2"]
    assert back(store, "step-16.abandoned-a1", leave_branch=True) == moved
    assert visible(tmp_path) == {4: "a1", 16: "a1"}
    assert CheckpointStore(tmp_path).recover() == []


def test_a_damaged_one_of_a_run_that_was_left_comes_back_only_in_place_of_the_branch(tmp_path: Path) -> None:
    store = fill(tmp_path, 4, 6, 7)
    store.quarantine(7, ["a byte"])
    save(store, 5, run_id="b2", abandons=[(6, "a1")], ancestors=[(4, "a1")])
    with pytest.raises(
        CheckpointError, match=r"step-5 of run b2 has left it behind.*With --leave-branch it comes back"
    ):
        back(store, "step-7.corrupt")
    assert back(store, "step-7.corrupt", leave_branch=True) == ["step-5.abandoned-b2"]
    assert visible(tmp_path) == {4: "a1", 7: "a1"}


def test_and_the_way_back_is_the_same(tmp_path: Path) -> None:
    store = rolled_back(tmp_path)
    before = contents(tmp_path)
    back(store, "step-16.abandoned-a1", leave_branch=True)
    # Of the branch, the step that abandons step 16 cannot come back next to it: it would make it invisible.
    with pytest.raises(CheckpointError, match=r"step-8\.abandoned-b2 stays as it is: it abandons step-16 of run a1"):
        back(store, "step-8.abandoned-b2")
    (tmp_path / "step-16").rename(tmp_path / "step-16.abandoned-a1")
    back(store, "step-8.abandoned-b2")
    back(store, "step-12.abandoned-b2")
    assert contents(tmp_path) == before


def test_one_that_nothing_abandons_any_more_just_comes_back(tmp_path: Path) -> None:
    store = rolled_back(tmp_path)
    store.empty(store.discard(store.get(8)))
    assert back(store, "step-16.abandoned-a1") == []
    assert visible(tmp_path) == {4: "a1", 12: "b2", 16: "a1"}


def test_a_damaged_branch_that_would_abandon_later_steps_is_refused(tmp_path: Path) -> None:
    store = rolled_back(tmp_path)
    store.quarantine(8, ["a byte"])
    save(store, 16, run_id="a1")
    with pytest.raises(CheckpointError, match=r"step-8\.corrupt stays as it is: it abandons step-16 of run a1"):
        back(store, "step-8.corrupt")
    assert visible(tmp_path) == {4: "a1", 12: "b2", 16: "a1"}


def everything(root: Path) -> dict[tuple[str, ...], Contents]:
    """Return the contents of every checkpoint in `root`, without findings, by step and run whatever its name is."""
    return {
        (path.name.split(".")[0], (path / filled.DATA).read_text()): {
            name: data for name, data in contents(path).items() if name != "findings.json"
        }
        for path in root.iterdir()
    }


@pytest.mark.promise("A kill of `prune`, `pin` or `bring-back` at any operation loses nothing.", section="kept")
@pytest.mark.parametrize("power", mostly_slow([False, True], kept=[True]))
@pytest.mark.parametrize(
    ("make", "name", "latest"),
    [
        (quarantined, "step-8.corrupt", {4, 8}),
        (rolled_back, "step-16.abandoned-a1", {8, 12, 16}),
        (gone_past, "step-16.abandoned-a1", {8, 12, 16}),
        # The very step that abandons it has its name: between the two renames neither is there.
        (gone_past, "step-8.abandoned-a1", {4, 8, 12, 16}),
        (branched_twice, "step-16.abandoned-a1", {8, 10, 16}),
    ],
    ids=["damaged", "abandoned", "and its step saved again", "abandoned by the same step", "and by two branches"],
)
def test_cut_anywhere_every_checkpoint_is_complete_and_the_same_call_finishes(
    tmp_path: Path, make: Callable[[Path], CheckpointStore], name: str, latest: set[int], power: bool
) -> None:
    done = make(tmp_path / "done")
    back(done, name, leave_branch=True)
    for at in range(1, 100):
        root = tmp_path / str(at)
        make(root)
        before = everything(root)
        try:
            back(CheckpointStore(root, durable=Cut(at, power=power)), name, leave_branch=True)
        except Crash:
            assert everything(root) == before
            assert max(visible(root)) in latest
            after = CheckpointStore(root)
            after.recover()
            assert everything(root) == before
            if (root / name).exists():
                back(after, name, leave_branch=True)
            assert names(root) == names(done.root)
        else:
            assert at > 3, "no operation was cut"
            return
    raise AssertionError("more operations than expected")
