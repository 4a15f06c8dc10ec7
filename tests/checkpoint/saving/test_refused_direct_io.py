"""Where direct I/O is refused, on one rank or on all, at the opening or at a write, a save is the save that it was."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoint.saving.failing_runs import run_with
from tests.checkpoint.tiny_run import TinyRun, differing
from tests.ranks import on_two_ranks
from tests.store.refusals import refusals_logged
from torchtitan_lite import faults
from torchtitan_lite.disk.durable import O_DIRECT
from torchtitan_lite.store.manifest import Manifest

pytestmark = pytest.mark.skipif(not O_DIRECT, reason="the system has no direct I/O")

REFUSALS = [
    ("EINVAL@open:step=2", {0, 1}),
    ("EINVAL@write:step=2", {0, 1}),
    ("EINVAL@open:step=2,rank=1", {1}),
    ("ENOTSUP@write:step=2,rank=0", {0}),
    ("EINVAL@write:step=2; short@write:step=2", {0, 1}),
]


@on_two_ranks
def test_a_save_that_is_refused_direct_io_is_complete_and_told_of_once(rank: int, tmp_path: Path, mode: str) -> None:
    for case, (fault, refused) in enumerate(REFUSALS):
        lines = told_while_training(fault, rank, tmp_path / str(case), mode)
        # A writer process tells on its own stderr.
        if mode != "async_with_pinned_mem":
            assert len(lines) == (rank in refused), (fault, lines)


@on_two_ranks
def test_a_writer_process_that_is_refused_direct_io_tells_it_once_for_all_ranks(rank: int, tmp_path: Path) -> None:
    for point in ("open", "write"):
        fault = f"EINVAL@{point}:step=2"
        lines = told_while_training(fault, rank, tmp_path / point, "async_with_pinned_mem")
        assert len(lines) == (rank == 0), (fault, lines)


def told_while_training(fault: str, rank: int, folder: Path, mode: str) -> list[str]:
    """What is told of step 2, in which `fault` happens; training goes on, and the step is there, bit for bit."""
    with heard() as lines:
        run = run_with(fault, rank, folder, mode)
        try:
            with run.manager:
                run.steps(2)
                run.saver.wait()
                saved = run.contents()
                run.steps(6)
        finally:
            faults.install("", rank=rank)
    assert not run.happened("save_failed")
    assert run.checkpoints() == ["step-1", "step-2", "step-5"]
    assert_loads(folder, saved)
    return [line for line in lines if "step-2.staging" in line]


@on_two_ranks
def test_nothing_is_told_where_direct_io_is_taken(rank: int, tmp_path: Path, mode: str) -> None:
    with heard() as lines:
        run = run_with("", rank, tmp_path, mode)
        with run.manager:
            run.steps(6)
    assert lines == []


def assert_loads(folder: Path, saved: dict[str, object]) -> None:
    """Step 2 is there in full, and its state is `saved`, bit for bit. Collective."""
    checkpoint = folder / "checkpoint" / "step-2"
    manifest = Manifest.of_folder(checkpoint)
    assert manifest is not None
    assert {name: (checkpoint / name).stat().st_size for name in manifest.files} == {
        name: record.size for name, record in manifest.files.items()
    }
    with (again := TinyRun(folder, load_step=2)).manager:
        assert again.manager.load()
        assert again.manager.loaded_step == 2
        assert not differing(again.contents(), saved)


@contextmanager
def heard() -> Iterator[list[str]]:
    """In the end, what was told of direct I/O: by this process and, on stderr, by the writer process it started."""
    found: list[str] = []
    with tempfile.TemporaryFile("w+") as file, refusals_logged() as own:
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield found
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            found += own + [line for line in file if "direct I/O is refused" in line]
