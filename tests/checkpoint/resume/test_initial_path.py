"""Paths that people give in place of a checkpoint's folder; each gets its own error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_lite.checkpoint.resume.wrong_folder import checked_initial_path, neighbour_with_steps
from torchtitan_lite.errors import CheckpointNotFound, CheckpointUnreadable


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"of dcp")
    return folder


def file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"something")
    return path


def test_a_folder_with_a_checkpoint_is_taken(tmp_path: Path) -> None:
    assert checked_initial_path(str(checkpoint(tmp_path / "step-4"))) == tmp_path / "step-4"


def run_folder(tmp_path: Path) -> Path:
    for step in (2, 10):
        checkpoint(tmp_path / "run" / "checkpoint" / f"step-{step}")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda at: file(at / "model.pt"),
            r"a file of weights\. .*import-weights .*model\.pt OUT --names same;.*the weights alone",
        ),
        (lambda at: file(at / "model.safetensors"), r"a file of weights\. .*model\.safetensors OUT --names same;"),
        (lambda at: file(at / "hf" / "a.safetensors").parent, r"a folder of weights.*/hf OUT --names same;"),
        (
            lambda at: file(file(at / "hf" / "a.safetensors").parent / "config.json").parent,
            r"a folder of weights\. .*: torchtitan-lite import-weights .*/hf OUT; then name OUT here",
        ),
        (
            lambda at: file(at / "hf" / "pytorch_model.bin").parent,
            r"a folder of weights.*/hf OUT --names",
        ),
        (
            lambda at: file(file(at / "meta" / "consolidated.00.pth").parent / "params.json").parent,
            r"a folder of weights\. .*import-weights .*/meta OUT; then",
        ),
        (run_folder, r"the dump folder of a run\. Name one of its steps, such as .*run/checkpoint/step-10"),
        (lambda at: run_folder(at) / "checkpoint", r"the folder above the steps\. Name one .*checkpoint/step-10"),
        (
            lambda at: checkpoint(at / "step-1") / ".metadata",
            r"one of a checkpoint's files\. Name their folder, .*step-1",
        ),
        (lambda at: file(at / "step-1" / "__0_0.distcp").parent, r"data but no \.metadata: its save did not end"),
        (lambda at: file(at / "notes.txt"), r"a file, not a folder\. Name the folder of one step"),
        (lambda at: file(at / "some" / "notes.txt").parent, r"there is no \.metadata file in it\. Name the folder"),
        (lambda at: at / "nowhere", r"there is no such file or folder\. Name the folder of one step"),
        (lambda at: Path("nowhere"), r"no such file or folder in .*, the working directory"),
        (lambda at: Path("meta-llama/Llama-3.2-1B"), r"no such folder .*If it is a name on the Hugging Face hub"),
    ],
)
def test_a_path_without_a_checkpoint_is_refused_with_what_it_is_and_the_fix(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    given = str(make(tmp_path))
    with pytest.raises(CheckpointNotFound, match=message) as refusal:
        checked_initial_path(given)
    assert str(refusal.value).startswith(f"{given} holds no checkpoint: ")


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://bucket/run/step-04", "az://container/run/"])
def test_an_address_of_no_step_is_refused_before_the_store_gets_a_request(address: str) -> None:
    with pytest.raises(CheckpointNotFound, match=f"^{address} .*the name of a checkpoint, such as step-1000"):
        checked_initial_path(address)


@pytest.mark.parametrize("address", ["hf://org/name", "https://host/step-4"])
def test_an_address_is_refused_as_it_was_given(address: str) -> None:
    with pytest.raises(CheckpointNotFound, match=f"^{address} .*Copy the checkpoint"):
        checked_initial_path(address)


def test_a_path_that_the_system_does_not_look_up_is_called_unreadable_and_is_no_neighbour(tmp_path: Path) -> None:
    given = tmp_path / ("x" * 300)
    with pytest.raises(CheckpointUnreadable, match=r"x could not be read: OSError: \[Errno 36\] File name too long"):
        checked_initial_path(str(given))
    assert neighbour_with_steps(given) is None
