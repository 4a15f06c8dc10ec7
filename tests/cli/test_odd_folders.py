"""Folders that cannot be read or written, that are all damaged, and spellings that mean something else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import ROOT, command
from tests.cli.conftest import Said
from tests.cli.folders import add_step
from tests.disks import make_read_only, small_disk
from tests.store.filled import damage, fill
from torchtitan_lite.cli.exit_codes import sentence_of

OTHER_UID = 65534


@contextlib.contextmanager
def as_another_user() -> Iterator[None]:
    """Run the block as a user who owns nothing; skip the test where this process may not become one.

    To file systems, and this thread with those that it starts alone: others of this process may belong to a test
    before.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    become = ctypes.CDLL(None).setfsuid
    become(OTHER_UID)
    try:
        yield
    finally:
        become(0)


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the steps 2, 4 and 6, of which others cannot read 4; the working directory is above it."""
    (tmp_path / "run").mkdir()
    for step in (2, 4, 6):
        add_step(tmp_path / "run", step)
    of_pytest = next((folder for folder in tmp_path.parents if folder.name.startswith("pytest-of-")), tmp_path)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.is_relative_to(of_pytest) and not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for verb in (("verify",), ("inspect",), ("prune", "--keep-latest", 1, "--dry-run")):
        assert command(*verb, "run").code == 0  # So that nothing is left to import for another user.
    (tmp_path / "run" / "step-4").chmod(0o700)
    return tmp_path / "run"


def test_a_checkpoint_that_cannot_be_read_does_not_hide_the_others(closed: Path) -> None:
    with as_another_user():
        ended = command("verify", "run", "--json")
    assert ended.code == 1 and ended.err == ""
    assert {each["name"]: each["status"] for each in ended.json["checkpoints"]} == {
        **{"step-2": "intact", "step-4": "unreadable", "step-6": "intact"}
    }


def test_what_the_store_could_not_read_is_one_note_and_none_with_json(closed: Path) -> None:
    with as_another_user():
        noted, silent = (command("inspect", "run"), command("inspect", "run", "--json"))
        pruned = command("prune", "run", "--keep-latest", 1, "--dry-run")
    assert (noted.code, silent.code, silent.err) == (0, 0, "")
    for ended in (noted, pruned):
        assert ended.err.startswith("note: run/step-4 could not be read, so retention neither counts nor removes it: ")
        assert ended.err.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_named_and_no_hidden_file_in_it(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        fill(disk / "run", 1, 2)
        add_step(disk, 7)
        (disk / "events.jsonl").write_text('{"event": "finished", "step": 1, "time": 5}\n')
        make_read_only(disk)
        for words in (("prune", disk / "run", "--keep-latest", 1), ("pin", f"{disk}/run:1")):
            assert command(*words).err == f"error: {disk}/run cannot be written: Read-only file system\n"
        for words in (("export", f"{disk}:7", disk / "out"), ("report", disk, disk / "page.html")):
            ended = command(*words)
            assert (ended.code, ended.err) == (1, f"error: {disk} cannot be written: Read-only file system\n")
        note = "note: ls will not show this result: "
        assert command("verify", disk).err == f"{note}{disk} cannot be written: Read-only file system\n"


def test_where_every_checkpoint_is_damaged_the_latest_one_is_an_error_that_says_so(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2)
    for step in (1, 2):
        damage(tmp_path, step, "manifest.json")
    for verb in ("inspect", "pin"):
        code, out, err = said(verb, tmp_path)
        assert (code, out, err.count("\n")) == (3, "", 1)
        assert err.startswith(f"error: every checkpoint in {tmp_path} is damaged: step 1: ") and "; step 2: " in err


@pytest.mark.parametrize("step", ["7", "latest"])
def test_a_verb_for_a_folder_says_that_a_step_is_one_checkpoint(tmp_path: Path, said: Said, step: str) -> None:
    fill(tmp_path, 7)
    for verb in ("ls", "memory"):
        code, _, err = said(verb, f"{tmp_path}:{step}")
        assert code == 2 and err.startswith(f"error: {tmp_path}:{step} is ") and "no such folder" not in err


def test_a_sentence_keeps_its_dots_where_it_continues() -> None:
    assert sentence_of(ValueError("it has a, b ...")) == "it has a, b ..."


@pytest.mark.slow
def test_the_help_is_ascii_where_the_output_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_lite.cli", "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"    verify " in done.stdout


def test_an_interrupt_while_the_parser_is_imported_is_one_line_too() -> None:
    script = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "torchtitan_lite.config.argument_parser":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from torchtitan_lite.cli.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
