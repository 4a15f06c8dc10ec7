"""What tests of the keeper share: a keeper in a private folder of the test, ended with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_lite.memory.keeper.client import Keeper


@pytest.fixture
def runtime(base: Path) -> Path:
    """A folder for sockets, with a short path."""
    return base


@pytest.fixture
def keeper(runtime: Path, tmp_path: Path) -> Iterator[Keeper]:
    """A keeper that runs and lives for minutes."""
    keeper = Keeper(tmp_path / "checkpoint", 600.0, runtime=runtime)
    keeper.start()
    yield keeper
    keeper.leave()
    keeper.end()


@pytest.fixture
def image() -> Iterator[tuple[int, int]]:
    """Two descriptors of memory: 100 bytes, and a page."""
    fds = (os.memfd_create("arena"), os.memfd_create("mark"))
    os.ftruncate(fds[0], 100)
    os.ftruncate(fds[1], 4096)
    yield fds
    for fd in fds:
        os.close(fd)
