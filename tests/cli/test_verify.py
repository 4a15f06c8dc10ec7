"""`verify` on complete, damaged, half-written and foreign folders: the screen, the JSON, the exit code, the record."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.reading.foreign_folders import of_0_3, of_2024, save_plain
from tests.checkpoint.small_run import SmallRun
from tests.cli.conftest import Said
from tests.cli.folders import GOLDEN, add_step
from tests.store.filled import flip, later_format
from torchtitan_lite.cli import verify
from torchtitan_lite.examining.verified import verified, verified_in
from torchtitan_lite.store.store import CheckpointStore

COMMAND = "verify"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder of checkpoints with one of two ranks, step 7."""
    shutil.copytree(GOLDEN, tmp_path / "checkpoint" / "step-7")
    return tmp_path / "checkpoint"


def as_json(text: str) -> Any:
    return json.loads(text)["checkpoints"]


@pytest.mark.parametrize("spelling", ["", "checkpoint", "checkpoint/step-7", "checkpoint:7", ":latest"])
@pytest.mark.parametrize("options", [[], ["--sizes"]])
def test_a_complete_checkpoint_however_it_is_spelt(spelling: str, options: list[str], root: Path, call: Said) -> None:
    target = f"{root.parent}/{spelling}" if not spelling.startswith(":") else f"{root.parent}{spelling}"
    code, out, err = call(target, *options)
    assert (code, err) == (0, "")
    assert out.splitlines()[0].split() == ["step-7", "intact", "3", "files", "34", "tensors", "126.6", "KiB"]
    assert out.splitlines()[-1].endswith("No byte was read." if "--sizes" in options else "nothing is damaged.")
    entry = verified(root / "step-7", verified_in(root))
    assert entry is not None and (entry.depth, entry.num_findings) == ("sizes" if "--sizes" in options else "full", 0)


def test_a_flipped_byte_is_found_and_names_file_and_tensor(root: Path, call: Said) -> None:
    flip(root / "step-7" / "__1_0.distcp", 390)
    code, out, _ = call(root, "--sizes")
    assert (code, "nothing is missing or truncated." in out, "nothing is damaged" in out) == (0, True, False)
    code, out, err = call(root)
    assert (code, err) == (3, "")
    assert "DAMAGED" in out
    assert "__1_0.distcp: bytes 0 to 24896 are not what was saved: another digest" in out
    assert "in it: model.weight, model.brief, " in out
    entry = verified(root / "step-7", verified_in(root))
    assert entry is not None and (entry.depth, entry.num_findings) == ("full", 1)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda path: os.truncate(path, 400), "it has 400 bytes, not 24896"),
        (lambda path: path.unlink(), "it is missing"),
        (lambda path: (path.unlink(), path.mkdir()), "it is a folder"),
    ],
)
def test_a_truncated_missing_or_other_file_is_found_by_its_size(
    damage: Callable[[Path], object], text: str, root: Path, call: Said
) -> None:
    damage(root / "step-7" / "__1_0.distcp")
    code, out, err = call(root, "--sizes")
    assert (code, err) == (3, "")
    assert f"__1_0.distcp: {text}\n" in out
    assert "in it: model.weight, " in out


def test_a_damaged_manifest_is_damage_and_no_result_is_recorded(root: Path, call: Said) -> None:
    flip(root / "step-7" / "manifest.json", 40)
    for target in (root / "step-7", root):
        code, out, err = call(target)
        assert (code, err) == (3, "")
        assert "manifest.json: its own digest is not the" in out
    assert verified_in(root) == {}


def test_json_has_every_finding_and_every_key(root: Path, call: Said) -> None:
    flip(root / "step-7" / "__1_0.distcp", 390)
    code, out, err = call(root, "--json")
    assert (code, err) == (3, "")
    [checkpoint] = as_json(out)
    [finding] = checkpoint["findings"]
    assert checkpoint["status"] == "damaged"
    assert finding["file"] == "__1_0.distcp" and len(finding["keys"]) == 14
    assert checkpoint["compared_with"] == "digests"


