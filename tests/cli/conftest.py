"""What tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from torchtitan_lite.cli.app import main

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """Return a function that runs a command and returns its exit code, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(word) for word in argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def call(said: Said, request: pytest.FixtureRequest) -> Said:
    """Return a function that runs the command `COMMAND` of the module with arguments, as `said` runs one."""
    return partial(said, request.module.COMMAND)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an empty folder of checkpoints."""
    (tmp_path / "checkpoint").mkdir()
    return tmp_path / "checkpoint"
