"""The process that writes: what it survives, what ends it, what its end looks like."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan_lite.checkpoint.savers import ProcessSaver
from torchtitan_lite.checkpoint.staging import ArenaSlice, StagingArena
from torchtitan_lite.checkpoint.writer_process import IGNORED_SIGNALS, WriterProcess
from torchtitan_lite.errors import WriterProcessDied

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 60.0
PLACE = ArenaSlice(64, (8,), torch.float32)

IGNORED_NUMBERS = [signal.Signals[name] for name in IGNORED_SIGNALS]


@pytest.fixture
def process(process_saver: ProcessSaver) -> WriterProcess:
    """One for all tests, for it takes seconds to start; a test that ends it has the next one start it again."""
    process_saver.start()
    return process_saver.process


@pytest.fixture
def arena() -> Iterator[StagingArena]:
    arena = StagingArena(4096, pin=False)
    arena.tensor(PLACE).copy_(torch.arange(8.0))
    yield arena
    arena.close()


def write(process: WriterProcess, path: Path, arena: StagingArena) -> bytes:
    """The bytes that the second item was written as."""
    results = process.write(path, [(MetadataIndex("t"), PLACE), (MetadataIndex("b"), b"bytes")], arena)
    info = results[1].storage_data
    return path.read_bytes()[info.offset : info.offset + info.length]


def test_it_writes_tensors_from_the_arena_and_bytes_as_they_are(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    assert write(process, tmp_path / "f", arena) == b"bytes"
    assert torch.load(tmp_path / "f", weights_only=True).tolist() == list(range(8))
    arena.tensor(PLACE).fill_(3)
    write(process, tmp_path / "g", arena)
    assert torch.load(tmp_path / "g", weights_only=True).tolist() == [3] * 8


def test_it_follows_to_a_new_arena(process: WriterProcess, arena: StagingArena, tmp_path: Path) -> None:
    write(process, tmp_path / "f", arena)
    other = StagingArena(8192, pin=False)
    other.tensor(PLACE).fill_(7)
    write(process, tmp_path / "g", other)
    other.close()
    assert torch.load(tmp_path / "g", weights_only=True).tolist() == [7] * 8


def test_starting_a_started_one_changes_nothing(process: WriterProcess) -> None:
    pid = process.pid
    process.start()
    assert process.pid == pid


def test_it_ignores_the_signals_that_a_scheduler_sends(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    pid = process.pid
    assert pid is not None
    for number in IGNORED_NUMBERS:
        os.kill(pid, number)
    assert write(process, tmp_path / "f", arena) == b"bytes"
    assert process.pid == pid


def test_it_ignores_them_from_its_first_moment_on(process: WriterProcess, arena: StagingArena, tmp_path: Path) -> None:
    process.close()
    process.start()
    assert process.pid is not None
    for number in IGNORED_NUMBERS:
        os.kill(process.pid, number)
    assert write(process, tmp_path / "f", arena) == b"bytes"


def test_the_signal_mask_of_the_trainer_is_as_it_was(process: WriterProcess) -> None:
    assert not set(IGNORED_NUMBERS) & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_what_writing_raises_is_raised_here_and_the_process_goes_on(
    process: WriterProcess, arena: StagingArena, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError):
        write(process, tmp_path / "no such folder" / "f", arena)
    assert write(process, tmp_path / "f", arena) == b"bytes"


def test_a_killed_one_is_an_error_with_its_number_and_the_next_start_makes_another(
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
    assert write(process, tmp_path / "f", arena) == b"bytes"


def test_a_silent_one_is_given_up_at_the_deadline(arena: StagingArena, tmp_path: Path) -> None:
    process = WriterProcess(timeout_seconds=0.0)
    process.start()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WriterProcessDied, match="was silent for 0 s"):
        write(process, tmp_path / "f", arena)
    assert process.pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_closing_ends_it_and_may_be_done_again(process: WriterProcess) -> None:
    pid = process.pid
    process.close()
    process.close()
    assert process.pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_closing_one_that_was_never_started_is_nothing() -> None:
    process = WriterProcess(timeout_seconds=DEADLINE_SECONDS)
    process.close()
    assert process.pid is None


PARENT = """
import sys, time
from torchtitan_lite.checkpoint.writer_process import WriterProcess
process = WriterProcess(timeout_seconds=60)
process.start()
print(process.pid, flush=True)
sys.stdin.read()
"""


def test_it_dies_with_its_trainer() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        writer = Path("/proc") / trainer.stdout.readline().strip()
        # The kernel sets the command line of a new process a moment after the process is there.
        _wait_until(lambda: b"serve" in (writer / "cmdline").read_bytes(), "the writer process did not start")
        trainer.kill()
    _wait_until(lambda: not _runs(writer), "the writer process outlived its trainer")


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def _runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_stopped_process_that_takes_no_more_orders_fails_by_the_deadline(tmp_path: Path) -> None:
    process = WriterProcess(timeout_seconds=10)
    process.start()
    arena = StagingArena(0, pin=False)
    assert process.write(tmp_path / "first", [(MetadataIndex("small"), b"ready")], arena)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(WriterProcessDied):
        process.write(tmp_path / "second", [(MetadataIndex("large"), bytes(4 << 20))], arena)
    process.close()
    arena.close()