def test_each_committed_step_of_a_folder_is_verified(root: Path, call: Said) -> None:
    save_plain({"weight": torch.ones(3)}, root / "step-9")
    shutil.copytree(root / "step-7", root / "step-8.staging-0f3a")
    shutil.copytree(root / "step-7", root / "step-6.corrupt")
    (root / "step-5").mkdir()
    code, out, err = call(root, "--json")
    assert [each["name"] for each in as_json(out)] == ["step-7", "step-9"]
    assert [each["compared_with"] for each in as_json(out)] == ["digests", "checksums"]
    assert (code, err) == (0, ""), "no notes with --json"
    code, out, err = call(root)
    assert "step-9 has no digests: compared with the checksums that torch.save wrote." in out
    assert err == (
        "step-5: there is neither manifest.json nor .metadata in it, so it is not verified\n"
        "step-8.staging-0f3a: a save into it is under way or was cut off, so it is not verified\n"
    )


def test_one_damaged_step_does_not_hide_the_others(root: Path, call: Said) -> None:
    save_plain({"weight": torch.ones(3)}, root / "step-9")
    flip(root / "step-7" / "manifest.json", 40)
    code, out, _ = call(root, "--json")
    assert code == 3
    assert [each["status"] for each in as_json(out)] == ["damaged", "intact"]


@pytest.mark.parametrize("make", [of_2024, of_0_3])
def test_a_checkpoint_of_torchtitan(make: Callable[..., Path], tmp_path: Path, call: Said) -> None:
    with SmallRun(tmp_path) as run:
        run.train(1, last=False)
        folder = make(run, tmp_path / "theirs" / "step-1")
    assert call(folder)[0] == 0
    assert verified(folder, verified_in(folder.parent)) is not None
    flip(folder / "__0_0.distcp", (folder / "__0_0.distcp").read_bytes().index(b"_rebuild_tensor") + 3)
    code, out, _ = call(folder)
    assert code == 3 and "__0_0.distcp: " in out and "in it: " in out


