"""A damaged checkpoint is never resumed; an older one is, in the same start."""

from __future__ import annotations

import gc
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.checkpoint.conftest import StartRun
from tests.checkpoint.small_run import SmallRun, same
from tests.disks import injected
from tests.store.filled import flip, later_format
from torchtitan_lite.errors import AllCheckpointsDamaged, CheckpointDamaged, CheckpointUnreadable, FormatTooNew
from torchtitan_lite.store.manifest import Manifest

DATA = "__0_0.distcp"


def flip_in(folder: Path, key: str) -> None:
    """Flip a bit of the tensor `key`."""
    manifest = Manifest.of_folder(folder)
    assert manifest is not None
    flip(folder / DATA, manifest.tensors[key]["chunks"][0][1])


@pytest.fixture
def trained(start_run: StartRun) -> SmallRun:
    """Return a run that saved steps 2, 4 and 6 and is closed."""
    run = start_run(interval=2).finished(6)
    return run


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped tensor": lambda folder: flip_in(folder, "model.first.weight"),
    "a flipped object": lambda folder: flip(folder / DATA, -1),
    "a flipped .metadata": lambda folder: flip(folder / ".metadata", 100),
    "a flipped manifest": lambda folder: flip(folder / "manifest.json", 40),
    "a cut file": lambda folder: (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-1]),
    "an empty manifest": lambda folder: (folder / "manifest.json").write_bytes(b""),
    "a missing file": lambda folder: (folder / DATA).unlink(),
    "another step's file": lambda folder: shutil.copy(folder.with_name("step-2") / DATA, folder / DATA),
    "another step's manifest": lambda folder: shutil.copy(
        folder.with_name("step-2") / "manifest.json", folder / "manifest.json"
    ),
}


