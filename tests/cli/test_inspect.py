"""`inspect`: what a checkpoint is and what is in it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.checkpoint.reading.foreign_folders import of_0_3, of_2024, save_plain
from tests.checkpoint.small_run import SmallRun
from tests.cli.command import command, on_a_terminal, plain
from tests.cli.folders import GOLDEN, add_step, damaged
from torchtitan_lite.cli.inspect_step import changed_settings
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.store.lineage import Lineage

GOLDEN_FORMATS = sorted((GOLDEN.parents[3]).glob("format-*/*/checkpoint/step-*"))


def test_origin_configuration_parts_tensors_and_files_are_shown(root: Path) -> None:
    config = JobConfig().to_dict()
    config["training"]["steps"] = 77
    config["mine"] = {"rate": [1, 2]}
    lineage = Lineage("abc", 3, 2)
    extra = {"config": config, "topology": "dp_shard 2", "metrics": {"loss": 2.5}, "nan_in": ["model.weight"]}
    extra["ranks_differ"] = ["model.weight on rank 2 (b), unlike ranks 0, 1"]
    ended = command("inspect", add_step(root, 7, extra=extra, lineage=lineage))
    assert (ended.code, ended.err) == (0, "")
    assert ended.lines[0] == [f"{root}/step-7"]
    facts = {line[0]: " ".join(line[1:]) for line in ended.lines[1:9] if line}
    assert facts["kind"] == "full checkpoint of step 7"
    assert facts["saved"].endswith(" ago by 2 ranks (dp_shard 2)")
    assert facts["run"] == "abc, after step 3, rolled back to step 2"
    assert facts["written"].startswith("by torchtitan_lite ") and facts["written"].endswith(", format 7")
    assert facts["metrics"] == "loss 2.5"
    assert facts["NaN"] == "in model.weight"
    assert facts["ranks"] == "differ model.weight on rank 2 (b), unlike ranks 0, 1"
    assert ["training.steps", "77"] in ended.lines and ["mine.rate", "[1,", "2]"] in ended.lines
    assert "training.seq_len" not in ended.out, "it is at its default"
    titles = [" ".join(line) for line in ended.lines if line in (["Parts"], ["Tensors"], ["Files"])]
    assert titles == ["Parts", "Tensors", "Files"]
    names = {line[0] for line in ended.lines if line}
    assert {"model", "optimizer", "train_state", "all"} <= names
    [first] = [line for line in ended.lines if "__0_0.distcp" in line]
    assert first[:3] == ["0", "__0_0.distcp", "83.3"]


def test_json_has_everything_and_the_sums_agree(root: Path) -> None:
    found = command("inspect", add_step(root, 7), "--json").json
    opened = open_checkpoint(root / "step-7")
    assert [each["key"] for each in found["tensors"]] == list(opened.contents.tensors)
    assert sum(each["bytes"] for each in found["tensors"]) == sum(each["bytes"] for each in found["parts"])
    assert sum(each["bytes"] for each in found["files"]) == found["bytes"] == opened.nbytes
    held = sum(nbytes for each in found["files"] for nbytes in each["tensor_bytes"].values())
    assert held == sum(each["bytes"] for each in found["parts"]), "each element is in exactly one file"
    assert sum(each["elements"] for each in found["parts"]) == sum(
        math.prod(each["shape"]) for each in found["tensors"]
    )
    assert {each["rank"] for each in found["files"]} == {0, 1, None}


def test_a_glob_shows_each_tensor_that_matches(root: Path) -> None:
    add_step(root, 7)
    ended = command("inspect", root, "--tensors", "model.*")
    keys = [each["key"] for each in command("inspect", root, "--tensors", "model.*", "--json").json["tensors"]]
    assert keys and all(key.startswith("model.") for key in keys)
    assert [line[0] for line in ended.lines if line and line[0].startswith("model.")] == keys
    assert ["Parts"] not in ended.lines and ["Files"] not in ended.lines
    ended = command("inspect", root, "--tensors", "no.such.*")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.endswith("no tensor of {} matches no.such.*: inspect shows the keys\n".format(root / "step-7"))


def test_ranks_divides_the_files_by_part(root: Path) -> None:
    add_step(root, 7)
    ended = command("inspect", root, "--ranks")
    [legend] = [line for line in ended.out.splitlines() if line.startswith("Files: ")]
    marks = {part.split()[1]: part.split()[0] for part in legend.removeprefix("Files: ").split(", ")}
    assert len(marks) == 4 and {"model", "other"} <= marks.keys(), "the largest parts have their own"
    [bar] = [line.split()[-1] for line in ended.out.splitlines() if "__0_0.distcp" in line]
    assert set(bar) == set(marks.values())


@pytest.mark.parametrize("folder", GOLDEN_FORMATS, ids=lambda path: "-".join(path.parts[-4:-2]))
def test_checkpoints_of_every_format_are_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / folder.name)
    if not (folder / ".metadata").exists():
        command("add-metadata", tmp_path / folder.name)
    ours = command("inspect", tmp_path / folder.name, "--json").json
    (tmp_path / folder.name / "manifest.json").unlink()
    of_dcp = command("inspect", tmp_path / folder.name, "--json").json
    assert (ours["origin"], of_dcp["origin"]) == ("torchtitan_lite", "dcp")
    has_records = (folder / "__0_0.json").exists()  # DCP does not see what is in them.
    known = [each for each in ours["tensors"] if not (has_records and each["key"].startswith("rng.rank"))]
    assert known == of_dcp["tensors"] and known
    # Of DCP are no records, and of the manifest no .metadata that was added.
    records = sum(path.stat().st_size for path in folder.glob("__*.json"))
    added = 0 if (folder / ".metadata").exists() else (tmp_path / folder.name / ".metadata").stat().st_size
    assert ours["bytes"] - records + added == of_dcp["bytes"] and ours["step"] == of_dcp["step"]


def test_folders_of_torchtitan_and_of_plain_dcp(root: Path, tmp_path: Path) -> None:
    with SmallRun(tmp_path / "run") as run:
        run.train(2)
        folders = [of_2024(run, root / "step-1"), of_0_3(run, root / "step-2")]
        plain_dcp = save_plain({"model": run.model.state_dict()}, root / "final")
    for folder in folders:
        ended = command("inspect", folder)
        assert (
            ended.lines[1][1:]
            == f"full checkpoint of step {folder.name[-1]}, by torchtitan, without a manifest".split()
        )
        assert "Configuration" not in ended.out and "written by" not in ended.out
    ended = command("inspect", plain_dcp)
    assert ended.lines[1][1:] == ["weights-only", "checkpoint,", "by", "plain", "DCP,", "without", "a", "manifest"]
    assert next(line for line in ended.lines if line[:1] == ["model"])[:5] == ["model", "10", "84", "348", "B"]


def test_damage_is_exit_code_3(root: Path) -> None:
    damaged(add_step(root, 7))
    (add_step(root, 8) / "manifest.json").write_text("{}")
    (add_step(root, 9) / ".metadata").write_text("{}")
    (root / "step-9" / "manifest.json").unlink()
    for step, sentence in (
        (7, "step-7 is damaged: __0_0"),
        (8, "step-8 is damaged: manifest.json"),
        (9, "step-9/.met"),
    ):
        ended = command("inspect", f"{root}:{step}")
        assert (ended.code, ended.out) == (3, "")
        assert sentence in ended.err and ended.err.count("\n") == 1


def test_settings_at_their_defaults_are_left_out() -> None:
    assert changed_settings({}) == {}
    assert changed_settings(json.loads(json.dumps(JobConfig().to_dict()))) == {}
    assert changed_settings({"job": {"description": "mine"}, "other": {"a": 1}}) == {
        "job.description": "mine",
        "other.a": "1",
    }


@pytest.mark.slow
def test_the_screen_fits_80_columns_and_means_the_same_without_colours(root: Path) -> None:
    add_step(root, 7, extra={"config": {"job": {"description": "word " * 40}}})
    for options in ([], ["--tensors=*"], ["--ranks"]):
        code, screen = on_a_terminal("inspect", f"{root.parent}", *options)
        assert code == 0
        lines = plain(screen).splitlines()
        assert max(map(len, lines[1:])) <= 80, "the first line is the folder"
        assert "\x1b[3" not in screen, "no colours, only bold"