def test_a_checkpoint_without_the_name_of_a_step_is_verified_and_not_recorded(tmp_path: Path, call: Said) -> None:
    folder = save_plain({"weight": torch.ones(3)}, tmp_path / "pretrained")
    code, _, err = call(folder)
    assert (code, err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["pretrained"]


def test_a_run_continues_after_a_verification(tmp_path: Path, call: Said) -> None:
    with SmallRun(tmp_path, interval=1, keep_latest_k=2) as run:
        run.train(2, last=False)
        assert call(run.root)[0] == 0
        run.train(4)
    assert run.committed() == [3, 4]
    assert verified_in(run.root).keys() == {"step-1", "step-2"}, "the job leaves the file alone"
    with SmallRun(tmp_path, interval=1, keep_latest_k=2) as again:
        assert again.manager.load() and again.manager.loaded_step == 4
    assert call(run.root)[0] == 0
    assert verified_in(run.root).keys() == {"step-3", "step-4"}


def test_a_step_that_is_removed_meanwhile_is_one_sentence(
    root: Path, call: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def purge_and_read(looked: Any, on_bytes: Any) -> Any:
        if looked.path.name == "step-7":
            store = CheckpointStore(root)
            store.empty(store.discard(store.get(7)))
        return read(looked, on_bytes)

    read = verify.read_through
    monkeypatch.setattr(verify, "read_through", purge_and_read)
    save_plain({"weight": torch.ones(3)}, root / "step-9")
    copy = shutil.copytree(root, root.parent / "copy")
    code, out, err = call(root, "--json")
    assert (code, err) == (0, "")
    assert [each["status"] for each in as_json(out)] == ["removed", "intact"]
    shutil.rmtree(root)
    shutil.copytree(copy, root)
    code, out, err = call(f"{root}:7")
    assert (code, out) == (1, "")
    assert err == f"error: {root}/step-7 holds no checkpoint: it was removed or replaced while it was read\n"


def test_the_result_is_not_recorded_for_a_checkpoint_that_took_the_name_meanwhile(
    root: Path, call: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_and_replace(looked: Any, on_bytes: Any) -> Any:
        found = read(looked, on_bytes)
        shutil.rmtree(root / "step-7")
        add_step(root, 7, created_at=5.0)
        return found

    read = verify.read_through
    monkeypatch.setattr(verify, "read_through", read_and_replace)
    assert call(root)[0] == 0
    assert verified_in(root) == {}


def test_a_newer_format_is_one_sentence_and_no_damage(root: Path, call: Said) -> None:
    shutil.copytree(root / "step-7", root / "step-8")
    path = root / "step-7" / "manifest.json"
    path.write_bytes(later_format(path.read_bytes()))
    code, out, err = call(root / "step-7")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {path}: it has format version 99, this version reads up to 7")
    assert err.count("\n") == 1
    code, out, _ = call(root, "--json")
    assert code == 3 and [each["status"] for each in as_json(out)] == ["unknown format", "damaged"], (
        "step 8 says step 7"
    )


@pytest.mark.parametrize(
    ("make", "spelling", "code", "text"),
    [
        (lambda base: None, "gone", 1, "gone does not exist"),
        (lambda base: (base / "gone").touch(), "gone", 1, "gone holds no checkpoint: it is not a folder"),
        (lambda base: (base / "a").mkdir(), "a", 1, "a holds no checkpoint: there is no complete checkpoint in it"),
        (lambda base: None, "checkpoint:8", 1, "step 8 is not in checkpoint (it has 7)"),
        (lambda base: None, "hdfs://bucket/run", 2, "'hdfs://bucket/run' is not the address of a folder"),
    ],
)
def test_what_cannot_be_verified_is_one_sentence(
    make: Callable[[Path], object],
    spelling: str,
    code: int,
    text: str,
    root: Path,
    call: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root.parent)
    make(root.parent)
    found = call(spelling)
    assert found[:2] == (code, "")
    assert found[2].startswith(f"error: {text.format(root=root)}") and found[2].count("\n") == 1


def test_half_of_a_checkpoint_is_no_checkpoint(root: Path, call: Said) -> None:
    for name in ("manifest.json", ".metadata"):
        (root / "step-7" / name).unlink()
    code, out, err = call(root / "step-7")
    assert (code, out) == (1, "")
    assert "there are files of tensors in it, but no .metadata" in err
    (root / "step-7").rename(root / "step-8.staging-0f3a")
    code, out, err = call(root / "step-8.staging-0f3a")
    assert (code, out) == (1, "")
    assert "a save into it is under way or was cut off" in err


def test_a_result_that_cannot_be_written_is_a_note(root: Path, call: Said) -> None:
    (root / "verified.json").mkdir()
    code, out, err = call(root)
    assert code == 0 and "intact" in out
    assert err.startswith("note: ls will not show this result: ") and err.count("\n") == 1


def test_nothing_in_the_checkpoint_changes(root: Path, call: Said) -> None:
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (root / "step-7").iterdir()}
    call(root)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in (root / "step-7").iterdir()} == before


@pytest.mark.slow
def test_torch_is_not_imported_and_numpy_only_where_a_checkpoint_has_no_digests(root: Path) -> None:
    code = (
        "import sys; from torchtitan_lite.cli.app import main\n"
        "code = main(sys.argv[2:])\n"
        "sys.exit(code or bool({*sys.argv[1].split()} & set(sys.modules)))"
    )
    shutil.copytree(GOLDEN, root / "step-8")
    (root / "step-8" / "manifest.json").unlink()
    repository = Path(__file__).parents[2]
    ours, other, both = root / "step-7", root / "step-8", "torch numpy"
    for names, *arguments in ((both, "verify", ours), ("torch", "verify", root), (both, "diff", ours, other)):
        command = [sys.executable, "-c", code, names, *map(str, arguments)]
        assert subprocess.run(command, cwd=repository, check=False, capture_output=True).returncode == 0