@pytest.mark.promise(
    "By default no run resumes from changed files: all ranks load the next older step, and the log names the other.",
    section="loaded",
)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_next_older_one_is_resumed_from(
    damage: Callable[[Path], object], trained: SmallRun, start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    damage(trained.root / "step-6")
    run = start_run(interval=2).resumed()
    assert (run.manager.loaded_step, run.train_state.step) == (4, 4)
    assert run.names() == ["step-2", "step-4", "step-6.corrupt"]
    assert run.events.steps("fallback") == [4]
    assert run.events.steps("quarantined") == [6]
    assert run.events.figures("fallback")["damaged_step"] == 6
    finding = run.events.figures("fallback")["finding"]
    [found, fell_back, renamed] = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert found.startswith(f"Step 6 is damaged: {finding}") and found.endswith(". Trying an older one")
    assert fell_back == "Fell back from step 6 to step 4"
    assert renamed == f"Step 6 is damaged and is now {trained.root}/step-6.corrupt"


@pytest.mark.promise(
    "By default no run resumes from changed files: all ranks load the next older step, and the log names the other.",
    section="loaded",
)
def test_a_resumed_run_is_the_run_from_the_older_one(trained: SmallRun, start_run: StartRun, tmp_path: Path) -> None:
    flip_in(trained.root / "step-6", "model.first.weight")
    run = start_run(interval=2).loaded()
    run.train(8)
    straight = start_run(tmp_path / "straight", interval=2)
    straight.train(8)
    assert same(run.contents(), straight.contents())
    assert run.committed() == [2, 4, 6, 8]


def test_what_was_allocated_for_a_damaged_one_is_free_once_an_older_one_is_loaded(
    trained: SmallRun, start_run: StartRun
) -> None:
    def moments() -> int:
        shape = trained.model.first.weight.shape
        return sum(type(each) is Tensor and each.shape == shape for each in gc.get_objects())

    flip_in(trained.root / "step-6", "model.second.weight")
    run = start_run(interval=2)
    gc.collect()
    before = moments()
    gc.disable()  # As training does.
    try:
        assert run.resumed().train_state.step == 4
        assert moments() - before == 2
    finally:
        gc.enable()


def test_the_finding_names_file_and_tensor(trained: SmallRun, start_run: StartRun) -> None:
    folder = trained.root / "step-6"
    flip_in(folder, "model.second.weight")
    run = start_run(interval=2).loaded()
    finding = run.events.figures("fallback")["finding"]
    assert DATA in finding
    assert "model.second.weight" in run.events.figures("fallback")["keys"]
    findings = next((trained.root / "step-6.corrupt").glob("*.json"), None)
    assert findings is not None


def test_several_damaged_ones_are_skipped_in_one_start(trained: SmallRun, start_run: StartRun) -> None:
    flip(trained.root / "step-6" / "manifest.json", 40)
    flip_in(trained.root / "step-4", "model.first.weight")
    run = start_run(interval=2).resumed()
    assert run.train_state.step == 2
    assert run.names() == ["step-2", "step-4.corrupt", "step-6.corrupt"]
    assert sorted(run.events.steps("quarantined")) == [4, 6]


@pytest.mark.promise(
    "If all checkpoints are damaged, none is renamed, and the run does not start from scratch.",
    section="loaded",
)
def test_where_all_are_damaged_each_is_named_and_none_is_renamed(trained: SmallRun, start_run: StartRun) -> None:
    for step, file in ((2, DATA), (4, "manifest.json"), (6, ".metadata")):
        flip(trained.root / f"step-{step}" / file, 300)
    run = start_run(interval=2)
    with pytest.raises(AllCheckpointsDamaged) as raised:
        run.manager.load()
    assert sorted(raised.value.findings) == [2, 4, 6]
    assert all(file in raised.value.findings[step] for step, file in ((2, DATA), (6, ".metadata")))
    assert run.names() == ["step-2", "step-4", "step-6"]
    run.manager.close()
    with pytest.raises(AllCheckpointsDamaged):
        start_run(interval=2).manager.load()


@pytest.mark.promise("A step that you name is never replaced by another.", section="loaded")
def test_a_named_step_is_not_replaced_by_another(trained: SmallRun, start_run: StartRun) -> None:
    flip_in(trained.root / "step-4", "model.first.weight")
    run = start_run(interval=2, load_step=4)
    with pytest.raises(CheckpointDamaged, match="step-4"):
        run.manager.load()
    assert run.names() == ["step-2", "step-4", "step-6"]


@pytest.mark.promise(
    "A checkpoint of another format version is not damage, and no run starts from scratch in its folder.",
    section="loaded",
)
def test_a_newer_format_is_no_damage(trained: SmallRun, start_run: StartRun) -> None:
    path = trained.root / "step-6" / "manifest.json"
    path.write_bytes(later_format(path.read_bytes()))
    with pytest.raises(FormatTooNew):
        start_run(interval=2).manager.load()
    assert trained.names() == ["step-2", "step-4", "step-6"]


@pytest.mark.promise("An I/O error is not damage: nothing is renamed, and the start fails.", section="loaded")
def test_an_error_of_the_machine_is_no_damage(trained: SmallRun, start_run: StartRun) -> None:
    run = start_run(interval=2)
    with injected("EIO@read:times=always"), pytest.raises(CheckpointUnreadable, match="Input/output error"):
        run.manager.load()
    assert run.names() == ["step-2", "step-4", "step-6"]


def test_a_temporary_error_of_the_machine_has_no_effect(trained: SmallRun, start_run: StartRun) -> None:
    run = start_run(interval=2)
    with injected("EIO@read:times=1"):
        assert run.manager.load()
    assert run.train_state.step == 6


@pytest.mark.promise(
    "A run with `checkpoint.load_only` changes nothing in the folder of checkpoints, and adds nothing but the "
    "traces that you ask for to the dump folder.",
    section="writer",
)
def test_a_run_that_only_loads_falls_back_and_renames_nothing(trained: SmallRun, start_run: StartRun) -> None:
    flip_in(trained.root / "step-6", "model.first.weight")
    run = start_run(load_only=True).resumed()
    assert run.train_state.step == 4
    assert run.names() == ["step-2", "step-4", "step-6"]


@pytest.mark.parametrize(("verify", "found"), [("full", True), ("size", False), ("off", False)])
def test_verify_on_load_decides_how_much_is_checked(
    verify: str, found: bool, trained: SmallRun, start_run: StartRun
) -> None:
    flip_in(trained.root / "step-6", "model.first.weight")
    run = start_run(interval=2, verify_on_load=verify).resumed()
    assert run.train_state.step == (4 if found else 6)


def test_a_quarantined_one_is_not_in_the_way_of_the_same_step_again(trained: SmallRun, start_run: StartRun) -> None:
    for names in (
        ["step-2", "step-4", "step-6", "step-6.corrupt"],
        ["step-2", "step-4", "step-6.corrupt", "step-6.corrupt-2"],
    ):
        flip(trained.root / "step-6" / "manifest.json", 40)
        run = start_run(interval=2).resumed()
        if "step-6" in names:
            run.train(6)
        run.manager.close()
        assert run.names() == names


def test_a_dry_run_falls_back_too_and_changes_nothing(trained: SmallRun, start_run: StartRun) -> None:
    (trained.root / "step-6" / DATA).write_bytes(b"cut")
    flip(trained.root / "step-4" / "manifest.json", 40)
    report = start_run(interval=2).manager.dry_run()
    assert report is not None
    assert report.step == 2
    flip(trained.root / "step-2" / "manifest.json", 40)
    with pytest.raises(AllCheckpointsDamaged):
        start_run(interval=2).manager.dry_run()
    assert trained.names() == ["step-2", "step-4", "step-6"]


@pytest.mark.promise(
    "A link, a pipe or a device in place of a file is damage: the report names it, and the next older step is loaded.",
    section="loaded",
)
def test_damage_to_the_manifest_names_the_file_wherever_it_is_reported(
    trained: SmallRun, start_run: StartRun, caplog: pytest.LogCaptureFixture
) -> None:
    flip(trained.root / "step-6" / "manifest.json", 40)
    run = start_run(interval=2).resumed()
    assert run.events.figures("fallback")["finding"].startswith("manifest.json: ")
    assert "Step 6 is damaged: manifest.json: " in caplog.text
    [finding] = json.loads((trained.root / "step-6.corrupt" / "findings.json").read_text())["findings"]
    assert finding.startswith("manifest.json: ")


@pytest.mark.promise(
    "A link, a pipe or a device in place of a file is damage: the report names it, and the next older step is loaded.",
    section="loaded",
)
@pytest.mark.parametrize("name", [DATA, ".metadata", "manifest.json"])
def test_what_is_no_file_is_damage_and_the_next_older_one_is_resumed_from(
    name: str, trained: SmallRun, start_run: StartRun, tmp_path: Path
) -> None:
    path = trained.root / "step-6" / name
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    run = start_run(interval=2).resumed()
    assert run.train_state.step == 4
    assert name in run.events.figures("fallback")["finding"]
    assert run.names() == ["step-2", "step-4", "step-6.corrupt"]


class Removes:
    """Removes a folder at its first load, as the job that writes there may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.promise(
    "A reader (`checkpoint.load_only`) whose step is removed or replaced while it reads chooses again.",
    section="loaded",
)
def test_a_reader_whose_step_is_removed_while_it_reads_chooses_again(tmp_path: Path, start_run: StartRun) -> None:
    removes = Removes(tmp_path / "none")
    writer = start_run(interval=2, states={"removes": removes})
    writer.train(6)
    reader = start_run(load_only=True, states={"removes": Removes(writer.root / "step-6")}).resumed()
    assert (reader.manager.loaded_step, reader.train_state.step) == (4, 4)
    assert reader.events.steps("fallback") == []
    straight = start_run(tmp_path / "straight", interval=2, states={"removes": removes})
    straight.train(4)
    assert same(reader.contents(), straight.contents())


def test_nothing_of_a_damaged_step_is_left_where_a_seed_is_the_next_older_one(start_run: StartRun) -> None:
    seed = start_run(create_seed_checkpoint=True)
    seed.manager.save(0, force=True)
    seed.manager.close()
    first = start_run(interval=2).loaded().finished(2)
    flip_in(first.root / "step-2", "model.first.weight")
    run = start_run(seed=1, interval=2)
    with pytest.raises(CheckpointDamaged, match=r"step-2 is damaged: .* start the same command again"):
        run.manager.load()  # By now the counter and the optimizer are those of step 2.
    run.manager.close()
    assert run.names() == ["step-0", "step-2.corrupt"]
    again = start_run(seed=2, interval=2)
    before = again.contents()
    assert again.manager.load()
    assert same(again.contents(), before | {"model": seed.contents()["model"]})
