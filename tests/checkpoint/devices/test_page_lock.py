"""Pages are locked in pieces by the thread that touches them, and unlocked before they are freed; no call waits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.descriptors import num_open, wait_for_open
from torchtitan_lite.checkpoint.devices import page_lock
from torchtitan_lite.checkpoint.devices.page_lock import wait_for_unlocking
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.staging import copiers, stager
from torchtitan_lite.checkpoint.staging.arena import NO_STEP, StagingArena
from torchtitan_lite.checkpoint.staging.copiers import CudaCopier, HostCopier
from torchtitan_lite.checkpoint.staging.stager import Stager
from torchtitan_lite.memory.images.pool import ImageStager

MIB = 1 << 20


class Locks:
    """Page locks of no device; `room` bytes can be locked, and unlocking waits for `may_unlock`."""

    def __init__(self, room: int = 1 << 60) -> None:
        self.room = room
        self.may_unlock = threading.Event()
        self.may_unlock.set()
        self.locked: dict[int, int] = {}
        """The bytes of each piece, by address."""
        self.threads: set[str] = set()
        self.at_lock: Callable[[], object] = bool
        self.fds: list[int] = []

    def for_thread(self) -> Callable[[], None]:
        return lambda: self.threads.add(threading.current_thread().name)

    def lock(self, address: int, num_bytes: int) -> str:
        assert threading.current_thread().name in self.threads, "it would be for another device"
        self.at_lock()
        assert num_bytes <= page_lock.PIECE_BYTES
        if num_bytes > self.room - sum(self.locked.values()):
            return "error 2"
        assert address not in self.locked
        self.locked[address] = num_bytes
        return ""

    def unlock(self, address: int) -> str:
        assert self.may_unlock.wait(60)
        del self.locked[address]
        return ""


@pytest.fixture(autouse=True)
def of_a_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_lock, "PIECE_BYTES", MIB)


def image(num_bytes: int) -> FileData:
    tensor = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    return FileData(FileLayout([(tensor.dtype, tuple(tensor.shape))]), [tensor])


def test_all_of_an_arena_is_locked_piece_after_piece() -> None:
    locks = Locks()
    user = Stager(HostCopier(), page_lock=locks)
    arena = user.take(image(5 * MIB)).arena
    assert locks.locked == {arena.address + begin: MIB for begin in range(0, arena.num_bytes, MIB)}
    assert locks.threads == {"staging"}
    user.close()
    wait_for_unlocking()
    assert locks.locked == {}
    assert arena.fd == -1


def test_what_cannot_be_locked_stays_as_it_is_and_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    locks, data = Locks(room=2 * MIB), image(5 * MIB)
    user = Stager(CudaCopier(), page_lock=locks)
    for _ in range(2):
        staged = user.take(data)
        staged.wait()
        assert torch.equal(staged.tensors()[0], data.tensors[0])
        user.pool.release(staged.slot)
    assert sum(locks.locked.values()) == 2 * MIB
    [said] = [message for message in caplog.messages if "page-locked" in message]
    assert f"(error 2, {2 * MIB} of {8 * MIB} bytes are)" in said
    user.close()
    wait_for_unlocking()
    assert locks.locked == {}


def test_closing_does_not_wait_and_whoever_needs_the_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    locks, data = Locks(), image(3 * MIB)
    first, second = (Stager(HostCopier(), page_lock=locks) for _ in range(2))
    given_up = first.take(data).arena
    locks.may_unlock.clear()
    first.close()
    assert given_up.fd >= 0, "its pages are still locked"
    is_waiting = threading.Event()
    monkeypatch.setattr(stager, "wait_for_unlocking", lambda: (is_waiting.set(), wait_for_unlocking()))
    locks.at_lock = lambda: locks.fds.append(given_up.fd)
    second.prepare(data.num_bytes)
    assert is_waiting.wait(60)
    locks.may_unlock.set()
    staged = second.take(data)
    assert locks.fds == [-1] * (staged.arena.num_bytes // MIB), "it was free before other memory was made"
    second.close()
    wait_for_unlocking()


def test_ten_in_turn_leave_nothing() -> None:
    locks, before = Locks(), num_open()
    for _ in range(10):
        user = Stager(HostCopier(), page_lock=locks)
        user.take(image(2 * MIB))
        user.close()
        user.close()
    wait_for_unlocking()
    assert locks.locked == {}
    wait_for_open(before)


def test_a_save_that_comes_before_its_memory_says_how_long_it_waited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    user = Stager(HostCopier())
    user.prepare(MIB)
    user.finish_preparation()
    assert "until the memory for copies was ready" not in caplog.text
    monkeypatch.setattr(stager, "_LONG_WAIT_SECONDS", 0.0)
    user.prepare(9 * MIB)
    user.take(image(9 * MIB))
    assert "until the memory for copies was ready" in caplog.text
    user.close()


def test_an_exit_waits_for_the_piece_that_is_being_unlocked_and_leaves_the_others() -> None:
    program = """
