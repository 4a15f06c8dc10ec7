"""Control groups for tests that need a limit of memory, or to end all processes at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.keepers import has_ended

V1 = Path("/sys/fs/cgroup/memory")
V2 = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


@contextmanager
def cgroup(parent: Path) -> Iterator[Path]:
    """Yield a new group in `parent`, removed once it has no process; skip the test where this user may not make one."""
    folder = parent / f"ttl-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        yield folder
    finally:
        for _ in range(1000):
            with suppress(OSError):  # Version 2 has no such file.
                (folder / "memory.force_empty").write_text("0")
            try:
                folder.rmdir()
            except OSError:  # A process in it is still ending.
                has_ended(os.getpid(), 0.02)
            else:
                break


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A group with an account of its memory, of version 1."""
    if not (V1 / "memory.limit_in_bytes").exists():
        pytest.skip("no cgroup v1 with a limit of memory")
    with cgroup(V1) as folder:
        yield folder
