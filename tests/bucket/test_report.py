"""The report of a run whose checkpoints are in an object store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bucket.stored import add, held
from tests.cli.command import command
from torchtitan_lite.report.run import RUNNING, read_run
from torchtitan_lite.report.saved_steps import Fate
from torchtitan_lite.report.starts import UNKNOWN


@pytest.fixture
def dump_folder(folder: str, tmp_path: Path) -> Path:
    dump_folder = tmp_path / "run"
    dump_folder.mkdir()
    (dump_folder / "config.json").write_text(json.dumps({"checkpoint": {"folder": folder}}))
    return dump_folder


def test_a_report_has_the_checkpoints_in_the_store(folder: str, dump_folder: Path) -> None:
    with held(folder) as store:
        add(store, 7)
        add(store, 9)
        store.quarantine(9, ["a finding"])
        run = read_run(str(dump_folder))
        assert run.status == RUNNING
    assert [(save.step, save.fate) for save in run.saves] == [(7, Fate.KEPT), (9, Fate.QUARANTINED)]
    assert run.shards is not None
    assert [*run.shards.ranks] == [0, 1]
    assert run.shards.step == 7
    assert read_run(str(dump_folder)).status == UNKNOWN


def test_without_the_store_the_rest_is_reported(
    folder: str, dump_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed = {"event": "committed", "step": 7, "time": 1.0, "wall": 1.0, "seconds": 1.0, "bytes": 1}
    (dump_folder / "events.jsonl").write_text(json.dumps(committed) + "\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no address")
    assert [(save.step, save.fate) for save in read_run(str(dump_folder)).saves] == [(7, Fate.UNSEEN)]
    ended = command("report", dump_folder, dump_folder / "report.html")
    assert ended.code == 0
    assert f"note: The checkpoints in {folder} are left out: {folder}: AWS_ENDPOINT_URL is no URL" in ended.err
