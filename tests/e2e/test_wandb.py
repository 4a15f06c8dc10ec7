"""Weights & Biases in its offline mode: a killed run and its restart are one run there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import run, start
from tests.processes import read_lines

ARGUMENTS = ("--training.steps=6", "--checkpoint.interval=2", "--metrics.enable_wandb")
OFFLINE = {"WANDB_MODE": "offline", "WANDB_PROJECT": "ledger", "WANDB_SILENT": "true"}


@pytest.mark.slow  # wandb's service starts twice.
def test_a_killed_run_and_its_restart_have_one_id_and_all_steps(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra wandb")
    folder = tmp_path / "run"
    with start(folder, *ARGUMENTS, environment=OFFLINE | {"TORCHTITAN_LITE_FAULT": "kill@step:step=3"}) as job:
        job.wait()
    job = run(folder, *ARGUMENTS, environment=OFFLINE)
    first = read_lines(folder / "ledger.jsonl")[0]["start"]
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{first}.wandb"] * 2, job.log
    assert _logged_steps(files[1]) == [3, 4, 5, 6]


@pytest.mark.slow  # A Python process with torch, from its start.
def test_without_wandb_one_sentence_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "without" / "wandb").mkdir(parents=True)
    (tmp_path / "without" / "wandb" / "__init__.py").write_text("raise ModuleNotFoundError('not here', name='wandb')\n")
    path = ":".join([str(tmp_path / "without"), *filter(None, sys.path)])
    with start(tmp_path / "run", *ARGUMENTS, environment={"PYTHONPATH": path}, cold=True) as job:
        assert job.wait() == [1], job.log
    assert (
        "ERROR - ExtraMissing: wandb is not installed. Install it with: pip install 'torchtitan-lite[wandb]'" in job.log
    )
    assert "Traceback" not in job.log


def _logged_steps(path: Path) -> list[int]:
    from wandb.proto import wandb_internal_pb2

    steps = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        steps += [int(items["step"])] if "step" in items else []
    return steps


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format: blocks of 32 KiB, fragments of a checksum, a length and a type."""
    record, position = b"", 7
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:  # No fragment begins in the last bytes of a block.
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # complete, or the last fragment
            yield record
            record = b""
