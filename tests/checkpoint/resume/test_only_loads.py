"""A run that only loads writes nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.conftest import StartRun
from tests.store.filled import flip

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.utime")

_written: list[str] | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _written is not None and (
        event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & (os.O_ACCMODE | os.O_CREAT))
    ):
        _written.append(f"{event} {args[0]}")


sys.addaudithook(_watch)


@pytest.mark.promise(
    "A run with `checkpoint.load_only` changes nothing in the folder of checkpoints, and adds nothing but the "
    "traces that you ask for to the dump folder.",
    section="writer",
)
def test_a_run_that_only_loads_opens_nothing_for_writing(start_run: StartRun, mode: str, tmp_path: Path) -> None:
    global _written
    saved = start_run(interval=2).finished(6)
    flip(saved.root / "step-6" / "__0_0.distcp", -1)
    (saved.root / "step-7.staging").mkdir()
    before = sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*"))
    _written = []
    run = start_run(load_only=True, async_mode=mode)
    try:
        assert run.manager.load()
        run.train(8)
        run.manager.close()
    finally:
        written, _written = _written, None
    assert run.events.steps("fallback") == [4]
    assert [change for change in written if str(tmp_path) in change] == []
    assert sorted((path, path.lstat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
