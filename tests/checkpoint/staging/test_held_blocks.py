"""Blocks of still tensors that an arena has already are not copied again; the copy is what it would be without that."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.copiers import HostCopier
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord

MIB_OF_FLOATS = BLOCK_BYTES // 4
CHANGE = st.tuples(st.integers(0, 2), st.integers(0, MIB_OF_FLOATS))


class Copies:
    """Copies of three tensors, the first two still ones, into one arena."""

    def __init__(self) -> None:
        self.tensors = [torch.zeros(2 * MIB_OF_FLOATS), torch.zeros(3 * MIB_OF_FLOATS), torch.zeros(2 * MIB_OF_FLOATS)]
        self.layout = self.new_layout()
        self.arena = StagingArena(16 * BLOCK_BYTES, pin=False)

    def new_layout(self, num_still: int = 2) -> FileLayout:
        return FileLayout([(t.dtype, tuple(t.shape)) for t in self.tensors], num_still)

    def check(self) -> None:
        """Copy, and compare the arena and the digests with what a file has."""
        data = FileData(self.layout, self.tensors, b"objects")
        record = HostCopier().copy(data, self.arena, digests=True).record
        expected = bytearray(data.num_bytes)
        data.fill(memoryview(expected), 0, data.num_bytes)
        assert bytes(self.arena.memory[: data.num_bytes]) == bytes(expected)
        assert record == FileRecord.of(bytes(expected))

    def close(self) -> None:
        self.arena.held = None
        self.arena.close()


@settings(max_examples=examples(50), deadline=None)
@given(rounds=st.lists(st.lists(CHANGE, max_size=3), min_size=1, max_size=4))
def test_a_copy_is_that_of_the_present_values(rounds: list[list[tuple[int, int]]]) -> None:
    copies = Copies()
    copies.check()
    for changes in rounds:
        for number, at in changes:
            copies.tensors[number][at] += 1
        copies.check()
    copies.close()


def test_a_block_that_the_arena_has_is_not_copied() -> None:
    copies = Copies()
    copies.check()
    copies.arena.memory[10] ^= 1  # A mark that a copy would remove.
    copies.arena.memory[copies.layout.changes_at + 10] ^= 1
    data = FileData(copies.layout, copies.tensors, b"objects")
    before = bytes(copies.arena.memory[10:11])
    HostCopier().copy(data, copies.arena, digests=True)
    assert bytes(copies.arena.memory[10:11]) == before
    copies.arena.memory[10] ^= 1
    copies.check()
    copies.close()


def test_another_layout_or_a_copy_without_digests_is_complete() -> None:
    copies = Copies()
    copies.check()
    copies.layout = copies.new_layout(1)
    copies.check()
    HostCopier().copy(FileData(copies.layout, copies.tensors, b"other"), copies.arena, digests=False)
    assert copies.arena.held is None
    copies.check()
    copies.close()
