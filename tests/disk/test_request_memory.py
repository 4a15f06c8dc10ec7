"""Memory for requests is aligned, writable, and absent in a forked child."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path

import pytest

from torchtitan_lite.disk.block_reader import BlockReader
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.read_requests import HUGE_PAGE_BYTES, Piece, request_memory


@pytest.mark.parametrize("num_bytes", [1, 4096, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES + 8192])
def test_request_memory_is_aligned_to_a_huge_page_and_zero(num_bytes: int) -> None:
    memory = request_memory(num_bytes)
    assert len(memory) == num_bytes
    assert ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES == 0
    assert not any(memory)
    memory[:] = b"\x07" * num_bytes
    assert bytes(memory) == b"\x07" * num_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps memory from a child")
def test_a_forked_child_has_no_request_memory() -> None:
    memory = request_memory(4096)
    memory[0] = 1
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        os._exit(memory[0])  # If the memory were copied, a fork would move it away from under the disk.
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    assert memory[0] == 1


def test_a_reader_inherited_by_a_forked_child_reads_there_too(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096
    (tmp_path / "file").write_bytes(data)
    reader = BlockReader()

    def read() -> bool:
        into = bytearray(len(data))
        reader.read(tmp_path / "file", FileRecord.of(data), [Piece(0, memoryview(into))])
        return into == data

    assert read()
    child = os.fork()
    if child == 0:
        os._exit(0 if read() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
