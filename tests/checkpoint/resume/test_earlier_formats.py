"""A folder of a format from before the first release: one sentence from whoever meets it, and no byte changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.cli.command import command
from torchtitan_lite.checkpoint import CheckpointManager, load_model
from torchtitan_lite.errors import FormatTooOld
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import seal

SENTENCE = "from before the first release, whose format is 7"


def a_manager(folder: Path, **given: Any) -> CheckpointManager:
    return CheckpointManager.for_loop(model=nn.Linear(2, 3), folder=folder, interval=1, preemption_signals=(), **given)


def make_earlier(path: Path, version: int) -> None:
    """Rewrite the manifest at `path` as `version` had it, as far as that matters to who does not read it."""
    document = json.loads(path.read_bytes())
    del document["digest"], document["oldest_reader"], document["files_of_ranks"]
    document["format_version"] = version
    text = json.dumps(document, indent=1)
    path.write_bytes(text.encode() if version == 1 else seal(text.removesuffix("\n}").encode()))


@pytest.fixture(params=[1, 2, 3, 6])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder of checkpoints of an earlier format, with what a killed save left there."""
    root = tmp_path / "checkpoint"
    with a_manager(root) as manager:
        for step in (1, 2):
            manager.save(step)
    for path in root.glob("step-*/manifest.json"):
        make_earlier(path, request.param)
    shutil.copytree(root / "step-2", root / "step-3.staging")
    shutil.copytree(root / "step-1", root / ".replaced-step-4-1")
    return root


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.promise(
    "A checkpoint of another format version is not damage, and no run starts from scratch in its folder.",
    section="loaded",
)
def test_a_run_neither_loads_it_nor_starts_from_scratch_in_it(folder: Path, tmp_path: Path) -> None:
    before = contents_of(folder)
    for given in ({}, {"load_only": True}, {"load_step": 1}, {"initial_load_path": str(folder / "step-1")}):
        with pytest.raises(FormatTooOld, match=SENTENCE), a_manager(folder, **given) as manager:
            manager.load()
        assert contents_of(folder) == before
    with pytest.raises(FormatTooOld, match=SENTENCE), a_manager(folder) as manager:
        manager.save(5)
    with pytest.raises(FormatTooOld, match=SENTENCE):
        load_model(nn.Linear(2, 3), folder)
    other = a_manager(tmp_path / "other", initial_load_path=str(folder / "step-2"))
    with pytest.raises(FormatTooOld, match=SENTENCE), other as manager:
        manager.load()
    assert contents_of(folder) == before


def test_each_verb_says_so_and_changes_nothing(folder: Path, tmp_path: Path) -> None:
    before = contents_of(folder)
    step = folder / "step-2"
    for verb in (
        ["verify", step],
        ["inspect", step],
        ["diff", step, folder / "step-1"],
        ["convert", step, tmp_path / "out"],
        ["reshard", step, tmp_path / "out", "--files", "1"],
        ["export", step, tmp_path / "out"],
        ["prune", folder, "--keep-latest", "1"],
        ["pin", step],
        ["add-metadata", step],
        ["upload", folder, tmp_path / "there"],
    ):
        ended = command(*map(str, verb))
        assert ended.code == 1, (verb, ended)
        assert SENTENCE in ended.err and "24f7bada" in ended.err, (verb, ended.err)
    assert contents_of(folder) == before
    assert not (tmp_path / "out").exists()


def test_a_list_of_the_folder_names_each_step_with_the_reason(folder: Path) -> None:
    before = contents_of(folder)
    listed = command("ls", str(folder), "--json").json["checkpoints"]
    states = {each["name"]: (each["state"], each["finding"]) for each in listed}
    for step in (1, 2):
        state, finding = states[layout.step_dir(step)]
        assert state == "unknown_format" and SENTENCE in finding
    verified = command("verify", str(folder), "--json")
    assert verified.code == 1
    # .replaced-step-4-1, too.
    assert [each["status"] for each in verified.json["checkpoints"]] == ["unknown format"] * 3
    assert contents_of(folder) == before
