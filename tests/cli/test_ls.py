"""`ls`: what is in a folder of checkpoints, complete or not."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from tests.checkpoint.reading.foreign_folders import of_0_3, of_2024, save_plain
from tests.checkpoint.small_run import SmallRun
from tests.cli.command import command, on_a_terminal, plain
from tests.cli.folders import add_step, damaged, half_written, of_newer_format, without_manifest
from torchtitan_lite.examining.inventory import inventory
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.examining.verified import Verified, content_identity, record
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind


def listed(root: Path) -> dict[str, dict[str, Any]]:
    ended = command("ls", root, "--json")
    assert (ended.code, ended.err) == (0, "")
    return {each["name"]: each for each in ended.json["checkpoints"]}


def test_checkpoints_are_listed_by_run(root: Path) -> None:
    first, branch = Lineage("aaa", None), Lineage("bbb", 8, 8, ((9, "aaa"),))
    # As a loop of its own with one process records it.
    add_step(root, 7, lineage=first, created_at=time.time() - 7200, extra={"topology": "1 ranks"})
    add_step(root, 8, lineage=first, created_at=time.time() - 180, extra={"topology": "dp_shard 2"})
    add_step(root, 9, lineage=first, created_at=time.time() - 150)
    add_step(root, 10, lineage=branch, created_at=time.time() - 50, kind=CheckpointKind.WEIGHTS_ONLY)
    ended = command("ls", root)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[0].startswith(f"{root}: 3 checkpoints, ")
    assert ["Run", "aaa"] in ended.lines and ["Run", "bbb,", "rolled", "back", "to", "step", "8"] in ended.lines
    rows = {line[0]: line for line in ended.lines if line}
    assert rows["7"][:2] + rows["7"][4:6] == ["7", "full", "2", "h"] and rows["7"][6:] == ["1", "rank"]
    assert rows["8"][4:] == ["3", "min", "dp_shard", "2", "latest"]
    assert rows["10"][:2] + rows["10"][5:] == ["10", "weights", "s", "2", "ranks"]
    assert rows["9" if "9" in rows else "step-9"][0] == "step-9", "abandoned by the branch"
    found = listed(root)
    assert [each["state"] for each in found.values()] == ["committed", "committed", "abandoned", "committed"]
    assert found["step-10"]["lineage"] == branch.to_json()


def test_what_no_job_loads_is_listed_with_the_reason(root: Path) -> None:
    add_step(root, 1)
    damaged(add_step(root, 2))
    half_written(add_step(root, 3))
    of_newer_format(add_step(root, 4))
    half_written(add_step(root, 5)).rename(root / "step-5.staging-0f3a")
    add_step(root, 6, name="step-6.corrupt")
    (root / "step-6.corrupt" / "findings.json").write_text(json.dumps({"step": 6, "findings": ["bytes 0 to 9"]}))
    add_step(root, 7, name="step-7.abandoned-abc")
    add_step(root, 8, name="step-8.weights", kind=CheckpointKind.WEIGHTS_ONLY)
    add_step(root, 9, name=".replaced-step-9-1")
    add_step(root, 10, name=".trash-step-10-1")
    add_step(root, 11).rename(root / "step-12")
    (root / "step-13").symlink_to(root / "step-1")
    (root / "step-14").mkdir()
    (root / "notes").mkdir()
    found = {name: (each["state"], each["finding"]) for name, each in listed(root).items()}
    assert found == {
        "step-1": ("committed", ""),
        "step-2": ("damaged", "__0_0.distcp has 85311 bytes, not 85312"),
        "step-3": ("half_written", "there are files of tensors in it, but no .metadata"),
        "step-4": ("unknown_format", "it has format version 99, this version reads up to 7"),
        "step-5.staging-0f3a": ("half_written", "a save into it is under way or was cut off"),
        "step-6.corrupt": ("quarantined", "bytes 0 to 9"),
        "step-7.abandoned-abc": ("abandoned", "its run rolled back"),
        "step-8.weights": ("set_aside", "a full checkpoint took its name"),
        ".replaced-step-9-1": (
            "being_replaced",
            "another checkpoint takes its place; a cut save is cleaned up at the next start of the job",
        ),
        ".trash-step-10-1": ("being_removed", "it is being removed, or its removal was cut off"),
        "step-12": ("damaged", "manifest.json: it is the manifest of step 11"),
        "step-13": ("damaged", "it is no folder"),
        "step-14": ("half_written", "there is neither manifest.json nor .metadata in it"),
    }
    ended = command("ls", root)
    assert f"{root}: 1 checkpoint, " in ended.out
    assert "half written: a save into it is under way or was cut off" in ended.out


def test_folders_of_torchtitan_and_of_plain_dcp(root: Path, tmp_path: Path) -> None:
    with SmallRun(tmp_path / "run") as run:
        run.train(2)
        of_2024(run, root / "step-1")
        of_0_3(run, root / "step-2")
        save_plain({"model": run.model.state_dict()}, root / "step-3")
        save_plain({"optimizer": run.optimizer.state_dict()}, root / "epoch_4")
    found = listed(root)
    assert {name: (each["origin"], each["kind"], each["step"]) for name, each in found.items()} == {
        "step-1": ("torchtitan", "full", 1),
        "step-2": ("torchtitan", "full", 2),
        "step-3": ("dcp", "weights_only", 3),
        "epoch_4": ("dcp", "full", None),
    }
    for name, each in found.items():
        opened = open_checkpoint(root / name)
        assert (opened.origin.value, opened.kind.value) == (each["origin"], each["kind"]), "the words do not mislead"
        assert (opened.saved_by.world_size, each["world_size"], each["lineage"]) == (1, 1, None)
        assert opened.nbytes == each["bytes"]
    ended = command("ls", root)
    assert ["Without", "a", "manifest:", "saved", "by", "torchtitan"] in ended.lines


def test_a_copy_under_a_name_of_its_own_is_not_said_to_lack_its_manifest(root: Path) -> None:
    shutil.copytree(add_step(root, 1), root / "best")
    assert listed(root)["best"]["origin"] == "torchtitan_lite"
    ended = command("ls", root)
    assert "Copies under other names" in ended.out
    assert "Without a manifest" not in ended.out


def test_marks_of_a_checkpoint(root: Path) -> None:
    """Pinned, verified, with NaN, and what retention would remove; by the keys of the latest checkpoint."""
    keys, verified_at = {"config": {"checkpoint": {"keep_latest_k": 1}}}, time.time() - 7300
    for step in (1, 2, 3, 4):
        add_step(root, step, extra={**keys, **({"nan_in": ["model.w"]} if step == 4 else {})})
    (root / "pins.json").write_text(json.dumps({"version": 1, "pinned": [1]}))
    for step, depth, findings in ((1, "full", 0), (2, "sizes", 0), (3, "full", 2)):
        identity = content_identity(root / f"step-{step}")
        assert identity is not None
        record(root / f"step-{step}", Verified(identity, verified_at, depth, findings))
    ended = command("ls", root)
    notes = {line[0]: " ".join(line[8:]) for line in ended.lines if line and line[0] in "1234"}
    assert {step: notes[step] for step in "1234"} == {
        "1": "pinned, verified 2 h ago",
        "2": "to be removed, sizes verified 2 h ago",
        "3": "DAMAGED, found 2 h ago",
        "4": "latest, NaN found",
    }
    assert "To be removed by keep_latest_k 1, the latest checkpoint's configuration." in ended.out
    found = listed(root)
    assert [found[f"step-{step}"]["to_be_removed"] for step in (1, 2, 3, 4)] == [False, True, False, False]
    assert found["step-1"]["kept_by"] == ["pinned"]
    assert found["step-3"]["verified"] == {"at": verified_at, "depth": "full", "findings": 2}
    (root / "pins.json").write_text("?")
    ended = command("ls", root)
    assert ended.code == 0 and "Nothing is removed: " in ended.out and "to be removed," not in ended.out


def test_a_step_whose_ranks_differed_is_not_the_one_that_a_job_resumes_from(root: Path) -> None:
    for step in (1, 2):
        add_step(root, step, extra={"ranks_differ": ["model.w on rank 0"]} if step == 2 else {})
    notes = {line[0]: " ".join(line[8:]) for line in command("ls", root).lines if line and line[0] in "12"}
    assert (notes["1"], notes["2"]) == ("latest", "ranks differ")
    assert [listed(root)[f"step-{step}"]["ranks_differ"] for step in (1, 2)] == [False, True]


def test_a_job_that_has_the_folder_is_named(root: Path) -> None:
    add_step(root, 1)
    now = time.time()
    holder = Holder.this_process("abc", now)
    (root / "writer.lock").write_bytes(holder.to_bytes(1, now))
    assert f"In use by run abc (process {os.getpid()} on " in command("ls", root).out
    assert command("ls", root, "--json").json["in_use_by"] == str(holder)
    gone = holder.to_bytes(1, now).replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 2147483000')
    (root / "writer.lock").write_bytes(gone)
    assert "In use" not in command("ls", root).out


def test_nothing_to_list_is_one_sentence(root: Path) -> None:
    for folder, code, sentence in (
        (root / "gone", 1, "does not exist"),
        (root, 1, "holds no checkpoint: there is no checkpoint of any step in it"),
        (without_manifest(add_step(root.parent / "other", 3)), 2, "is a checkpoint, not a folder of checkpoints"),
    ):
        ended = command("ls", folder)
        assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
        assert sentence in ended.err


def test_a_dump_folder_stands_for_the_checkpoints_in_it(root: Path) -> None:
    add_step(root, 5)
    assert command("ls", root.parent).out == command("ls", root).out


def test_listing_changes_nothing(root: Path) -> None:
    for make in (damaged, half_written, without_manifest):
        make(add_step(root, len(list(root.iterdir()))))
    before = {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")}
    inventory(root)
    command("ls", root)
    assert {path: (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")} == before


def test_the_screen_fits_80_columns_and_means_the_same_without_colours(root: Path) -> None:
    long = "dp_replicate 2 x dp_shard 4 x tp 2 x pp 2"
    for step in (1, 2000, 300_000):
        add_step(root, step, extra={"topology": long})
        damaged(add_step(root, step + 1))
    code, screen = on_a_terminal("ls", root.parent)
    assert code == 0
    lines = plain(screen).splitlines()
    assert max(map(len, lines[1:])) <= 80
    words = plain(screen).split()
    piped = command("ls", root.parent).out.split()
    assert [word for word in piped if word not in words and "/" not in word] == [], "a long path is folded"


def test_what_was_abandoned_says_to_which_step_its_run_rolled_back(root: Path) -> None:
    add_step(root, 20, lineage=Lineage("aa"))
    add_step(root, 40, name="step-40.abandoned-aa", lineage=Lineage("aa", 30))
    add_step(root, 50, lineage=Lineage("aa", 40))  # Not renamed yet.
    add_step(root, 60, name="step-60.abandoned-cc", lineage=Lineage("cc", 50))
    add_step(root, 70, name="step-70.abandoned-dd", lineage=Lineage("dd", 60))
    add_step(root, 45, lineage=Lineage("bb", 30, 30, ((40, "aa"), (50, "aa"))))
    add_step(root, 46, lineage=Lineage("ee", None, None, ((60, "cc"),)))
    found = {name: each["finding"] for name, each in listed(root).items() if each["state"] == "abandoned"}
    assert found == {
        "step-40.abandoned-aa": "rolled back to step 30",
        "step-50": "rolled back to step 30",
        "step-60.abandoned-cc": "its run counts from step 1 again",
        "step-70.abandoned-dd": "its run rolled back",
    }
    _, screen = on_a_terminal("ls", root)
    assert "abandoned: rolled back to step 30\n" in plain(screen)
