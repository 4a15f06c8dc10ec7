"""A job that only loads runs on a read-only folder."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.jobs import run


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Bind-mount `folder` read-only on itself, so that not even root can write."""
    for options in (["--bind", str(folder), str(folder)], ["-o", "remount,bind,ro", str(folder)]):
        try:
            mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("mount is not installed")
        if mounted.returncode != 0:
            pytest.skip(f"a folder cannot be mounted read-only: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.promise(
    "A run with `checkpoint.load_only` changes nothing in the folder of checkpoints, and adds nothing but the "
    "traces that you ask for to the dump folder.",
    section="writer",
)
@pytest.mark.slow  # Two jobs, and a mount.
def test_a_job_that_only_loads_runs_on_a_read_only_folder(tmp_path: Path) -> None:
    dump = tmp_path / "outputs"
    options = ["--checkpoint.interval=2", "--training.steps=4", "--training.trace_samples"]
    run(dump, *options)
    before = contents(dump)
    longer = [*options, "--training.steps=6", "--checkpoint.load_only", "--metrics.enable_tensorboard"]
    with read_only(dump):
        again = run(dump, *longer)
    assert "Training starts at step 5" in again.log
    assert "Traceback" not in again.log
    assert "Could not write" not in again.log
    assert contents(dump) == before
