"""The writer process: what it survives, what ends it, and how its end is reported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import wait_until
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.disk.block_writer import NewFileOnDisk
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.helper import IGNORED_SIGNALS
from torchtitan_lite.disk.threads import NICE
from torchtitan_lite.disk.writer_process import WriterProcess
from torchtitan_lite.errors import WriterProcessDied

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 60.0
WORDS = b"what is to be written"

IGNORED_NUMBERS = [signal.Signals[name] for name in IGNORED_SIGNALS]


@pytest.fixture(scope="module")
def lasting() -> Iterator[WriterProcess]:
    """One process for all tests, because a start takes seconds."""
    process = WriterProcess(DEADLINE_SECONDS)
    yield process
    process.close()


@pytest.fixture
def process(lasting: WriterProcess) -> WriterProcess:
    """The running process; the next test starts it again if a test ended it."""
    lasting.start()
    return lasting


@pytest.fixture
def arena() -> Iterator[StagingArena]:
    arena = StagingArena(4096)
    arena.memory[: len(WORDS)] = WORDS
    yield arena
    arena.close()


def write(process: WriterProcess, path: Path, arena: StagingArena) -> bytes:
    """Return what was written, after comparing it with the answer of the process."""
    record = process.write(NewFileOnDisk(path), arena, len(WORDS), step=1)
    data = path.read_bytes()
    assert record == FileRecord.of(data)
    return data


def test_the_process_writes_the_start_of_the_arena_as_it_is_at_the_request(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    assert write(process, tmp_path / "f", arena) == WORDS
    arena.memory[:4] = b"THAT"
    assert write(process, tmp_path / "g", arena) == b"THAT" + WORDS[4:]


def test_the_process_follows_to_a_new_arena(process: WriterProcess, arena: StagingArena, tmp_path: Path) -> None:
    write(process, tmp_path / "f", arena)
    other = StagingArena(8192)
    other.memory[:5] = b"other"
    assert write(process, tmp_path / "g", other)[:5] == b"other"
    other.close()


def test_the_process_loads_no_torch_and_gives_way_to_training(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    write(process, tmp_path / "f", arena)
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    # Niceness ends at 19.
    assert os.getpriority(os.PRIO_PROCESS, process.pid or 0) == min(os.getpriority(os.PRIO_PROCESS, 0) + NICE, 19)


def test_starting_a_running_process_again_changes_nothing(process: WriterProcess) -> None:
    pid = process.pid
    process.start()
    assert process.pid == pid


def test_the_process_ignores_the_signals_that_a_scheduler_sends(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    pid = process.pid
    assert pid is not None
    for number in IGNORED_NUMBERS:
        os.kill(pid, number)
    assert write(process, tmp_path / "f", arena) == WORDS
    assert process.pid == pid


def test_the_process_ignores_signals_from_its_first_moment_on(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    process.close()
    process.start()
    assert process.pid is not None
    for number in IGNORED_NUMBERS:
        os.kill(process.pid, number)
    assert write(process, tmp_path / "f", arena) == WORDS


def test_the_signal_mask_of_the_trainer_is_unchanged(process: WriterProcess) -> None:
    assert not set(IGNORED_NUMBERS) & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_error_of_the_write_is_raised_in_the_trainer_and_the_process_continues(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        write(process, tmp_path / "no such folder" / "f", arena)
    assert write(process, tmp_path / "f", arena) == WORDS


def test_a_killed_process_is_an_error_with_its_pid_and_the_next_start_starts_another(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WriterProcessDied, match=f"writer process {pid} ended .* while writing") as death:
        write(process, tmp_path / "f", arena)
    assert death.value.pid == pid
    with pytest.raises(WriterProcessDied, match="was not started"):
        write(process, tmp_path / "f", arena)
    process.start()
    assert process.pid not in (None, pid)
    assert write(process, tmp_path / "f", arena) == WORDS


def test_a_stopped_process_is_noticed_named_and_replaced(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    write(process, tmp_path / "f", arena)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _state(Path(f"/proc/{pid}")) == "T", lambda: "the writer process did not stop")
    with pytest.raises(WriterProcessDied, match=f"writer process {pid} was stopped while writing"):
        write(process, tmp_path / "g", arena)
    assert not Path(f"/proc/{pid}").exists()
    process.start()
    assert write(process, tmp_path / "h", arena) == WORDS


def test_a_process_stopped_while_idle_is_replaced_at_the_next_start(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _state(Path(f"/proc/{pid}")) == "T", lambda: "the writer process did not stop")
    process.start()
    assert process.pid != pid
    assert not Path(f"/proc/{pid}").exists()
    assert write(process, tmp_path / "f", arena) == WORDS


def test_closing_ends_the_process_and_may_be_repeated(process: WriterProcess) -> None:
    pid = process.pid
    process.close()
    process.close()
    assert process.pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_without_a_rank_it_has_the_faults_of_rank_0(arena: StagingArena, tmp_path: Path) -> None:
    faults.install("EIO@write:rank=0", rank=0)
    process = WriterProcess(DEADLINE_SECONDS)
    process.start()
    try:
        with pytest.raises(OSError, match="Input/output error"):
            write(process, tmp_path / "file", arena)
    finally:
        process.close()


def test_closing_before_a_start_does_nothing() -> None:
    process = WriterProcess(timeout_seconds=DEADLINE_SECONDS)
    process.close()
    assert process.pid is None


PARENT = """
import sys, time
from torchtitan_lite.disk.writer_process import WriterProcess
process = WriterProcess(timeout_seconds=60)
process.start()
print(process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.promise("A writer process never outlives its trainer.", section="failure")
def test_the_process_dies_with_its_trainer() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        writer = Path("/proc") / trainer.stdout.readline().strip()
        # The kernel sets the command line of a new process a moment after its start.
        wait_until(lambda: b"serve" in (writer / "cmdline").read_bytes(), lambda: "the writer process did not start")
        trainer.kill()
    wait_until(lambda: not _runs(writer), lambda: "the writer process outlived its trainer")


def _runs(process: Path) -> bool:
    return _state(process) not in "ZX"


def _state(process: Path) -> str:
    """Return the state, one letter; X for a process that is gone."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
