"""Memory asks for huge pages where it has room for one, gets them where the kernel can, and keeps no place unused.

What the kernel knows of a mapping is in /proc/self/smaps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_lite.disk import shared_memory
from torchtitan_lite.disk.read_requests import HUGE_PAGE_BYTES, request_memory
from torchtitan_lite.disk.shared_memory import address_of, allocate, map_shared

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create and /proc"),
    pytest.mark.skipif(not _SIZE.exists(), reason="this kernel has no huge pages"),
]
SEVERAL = 3 * HUGE_PAGE_BYTES + 5


def shared(num_bytes: int) -> memoryview:
    fd = os.memfd_create("huge")
    os.ftruncate(fd, num_bytes)
    view = map_shared(fd, num_bytes)
    os.close(fd)
    return view


def known_of(view: memoryview) -> tuple[str, dict[str, list[str]]]:
    """Return the access of the mapping with the first byte of `view`, and the fields that the kernel shows of it."""
    address, access, fields = address_of(view), "", {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            is_it = begin <= address < end
            access = values[0] if is_it else access
        elif is_it:
            fields[name[:-1]] = values
    return access, fields


def reserved_bytes() -> int:
    """Return the bytes of this process's places that it cannot use."""
    places = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    limits = [[int(part, 16) for part in place[0].split("-")] for place in places if place[1] == "---p"]
    return sum(end - begin for begin, end in limits)


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="with larger pages a huge page has another size, too")
def test_memory_is_aligned_to_a_huge_page_of_the_kernel() -> None:
    size = int(_SIZE.read_text())
    assert size == HUGE_PAGE_BYTES
    for memory in (request_memory(1), shared(1)):
        assert address_of(memory) % size == 0


@pytest.mark.parametrize("make", [request_memory, shared])
def test_only_memory_with_room_for_a_huge_page_asks_for_them(make: Callable[[int], memoryview]) -> None:
    asks = {}
    for num_bytes in (4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, SEVERAL):
        view = make(num_bytes)
        asks[num_bytes] = "hg" in known_of(view)[1]["VmFlags"]
        view.release()
    assert asks == {4096: False, HUGE_PAGE_BYTES - 1: False, HUGE_PAGE_BYTES: True, SEVERAL: True}


def test_memory_for_requests_is_private_and_an_arena_shared() -> None:
    assert known_of(request_memory(4096))[0] == "rw-p"
    assert known_of(shared(4096))[0] == "rw-s"


@pytest.mark.parametrize("requested", [HUGE_PAGE_BYTES, 256 << 20])
def test_allocated_memory_is_in_huge_pages_and_zero_whatever_was_in_it(
    monkeypatch: pytest.MonkeyPatch, requested: int
) -> None:
    monkeypatch.setattr(shared_memory, "_COLLAPSED_BYTES", requested)
    view = shared(SEVERAL)
    view[:] = b"\x07" * SEVERAL
    allocate(view)
    assert bytes(view) == bytes(SEVERAL)
    found = int(known_of(view)[1]["ShmemPmdMapped"][0])
    if not found and not _can_collapse():
        pytest.skip("this kernel does not collapse memory, or has no huge page left")
    assert found == 3 * HUGE_PAGE_BYTES >> 10


def _can_collapse() -> bool:
    """Return whether the kernel gives a huge page to memory of one small page."""
    view = shared(HUGE_PAGE_BYTES)
    view[0] = 1
    collapse = 25
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(libc.madvise(address_of(view), HUGE_PAGE_BYTES, collapse) == 0)


@pytest.mark.parametrize("num_bytes", [1, 4097, HUGE_PAGE_BYTES, SEVERAL])
def test_a_mapping_keeps_nothing_of_the_place_that_was_reserved_for_it(num_bytes: int) -> None:
    before = reserved_bytes()
    views = [shared(num_bytes) for _ in range(3)]  # Of a place that is aligned by chance, nothing lies before it.
    assert reserved_bytes() == before
    assert len({address_of(view) for view in views}) == 3
