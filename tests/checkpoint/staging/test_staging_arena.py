"""The memory of an arena: what its tensors are like, and what becomes of its descriptors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.descriptors import num_open_of
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.mark import Mark


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3), ()])
def test_a_tensor_of_an_arena_is_on_the_cpu_and_of_its_type_also_if_it_is_empty(shape: tuple[int, ...]) -> None:
    arena = StagingArena(4096)
    with torch.device("meta"):
        found = arena.tensor(64, torch.int16, shape)
    assert (found.device.type, found.dtype, tuple(found.shape)) == ("cpu", torch.int16, shape)
    arena.close()


def test_in_a_process_without_standard_input_an_arena_and_a_mark_are_closed_too() -> None:
    child = os.fork()
    if child == 0:
        os.close(0)
        arena = StagingArena(1 << 20)
        was_first = arena.fd == 0
        arena.close()
        mark = Mark()
        was_first = was_first and mark.fd == 0
        mark.close()
        again = os.open(os.devnull, os.O_RDONLY)  # Gets the lowest number that is free.
        os._exit(0 if was_first and again == 0 and (arena.fd, mark.fd) == (-1, -1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def num_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:torchtitan_lite-mark")


def test_closing_an_arena_closes_its_mark_and_what_it_had_open() -> None:
    arena = StagingArena(4096, mark=Mark())
    assert arena.mark is not None
    opened = (arena.fd, arena.mark.fd)
    before = num_mapped()
    arena.close()
    assert num_mapped() == before - 1
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_an_arena_that_cannot_be_made_leaves_nothing_open() -> None:
    before = num_open_of("torchtitan_lite-staging", "torchtitan_lite-mark")
    for num_bytes in (1 << 60, 1 << 47):  # More than a file, and than all addresses.
        with pytest.raises(OSError):
            StagingArena(num_bytes, mark=Mark())
    assert num_open_of("torchtitan_lite-staging", "torchtitan_lite-mark") == before


def test_an_arena_of_no_bytes_can_be_made_allocated_and_closed() -> None:
    arena = StagingArena(0)
    arena.allocate()
    assert len(arena.memory) == 0
    arena.close()
