"""`probe`: what a file system does for checkpoints, and what a second client sees, without a trace in the folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Said
from torchtitan_lite.cli import probe as module
from torchtitan_lite.store.probe import LOCKS, NEEDS, WANTS


def test_it_prints_what_there_is_and_keeps_nothing(tmp_path: Path, said: Said) -> None:
    code, out, err = said("probe", tmp_path)
    assert (code, err) == (0, "")
    rows = [line.rsplit("  ", 1)[0].strip() if line.endswith("yes") else line for line in out.splitlines()]
    assert [each for each in [*NEEDS, *WANTS] if not any(row.startswith(each) for row in rows)] == []
    assert out.startswith(f"{tmp_path} (") and not [*tmp_path.iterdir()]


def test_a_second_client_sees_each_change_and_locks(tmp_path: Path, said: Said) -> None:
    folder, second = tmp_path / "folder", tmp_path / "second"
    folder.mkdir()
    second.symlink_to(folder)
    code, out, _ = said("probe", folder, "--second", second, "--json")
    found = json.loads(out)
    assert code == 0 and found["folder"] == str(folder) and not [*folder.iterdir()]
    assert found["second"].pop(LOCKS) is True
    changes = ["a new folder", "a new file", "new contents under its name", "that it was removed"]
    assert [*found["second"]] == changes and all(seconds < 60 for seconds in found["second"].values())
    _, out, _ = said("probe", folder, "--second", second)
    assert "checkpoint.lease_timeout_seconds is 30 unless it is set: long enough for this." in out


def test_another_folder_is_no_second_client_of_this_one(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.05)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    code, _, err = said("probe", tmp_path / "a", "--second", tmp_path / "b")
    assert code == 2 and f"{tmp_path / 'b'} does not show within 0.05 s what is made in {tmp_path / 'a'}" in err
    assert not [*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()]


def test_a_slow_client_makes_the_advice(tmp_path: Path) -> None:
    slow = {"a new file": 20.0, LOCKS: False}
    assert "lease_timeout_seconds to more than 40" in module._advice(slow)
    shown = [module._shown(each) for each in (0.017, False, True, 60.0)]
    assert shown == ["after 0.02 s", "no", "yes", "not within 60 s"]


def test_a_folder_that_a_job_holds_is_refused_and_so_is_what_is_none(tmp_path: Path, said: Said) -> None:
    holds = (
        "import sys; from pathlib import Path; from torchtitan_lite.store.lease import FolderLease\n"
        "lease = FolderLease(Path(sys.argv[1]), run_id='trains', heartbeat_seconds=0.1); lease.take()\n"
        "print('held', flush=True); sys.stdin.read(); lease.release()"
    )
    command = [sys.executable, "-c", holds, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "held\n"
        code, _, err = said("probe", tmp_path)
        assert code == 1 and err.startswith(f"error: {tmp_path} is in use by run trains (process {job.pid} on ")
    assert not [*tmp_path.iterdir()]
    assert said("probe", tmp_path / "none") == (1, "", f"error: {tmp_path / 'none'} does not exist\n")
    code, _, err = said("probe", tmp_path, "--second", tmp_path / "none")
    assert code == 2 and f"--second {tmp_path / 'none'} is no folder: mount it first" in err
