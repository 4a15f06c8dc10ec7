"""`bring-back`: from quarantine or an abandoned branch, on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Said
from tests.store import filled
from tests.store.filled import contents, fill, names, save
from torchtitan_lite.errors import FolderInUse
from torchtitan_lite.store.lease import Lease
from torchtitan_lite.store.store import CheckpointStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder of checkpoints in a dump folder, whose latest step 8 was set aside as damaged."""
    fill(tmp_path / "checkpoint", 4, 8).quarantine(8, ["a block has another digest"])
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("spelling", ["{root}", "{root.parent}"])
def test_a_complete_one_comes_back_and_the_next_start_is_named(root: Path, said: Said, spelling: str) -> None:
    code, out, err = said("bring-back", spelling.format(root=root), "step-8.corrupt")
    assert (code, err) == (0, "")
    assert out == "step-8.corrupt (106 B) is step 8 again\nIt is the latest: the next start resumes from it\n"
    assert names(root) == ["step-4", "step-8"]


def test_json_has_what_was_done(root: Path, said: Said) -> None:
    save(CheckpointStore(root), 12)
    code, out, err = said("bring-back", root, root / "step-8.corrupt", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "folder": str(root),
        "name": "step-8.corrupt",
        "step": 8,
        "run_id": "a1",
        "set_aside": [],
        "is_latest": False,
    }


def test_an_abandoned_one_takes_the_place_of_the_branch(tmp_path: Path, said: Said) -> None:
    store = fill(tmp_path, 4, 16)
    save(store, 8, run_id="b2", abandons=[(16, "a1")])
    code, out, err = said("bring-back", tmp_path, "step-16.abandoned-a1")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "step-8 of run b2 has left it behind" in err and "With --leave-branch" in err
    code, out, _ = said("bring-back", tmp_path, "step-16.abandoned-a1", "--leave-branch")
    assert code == 0 and "Set aside in its place: step-8.abandoned-b2" in out
    assert names(tmp_path) == ["step-16", "step-4", "step-8.abandoned-b2"]


def test_one_that_is_still_damaged_is_exit_code_3(root: Path, said: Said) -> None:
    data = root / "step-8.corrupt" / filled.DATA
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    before = contents(root)
    code, out, err = said("bring-back", root, "step-8.corrupt")
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert err.startswith(f"error: {root}/step-8.corrupt is damaged: {filled.DATA}: bytes 0 to 100")
    assert contents(root) == before


def test_a_folder_in_use_is_refused_by_the_name_of_its_job(
    root: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Lease) -> None:
        raise FolderInUse(str(root), "run trains (process 7 on host)")

    monkeypatch.setattr(Lease, "take", refuse)
    before = contents(root)
    code, out, err = said("bring-back", root, "step-8.corrupt")
    assert (code, out) == (1, "")
    assert err == f"error: {root} is in use by run trains (process 7 on host): end that job, or wait for it\n"
    assert contents(root) == before


def newer(root: Path) -> None:
    filled.of_a_newer_version(root)
    (root / "step-10").rename(root / "step-10.corrupt")


@pytest.mark.parametrize(
    ("put", "argv", "code", "message"),
    [
        (lambda root: None, ["ROOT", "step-1.corrupt"], 1, "ROOT does not exist"),
        (lambda root: root.mkdir(), ["ROOT", "step-1.corrupt"], 1, "(ROOT has no damaged or abandoned step)"),
        (filled.foreign, ["ROOT", "step-007"], 1, "it is neither step-N.corrupt nor step-N.abandoned-RUN"),
        (filled.half_written, ["ROOT", "step-30.staging-0f3a"], 1, "it is neither step-N.corrupt nor"),
        (filled.of_torchtitan, ["ROOT", "step-10"], 1, "it is neither step-N.corrupt nor"),
        (newer, ["ROOT", "step-10.corrupt"], 1, "has format version 99"),
        (lambda root: fill(root, 1), ["ROOT:1", "step-1.corrupt"], 2, "ROOT:1 is one checkpoint"),
        (lambda root: fill(root, 1), ["ROOT/step-1", "step-1.corrupt"], 2, "ROOT/step-1 is one checkpoint"),
        (lambda root: fill(root, 1), ["ROOT", "/elsewhere/step-1.corrupt"], 2, "/elsewhere/step-1.corrupt is not in"),
        (lambda root: fill(root, 1), ["ROOT"], 2, "NAME"),
    ],
)
def test_what_cannot_come_back_is_one_sentence(
    tmp_path: Path, said: Said, put: Callable[[Path], object], argv: list[str], code: int, message: str
) -> None:
    root = tmp_path / "there"
    put(root)
    found, out, err = said("bring-back", *(word.replace("ROOT", str(root)) for word in argv))
    assert (found, out, err.count("\n")) == (code, "", 1) or "note: step-30.staging-0f3a" in err
    assert "error: " in err and message.replace("ROOT", str(root)) in err
