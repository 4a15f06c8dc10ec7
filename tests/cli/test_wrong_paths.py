"""What every verb says of a path that is no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import command
from torchtitan_lite.cli.app import VERBS

FURTHER = {
    "diff": ["PATH"],
    "export": ["OUT"],
    "import-weights": ["OUT/step-0"],
    "convert": ["OUT", "--layout", "dcp"],
    "reshard": ["OUT", "--files", "2"],
    "prune": ["--keep-latest", "2"],
    "upload": ["OUT"],
    "bring-back": ["step-6.corrupt"],
}
"""The arguments after the path that a verb needs."""


def _ended(verb: str, path: str, tmp_path: Path) -> tuple[int, str, str]:
    further = [each.replace("PATH", path).replace("OUT", str(tmp_path / "out")) for each in FURTHER.get(verb, [])]
    ended = command(verb, path, *further)
    assert ended.err.count("\n") == 1, "one sentence"
    return ended.code, ended.out, ended.err


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", ["nope", "meta-llama/Llama-3-8B"])
def test_a_path_that_is_not_there_does_not_exist(
    verb: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = _ended(verb, name, tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {name} does not exist")


@pytest.mark.parametrize("verb", sorted({*VERBS} - {"import-weights"}))  # Which takes files.
def test_a_file_is_not_a_folder(verb: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out, err = _ended(verb, str(tmp_path / "file"), tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {tmp_path}/file holds no checkpoint: it is not a folder")


@pytest.mark.parametrize("verb", sorted({*VERBS} - {"memory", "probe"}))  # Which look in memory, and into any folder.
def test_an_empty_folder_is_an_error(verb: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, out, err = _ended(verb, str(tmp_path / "empty"), tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {tmp_path}/empty")


@pytest.mark.parametrize("verb", VERBS)
def test_an_address_of_no_object_store_is_wrong_usage(verb: str, tmp_path: Path) -> None:
    code, out, err = _ended(verb, "hdfs://bucket/run", tmp_path)
    assert (code, out) == (2, "")
    found = ("'hdfs://bucket/run' is not the address of a folder", "hdfs://bucket/run is an address, and")
    assert err.startswith(tuple(f"error: {each}" for each in found))
