"""A message names a folder as the person who gave the command did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Said
from tests.store.filled import damage, fill
from torchtitan_lite.cli.screen import as_spelled
from torchtitan_lite.errors import FolderInUse
from torchtitan_lite.store.lease import LeaseClock


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("prune", "empty", "--keep-latest", 1), "empty holds no checkpoint: there is no complete checkpoint in it"),
        (("prune", "run", "--keep-latest", 1), "run/checkpoint is in use by run trains"),
        (("prune", "./run/", "--keep-latest", 1), "run/checkpoint is in use by run trains"),
        (("bring-back", "run", "step-1.corrupt"), "run/checkpoint is in use by run trains"),
        (("prune", "odd", "--keep-latest", 1, "--dry-run"), "odd/pins.json"),
        (("pin", "run:9"), "step 9 is not in run/checkpoint (it has 1, 2)"),
        (("pin", "cut:1"), "cut/step-1 is damaged"),
        (("inspect", "run:9"), "step 9 is not in run/checkpoint (it has 1, 2)"),
        (("verify", "empty"), "empty holds no checkpoint: there is no complete checkpoint in it"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_relative_folder_stays_relative(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch, argv: tuple[object, ...], named: str
) -> None:
    fill(tmp_path / "run" / "checkpoint", 1, 2)
    fill(tmp_path / "odd", 1)
    (tmp_path / "odd" / "pins.json").write_text("{")
    fill(tmp_path / "cut", 1)
    damage(tmp_path / "cut", 1, "manifest.json")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)

    def in_use(root: Path, **_: Any) -> None:
        raise FolderInUse(str(root), "run trains")

    monkeypatch.setattr("torchtitan_lite.store.store.FolderLease", in_use)
    code, out, err = said(*argv)
    assert code and out == ""
    assert named in err and str(tmp_path) not in err


def test_the_note_of_a_wait_names_the_folder_as_given(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SilentJob:
        def __init__(self, root: Path, *, clock: LeaseClock, **_: Any) -> None:
            self.root, self.sleep = root, clock.sleep

        def take(self) -> None:
            for _ in range(4):
                self.sleep(0.0)
            raise FolderInUse(str(self.root), "run trains")

    fill(tmp_path / "run", 1, 2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchtitan_lite.store.store.FolderLease", SilentJob)
    _, _, err = said("prune", "run", "--keep-latest", 1)
    assert err.splitlines()[0] == "note: a silent job has run; waiting up to 30 s to see whether it lives"


def test_only_complete_paths_are_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"{tmp_path}/run, {tmp_path}/run2, /x{tmp_path}/run and {tmp_path}/run/step-1: no"
    assert as_spelled(text, ["ls", "run"]) == f"run, {tmp_path}/run2, /x{tmp_path}/run and run/step-1: no"
    assert as_spelled(text, ["inspect", "run:latest"]) == as_spelled(text, ["export", "--out=run"])
    assert as_spelled(text, ["ls", f"{tmp_path}/run", ""]) == text
    assert as_spelled(f"{tmp_path.parent}/x: no", [".."]) == f"{tmp_path.parent}/x: no"
    assert as_spelled(f"{tmp_path}/../x: no", [".."]) == "../x: no"
