"""What shares a machine, a folder or a process with a run, and must neither end it nor be ended by it.

The processes are forked from a server that has torch loaded; each test says in a script what happens there.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.forked import run_code

DEADLINE_SECONDS = 120.0

SAVER = """
import sys
from pathlib import Path
from torchtitan_lite.checkpoint.staging import StagingArena
from torchtitan_lite.checkpoint.writer_process import WriterProcess

arena = StagingArena(4096, pin=False)
arena.memory[:5] = b"hello"
process = WriterProcess(timeout_seconds=60)
process.start()
"""


def run(script: str, folder: Path) -> tuple[int, str]:
    """Return the exit code of `script`, run in `folder`, and what it printed."""
    log = folder / "printed.log"
    log.touch()
    code = run_code(script, log, dict(os.environ), folder).wait(DEADLINE_SECONDS)
    return code, log.read_text()


def test_the_writer_process_takes_the_standard_library_and_not_what_lies_in_the_working_directory(
    tmp_path: Path,
) -> None:
    for name in ("socket", "json", "struct", "signal", "ctypes", "mmap", "xxhash", "torchtitan_lite"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the working directory was asked')\n")
    script = SAVER + 'process.write(Path("written").absolute(), arena, 5, step=1)\nprocess.close()\n'
    assert run(script, tmp_path) == (0, "")
    assert (tmp_path / "written").read_bytes() == b"hello"


RELATIVE = """
import os
from pathlib import Path
from tests.checkpoint.small_run import SmallRun

os.mkdir("elsewhere")
with SmallRun(Path("run"), interval=1, keep_latest_k=2, async_mode="MODE", export_folder="export",
              model_weights_only=True) as run:
    run.step()
    os.chdir("elsewhere")
    run.step()
    run.step()
    run.step(last=True)
    run.manager.close()
    print(run.manager._in_flight.last_durable)
"""


def test_a_change_of_the_working_directory_during_a_save_changes_nothing(tmp_path: Path, mode: str) -> None:
    assert run(RELATIVE.replace("MODE", mode), tmp_path) == (0, "4\n")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoint").iterdir()) == ["step-3", "step-4"]
    assert [path.name for path in (tmp_path / "run" / "export").iterdir()] == ["step-4"]
    assert list((tmp_path / "elsewhere").iterdir()) == []
