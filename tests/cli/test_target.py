"""Which checkpoint a spelling means."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import command
from tests.cli.folders import add_step, damaged, half_written, of_newer_format, without_manifest
from torchtitan_lite.cli.named_checkpoint import resolve
from torchtitan_lite.errors import CheckpointNotFound, ConfigError
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind


@pytest.fixture
def root(tmp_path: Path) -> Path:
    add_step(tmp_path / "checkpoint", 7)
    add_step(tmp_path / "checkpoint", 9)
    add_step(tmp_path / "checkpoint", 12, kind=CheckpointKind.WEIGHTS_ONLY)
    return tmp_path / "checkpoint"


def test_a_folder_alone_is_its_latest_full_step(root: Path) -> None:
    for spelling in (f"{root}", f"{root}:latest", f"{root.parent}", f"{root.parent}:latest", f"{root}/"):
        target = resolve(spelling)
        assert (target.folder, target.root, target.step) == (root / "step-9", str(root), 9)


def test_a_step_is_a_folder_or_a_number_behind_a_colon(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for spelling in (f"{root}:7", f"{root.parent}:7", f"{root / 'step-7'}", f"{root / 'step-7'}/"):
        target = resolve(spelling)
        assert (target.folder, target.root, target.step) == (root / "step-7", str(root), 7)
    monkeypatch.chdir(root.parent)
    assert resolve("checkpoint:7").folder == Path("checkpoint/step-7")
    assert resolve("checkpoint/step-7").folder == Path("checkpoint/step-7")


def test_a_folder_with_a_colon_in_its_name_is_that_folder(root: Path) -> None:
    odd = root.parent / "a:7"
    root.rename(odd)
    assert resolve(f"{odd}").folder == odd / "step-9"
    assert resolve(f"{odd}:7").folder == odd / "step-7"


def test_a_folder_without_full_steps_of_ours_is_its_latest_foreign_one_else_its_latest_weights(root: Path) -> None:
    for step in (7, 9):
        without_manifest(root / f"step-{step}")
    assert resolve(f"{root}").step == 9
    half_written(add_step(root, 11))
    assert resolve(f"{root}").step == 9
    for step in (7, 9):
        (root / f"step-{step}" / ".metadata").unlink()
    assert resolve(f"{root}").step == 12


def test_a_checkpoint_of_any_name_is_not_in_a_folder_of_checkpoints(root: Path) -> None:
    for name in ("best", "step-7.corrupt"):
        (root / "step-7").rename(root / name)
        target = resolve(f"{root / name}")
        assert (target.folder, target.root, target.step) == (root / name, "", None)
        (root / name).rename(root / "step-7")


def test_an_abandoned_step_is_not_the_latest(root: Path) -> None:
    add_step(root, 8, lineage=Lineage("branch", 7, 7, ((9, "golden"),)))
    assert resolve(f"{root}").step == 8
    assert resolve(f"{root}:9").step == 9, "by its number it can still be read"


@pytest.mark.parametrize("verb", ["inspect"])
def test_what_is_no_complete_checkpoint_is_one_sentence(verb: str, root: Path) -> None:
    damaged(add_step(root, 20))
    half_written(add_step(root, 21))
    half_written(add_step(root, 23)).rename(root / "step-23.staging-0f3a")
    (root / "file").write_text("")
    (root / "empty").mkdir()
    cases = {
        f"{root}/nothing": (1, "does not exist"),
        f"{root}/nothing:7": (1, "does not exist"),
        f"{root}:seven": (1, "does not exist, and 'seven' is not a step: expected a number"),
        f"{root}/file": (1, "holds no checkpoint: it is not a folder"),
        f"{root}/empty": (1, "holds no checkpoint: there is no complete checkpoint in it"),
        f"{root}/empty:7": (1, "step 7 is not in"),
        f"{root}:8": (1, "(it has 7, 9, 12, 20)"),
        f"{root}:20": (3, "step-20 is damaged: __0_0.distcp: expected 85312 bytes, found 85311"),
        f"{root}:21": (1, "holds no checkpoint: there are files of tensors in it, but no .metadata"),
        f"{root}/step-23.staging-0f3a": (1, "holds no checkpoint: a save into it is under way or was cut off"),
    }
    newer = of_newer_format(add_step(root.parent / "newer", 22))
    for spelling in (newer, newer.parent, f"{newer.parent}:22"):
        cases[f"{spelling}"] = (1, "it has format version 99, this version reads up to 7: upgrade")
    for spelling, (code, sentence) in cases.items():
        ended = command(verb, spelling)
        assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1), spelling
        assert ended.err.startswith("error: ") and sentence in ended.err, (spelling, ended.err)


def test_addresses_of_no_object_store_are_refused() -> None:
    with pytest.raises(ConfigError, match="'hdfs://b/c' is not the address of a folder in an object store"):
        resolve("hdfs://b/c")
    with pytest.raises(CheckpointNotFound):
        resolve("")


def test_a_step_that_is_not_there_is_reported_under_the_folder_as_it_was_spelled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    assert command("inspect", f"{root.name}:8").err == f"error: step 8 is not in {root.name} (it has 7, 9, 12)\n"


@pytest.mark.parametrize("arguments", [["ls", "."], ["inspect", "."], ["verify", "."]])
def test_where_a_folder_has_no_checkpoints_the_runs_in_it_are_named(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add_step(tmp_path / "outputs" / "checkpoint", 7)
    (tmp_path / "logs").mkdir()
    for also, said in (
        (None, "in it; outputs/checkpoint has some\n"),
        ("second", "in it; outputs/checkpoint, second have some\n"),
    ):
        if also:
            add_step(tmp_path / also, 7)
        result = command(*arguments)
        assert (result.code, said in result.err) == (1, True), result.err
