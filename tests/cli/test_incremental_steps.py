"""The commands on steps that share files: what a removal frees, what is damaged together, what a copy has."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.checkpoint.frozen_run import STILL, FrozenRun
from tests.checkpoint.with_manifest import flip
from tests.cli.command import command
from torchtitan_lite.store import layout
from torchtitan_lite.store.store import CheckpointStore


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose steps 1 to 4 share a file, and 5 and 6 another."""
    folder = tmp_path_factory.mktemp("trained")
    with FrozenRun(folder, incremental_full_every=3) as run:
        run.manager.load()
        run.steps(6)
    return folder


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    """Return a copy, with the links, of the folder of checkpoints."""
    shutil.copytree(trained, tmp_path / "run", copy_function=shutil.copy2)
    copy, original = tmp_path / "run" / "checkpoint", trained / "checkpoint"
    for steps in ((1, 2, 3, 4), (5, 6)):
        for step in steps[1:]:
            path = copy / layout.step_dir(step) / STILL
            assert path.read_bytes() == (original / layout.step_dir(step) / STILL).read_bytes()
            path.unlink()
            path.hardlink_to(copy / layout.step_dir(steps[0]) / STILL)
    return copy


def test_ls_says_how_much_is_shared_and_counts_it_once(root: Path) -> None:
    still = CheckpointStore(root).get(1).still[STILL]
    entries = command("ls", root, "--json").json["checkpoints"]
    assert [entry["shared_bytes"] for entry in entries] == [still] * 6
    own = sum(entry["bytes"] - still for entry in entries)
    assert f"6 checkpoints, {(own + 2 * still) / 2**20:.1f} MiB" in command("ls", root).out
    assert command("ls", root).out.count("of it shared") == 6


def test_prune_counts_what_a_removal_frees_and_keeps_another_copy(root: Path) -> None:
    before = {step: CheckpointStore(root).get(step) for step in range(1, 7)}
    own = before[1].nbytes - before[1].still[STILL]
    found = command("prune", root, "--keep-latest", "1", "--dry-run", "--json").json
    kept = {entry["step"]: entry["kept_by"] for entry in found["checkpoints"] if not entry["removed"]}
    assert kept.keys() == {4, 6}
    assert kept[4] == ["latest_of_another_copy"]
    assert found["removed_bytes"] == 4 * own
    assert "kept: the latest that shares no file with the latest" in command("prune", root, "--keep-latest", "1").out
    assert [info.step for info in CheckpointStore(root).committed()] == [4, 6]
    for step in (4, 6):
        assert CheckpointStore(root).check_sizes(before[step]) == []


def test_verify_names_every_step_that_has_a_damaged_file(root: Path) -> None:
    flip(root / layout.step_dir(3) / STILL, 5000)
    (result,) = command("verify", root / layout.step_dir(2), "--json").json["checkpoints"]
    assert result["status"] == "damaged"
    assert [finding["also_in"] for finding in result["findings"]] == [["step-1", "step-3", "step-4"]]
    assert "the same file is in step-1, step-3, step-4" in command("verify", root / layout.step_dir(2)).out
    assert command("verify", root / layout.step_dir(6)).code == 0


@pytest.mark.parametrize(
    "verb", [("convert", "--layout", "dcp"), ("reshard", "--files", "3")], ids=lambda verb: verb[0]
)
def test_a_step_that_is_written_in_another_form_has_its_bytes_to_itself(
    root: Path, tmp_path: Path, verb: tuple[str, ...]
) -> None:
    out = tmp_path / "out" / "step-6"
    name, *options = verb
    assert command(name, root / layout.step_dir(6), out, *options).code == 0
    assert all(path.stat().st_nlink == 1 for path in out.iterdir())
    assert command("diff", root / layout.step_dir(6), out).code == 0
    assert command("verify", out).code == 0


def test_an_exported_step_has_all_weights(root: Path, tmp_path: Path) -> None:
    assert command("export", root / layout.step_dir(6), tmp_path / "w.pt", "--format", "torch").code == 0
    weights = torch.load(tmp_path / "w.pt", weights_only=True)
    assert "frozen.0.weight" in str(weights.keys())


def test_inspect_says_with_which_step_it_shared_files(root: Path) -> None:
    assert "with step 5, when it was saved" in command("inspect", root / layout.step_dir(6)).out
    assert "when it was saved" not in command("inspect", root / layout.step_dir(5)).out


def test_a_pinned_step_stays_complete(root: Path) -> None:
    assert command("pin", f"{root}:2").code == 0
    assert command("prune", root, "--keep-latest", "1").code == 0
    assert [info.step for info in CheckpointStore(root).committed()] == [2, 4, 6]
    assert command("verify", root).code == 0
