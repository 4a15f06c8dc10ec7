"""`memory`: what a keeper holds is listed, and freed unless a job uses it."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.images.cards import CARD, changed
from tests.cli.conftest import Said
from tests.keepers import END_SECONDS, keepers_in
from torchtitan_lite.checkpoint.staging.mark import Mark
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.store.lineage import Lineage

SHOWN = changed(CARD, step=40, lineage=Lineage("602ceef5"), topology="dp_shard 2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of checkpoints in a dump folder."""
    folder = tmp_path / "outputs" / "checkpoint"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def keeper(memory_tier: Path, root: Path) -> Iterator[Keeper]:
    """A keeper of two images of a run, one more without a card, and one that is not valid."""
    keeper = Keeper(root, 600.0, runtime=memory_tier)
    keeper.start()
    for number in range(4):
        arena, mark = os.memfd_create("arena"), Mark()
        os.write(arena, b"abc")
        if number < 2:
            card = dataclasses.replace(SHOWN, rank=1 - number, created_at=time.time() - 7200)
            mark.set(40, 3, card.to_bytes())
        elif number == 2:
            mark.set(40, 3, b"no card")
        keeper.keep(f"image {number}", (arena, mark.fd))
        mark.close()
        os.close(arena)
    yield keeper
    keeper.leave()
    keeper.end()


def test_without_a_keeper_nothing_is_kept_and_nothing_is_freed(memory_tier: Path, root: Path, said: Said) -> None:
    line = f"{root}: nothing is kept in memory on this host\n"
    assert said("memory", root) == (0, line, "")
    assert said("memory", root, "--end") == (0, line, "")


def test_each_image_has_its_step_rank_size_and_age(keeper: Keeper, root: Path, said: Said) -> None:
    code, out, err = said("memory", root.parent)
    described = keeper.describe()
    assert described is not None
    assert (code, err) == (0, "")
    # One page for each arena, and at least one for each mark.
    assert out.startswith(f"{root}: 4 images, ")
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][-2:] == ["process", str(described.pid)]
    assert lines[1][:4] == ["No", "job", "uses", "it:"]
    assert lines[3:6] == [
        ["step", "rank", "size", "age", "run"],
        ["40", "0", "of", "2", "3", "B", "2", "h", "602ceef5"],
        ["40", "1", "of", "2", "3", "B", "2", "h", "602ceef5"],
    ]
    assert {" ".join(line[2:5]) for line in lines[6:]} == {"not valid: being", "not valid: expected"}


def test_a_job_that_uses_it_is_named_and_keeps_it_from_ending(keeper: Keeper, root: Path, said: Said) -> None:
    keeper.join("s1")
    assert f"In use by process {os.getpid()}\n" in said("memory", root)[1]
    code, out, err = said("memory", root, "--end")
    assert (code, out) == (1, "")
    assert err == f"error: {root} is in use by process {os.getpid()}: end that job, or wait for it\n"
    assert keeper.describe() is not None


def test_end_frees_it_also_when_the_folder_was_deleted(keeper: Keeper, root: Path, said: Said) -> None:
    root.rmdir()
    code, out, err = said("memory", root, "--end")
    assert (code, err) == (0, "")
    assert out.startswith(f"{root}: freed 4 images, ")
    assert keeper.describe() is None


def test_json_has_what_the_list_shows(keeper: Keeper, root: Path, said: Said) -> None:
    keeper.join("s1")
    found = json.loads(said("memory", root, "--json")[1])
    assert (found["folder"], found["ended"], found["living"]) == (str(root), False, [os.getpid()])
    assert [(each["name"], each["step"], each["rank"], each["bytes"]) for each in found["images"]] == [
        ("image 1", 40, 0, 3),
        ("image 0", 40, 1, 3),
        ("image 2", None, None, 0),
        ("image 3", None, None, 0),
    ]
    keeper.leave()
    assert json.loads(said("memory", root, "--end", "--json")[1])["ended"]
    assert json.loads(said("memory", root, "--json")[1])["keeper"] is None


def test_a_keeper_of_another_folder_for_sockets_is_found_too(
    keeper: Keeper, root: Path, said: Said, monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.setattr(tempfile, "tempdir", None)
    other = Keeper(root, 600.0)
    other.start()
    keeper.end()
    assert said("memory", root)[1].startswith(f"{root}: 0 images, 0 B, kept by process ")
    assert said("memory", root, "--end")[0] == 0
    assert other.describe() is None


def test_a_keeper_that_cannot_be_used_is_one_sentence(memory_tier: Path, root: Path, said: Said) -> None:
    (memory_tier / "torchtitan_lite").symlink_to(root)
    code, out, err = said("memory", root)
    assert (code, out) == (1, "")
    assert err.startswith("error: what is kept in memory is not known: ")
    assert "expected a drwx------ of user" in err and err.endswith("; remove it\n")


def test_keeping_and_ending_at_once_is_refused(memory_tier: Path, root: Path, said: Said) -> None:
    code, _, err = said("memory", root, "--keep", "--end")
    assert code == 2 and "give one of them" in err
    assert not keepers_in(memory_tier)


@pytest.mark.parametrize("end", ["the run finishes", "SIGTERM"])
def test_a_container_of_its_own_keeps_them_until_the_run_finishes_or_a_signal_comes(
    memory_tier: Path, root: Path, end: str
) -> None:
    command = [sys.executable, "-m", "torchtitan_lite.cli", "memory", str(root), "--keep"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as container:
        assert container.stdout is not None
        assert "0 images, 0 B, kept by process" in container.stdout.readline()
        (pid,) = keepers_in(memory_tier)
        job = Keeper(root, 600.0, runtime=memory_tier)
        job.start()
        job.join("first")
        assert keepers_in(memory_tier) == [pid], "the job starts none of its own"
        if end == "SIGTERM":
            container.terminate()
        else:
            job.finish()
        assert container.wait(END_SECONDS) == 0
    job.leave()
