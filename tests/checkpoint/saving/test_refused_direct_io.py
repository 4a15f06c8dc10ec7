"""If direct I/O is refused, on one rank or all, by open or by write, a save succeeds without it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.checkpoint.sharded_run import run_with, sharded_run
from tests.checkpoint.small_run import same
from tests.ranks import on_two_ranks
from tests.store.refusals import refusals_logged
from torchtitan_lite import faults
from torchtitan_lite.store.manifest import Manifest

REFUSALS = [
    ("EINVAL@open:step=2", {0, 1}),
    ("EINVAL@write:step=2", {0, 1}),
    ("EINVAL@open:step=2,rank=1", {1}),
    ("ENOTSUP@write:step=2,rank=0", {0}),
    ("EINVAL@write:step=2; short@write:step=2", {0, 1}),
]


@pytest.mark.slow
@on_two_ranks
def test_a_save_without_direct_io_is_complete_and_logged_once(rank: int, tmp_path: Path, mode: str) -> None:
    for case, (fault, refused) in enumerate(REFUSALS):
        lines = logged_while_training(fault, rank, tmp_path / str(case), mode)
        # A writer process logs to its own stderr.
        if mode != "async_with_pinned_mem":
            assert len(lines) == (rank in refused), (fault, lines)


@pytest.mark.slow
@on_two_ranks
def test_a_writer_process_without_direct_io_logs_it_once_for_all_ranks(rank: int, tmp_path: Path) -> None:
    for point in ("open", "write"):
        fault = f"EINVAL@{point}:step=2"
        lines = logged_while_training(fault, rank, tmp_path / point, "async_with_pinned_mem")
        assert len(lines) == (rank == 0), (fault, lines)


def logged_while_training(fault: str, rank: int, folder: Path, mode: str) -> list[str]:
    """Return the log lines of step 2, in which `fault` happens; training continues, and step 2 is complete."""
    with logged_of_direct_io() as lines:
        run = run_with(fault, rank, folder, mode)
        try:
            with run.manager:
                run.train(2, last=False)
                run.saver.wait()
                saved = run.contents()
                run.train(6, last=False)
        finally:
            faults.install("", rank=rank)
    assert not run.events.happened("save_failed")
    assert run.names() == ["step-1", "step-2", "step-5"]
    assert_loads(folder, saved)
    return [line for line in lines if f"{folder}/checkpoint: " in line]


@on_two_ranks
def test_nothing_is_logged_where_direct_io_works(rank: int, tmp_path: Path, mode: str) -> None:
    with logged_of_direct_io() as lines:
        run = run_with("", rank, tmp_path, mode)
        with run.manager:
            run.train(6, last=False)
    assert lines == []


def assert_loads(folder: Path, saved: dict[str, object]) -> None:
    """Assert that step 2 has all its files and that its state is `saved`, bit for bit. Collective."""
    checkpoint = folder / "checkpoint" / "step-2"
    manifest = Manifest.of_folder(checkpoint)
    assert manifest is not None
    assert {name: (checkpoint / name).stat().st_size for name in manifest.files} == {
        name: record.size for name, record in manifest.files.items()
    }
    with (again := sharded_run(folder, load_step=2)).manager:
        assert again.manager.load()
        assert again.manager.loaded_step == 2
        assert same(again.contents(), saved)


@contextmanager
def logged_of_direct_io() -> Iterator[list[str]]:
    """Yield a list that gets the log lines about direct I/O at the end: of this process and of its writer process."""
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