import atexit
class Locks:
    unlocked = 0
    def for_thread(self): return bool
    def lock(self, address, num_bytes): return ""
    def unlock(self, address):
        Locks.unlocked += 1
        if Locks.unlocked == 2:
            page_lock._IS_EXITING.wait()
        return ""
atexit.register(lambda: print("unlocked", Locks.unlocked))  # The last one that was registered is called first.
from torchtitan_lite.checkpoint.devices import page_lock
from torchtitan_lite.checkpoint.staging.arena import StagingArena
page_lock.PIECE_BYTES = 1 << 20
arena = StagingArena(9 << 20, page_lock=Locks())
arena.allocate()
arena.close()
while Locks.unlocked < 2:
    pass
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "unlocked 2\n", "")


def test_adopted_memory_is_locked_before_the_first_copy_and_a_former_image_is_not() -> None:
    locks, data = Locks(), image(3 * MIB)
    first = ImageStager(HostCopier(), let_go=lambda arena: None)
    arena = first.take(data).arena
    assert arena.mark is not None
    user = ImageStager(HostCopier(), let_go=lambda arena: None, page_lock=locks)
    [adopted] = user.adopt([(os.dup(arena.fd), os.dup(arena.mark.fd))])
    assert locks.locked == {}
    user.pool.adopt([(adopted, NO_STEP)], [])
    user.prepare(data.num_bytes)
    assert user.take(data).arena is adopted
    assert len(locks.locked) == adopted.num_bytes // MIB
    user.close()
    wait_for_unlocking()
    assert locks.locked == {}
    first.close()


class Copies(TorchFunctionMode):
    """Notes the bytes of the memory at `address` to which copies go."""

    def __init__(self, address: int) -> None:
        super().__init__()
        self._address = address
        self.ranges: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            at = args[0].data_ptr() - self._address
            self.ranges.append((at, at + args[0].nbytes))
        return func(*args, **(kwargs or {}))


def enqueue(tensor: torch.Tensor) -> list[tuple[int, int]]:
    data = FileData(FileLayout([(tensor.dtype, tuple(tensor.shape))]), [tensor])
    arena = StagingArena(data.num_bytes)
    with Copies(arena.address) as copies:
        copiers._enqueue_copies(data, arena, [0])
    [staged] = arena.tensors(data.layout)
    assert torch.equal(staged, tensor)
    arena.close()
    return copies.ranges


@pytest.mark.parametrize("shape", [(100,), (700, 900), (3 * MIB,)], ids=str)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_no_copy_crosses_from_one_piece_to_the_next(shape: tuple[int, ...], is_transposed: bool) -> None:
    tensor = torch.rand(shape).T if is_transposed and len(shape) == 2 else torch.rand(shape)
    copies = enqueue(tensor)
    assert all(begin // MIB == (end - 1) // MIB for begin, end in copies)
    assert sum(end - begin for begin, end in copies) == tensor.nbytes


def test_a_copy_outside_of_inference_mode_follows_one_inside() -> None:
    data = image(1000)
    arena = StagingArena(data.num_bytes)
    with torch.inference_mode():
        copiers._enqueue_copies(data, arena, [0])
    copiers._enqueue_copies(data, arena, [0])
    assert torch.equal(arena.tensors(data.layout)[0], data.tensors[0])
    arena.close()


@pytest.mark.slow
def test_a_tensor_of_three_gibibytes_is_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 8 << 30:
        pytest.skip("it takes 6 GiB")
    assert len(enqueue(torch.full((3 << 28,), 1.5))) == 13
