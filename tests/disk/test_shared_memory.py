"""Memory that several processes map, in huge pages where the kernel can give them."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import sys
from pathlib import Path

import pytest

from torchtitan_lite.disk.read_requests import HUGE_PAGE_BYTES
from torchtitan_lite.disk.shared_memory import address_of, allocate, map_shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")
SIZES = [0, 1, 4096, 4097, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5]


def in_memory(num_bytes: int, name: str = "test") -> int:
    fd = os.memfd_create(name)
    os.ftruncate(fd, max(num_bytes, 1))
    return fd


def mappings(name: str) -> int:
    return Path("/proc/self/maps").read_text().count(f"memfd:{name} ")


@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_one_mapping_writes_another_one_reads(num_bytes: int) -> None:
    fd = in_memory(num_bytes)
    one, other = map_shared(fd, num_bytes), map_shared(fd, num_bytes)
    os.close(fd)
    allocate(one)
    data = os.urandom(num_bytes)
    one[:] = data
    assert other == data and len(other) == num_bytes
    assert address_of(one) % HUGE_PAGE_BYTES == address_of(other) % HUGE_PAGE_BYTES == 0
    assert address_of(one) != address_of(other)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_memory_that_is_allocated_has_all_of_its_pages_and_zeros(num_bytes: int) -> None:
    fd = in_memory(num_bytes)
    view = map_shared(fd, num_bytes)
    allocate(view)
    assert bytes(view) == bytes(num_bytes)
    assert os.fstat(fd).st_blocks * 512 >= num_bytes
    os.close(fd)


def test_the_memory_goes_with_its_last_view() -> None:
    fd = in_memory(HUGE_PAGE_BYTES, "going")
    view = map_shared(fd, HUGE_PAGE_BYTES)
    os.close(fd)
    part = view[4096:8192]
    del view
    gc.collect()
    part[0] = 1
    assert mappings("going") == 1
    del part
    gc.collect()
    assert mappings("going") == 0


def test_a_forked_child_lacks_the_memory_and_unmaps_nothing_of_its_own() -> None:
    fd = in_memory(HUGE_PAGE_BYTES, "forked")
    view = map_shared(fd, HUGE_PAGE_BYTES)
    address = address_of(view)
    child = os.fork()
    if child == 0:
        ok = mappings("forked") == 0
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        ok = ok and libc.mmap(address, 4096, 3, 0x32, -1, 0) == address  # Fixed: the place is free.
        del view
        gc.collect()
        ctypes.memset(address, 1, 1)  # SIGSEGV if it was unmapped.
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    os.close(fd)


def test_a_refusal_of_the_system_is_an_error_and_leaves_no_reservation() -> None:
    before = Path("/proc/self/maps").read_text().count("---p")
    with pytest.raises(OSError, match="4096 bytes could not be mapped: Bad file descriptor") as raised:
        map_shared(-1, 4096)
    assert raised.value.errno == errno.EBADF
    assert Path("/proc/self/maps").read_text().count("---p") == before
