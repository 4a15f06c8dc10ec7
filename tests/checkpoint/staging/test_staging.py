"""The staged copy of a state is the image of the file, and training cannot change it."""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.format.torch_item import object_item
from torchtitan_lite.checkpoint.staging.arena import StagingArena
from torchtitan_lite.checkpoint.staging.copiers import HostCopier
from torchtitan_lite.checkpoint.staging.stager import StagedCopy, Stager
from torchtitan_lite.disk.digest import FileRecord


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager(HostCopier())
    yield stager
    stager.close()


def image_of(tensors: list[torch.Tensor], objects: bytes = b"", layout: FileLayout | None = None) -> FileData:
    return FileData(layout or FileLayout([(t.dtype, tuple(t.shape)) for t in tensors]), tensors, objects)


def data_of(staged: StagedCopy) -> bytes:
    staged.wait()
    return bytes(memoryview(staged.arena.memory)[: staged.num_bytes])


def whole(image: FileData) -> bytes:
    buffer = bytearray(image.num_bytes)
    image.fill(memoryview(buffer), 0, image.num_bytes)
    return bytes(buffer)


def views() -> list[torch.Tensor]:
    base = torch.arange(12.0).view(3, 4)
    leaf = base.clone().requires_grad_()
    return [
        *(base.T, base[:, 1], torch.ones(1).expand(5), leaf, torch.empty(0), torch.tensor(3), torch.rand(70_000)),
        *(torch.randint(0, 9, (33,)).to(torch.float8_e4m3fn), torch.rand(5).bfloat16(), torch.tensor([True, False])),
    ]


def test_the_staged_image_has_the_bytes_of_the_file(stager: Stager) -> None:
    image = image_of(views(), object_item("text"))
    assert data_of(stager.take(image)) == whole(image)


def test_the_staged_tensors_are_those_of_the_state(stager: Stager) -> None:
    staged = stager.take(image_of(views()))
    staged.wait()
    for copy, tensor in zip(staged.tensors(), views()[:6], strict=False):
        assert (copy.dtype, copy.shape, copy.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert torch.equal(copy, tensor)


def test_a_later_change_of_the_state_does_not_change_the_copy(stager: Stager) -> None:
    tensors = [torch.zeros(100), torch.ones(3, 3).T]
    staged = stager.take(image_of(tensors))
    staged.wait()
    before = data_of(staged)
    for tensor in tensors:
        tensor.fill_(9)
    assert data_of(staged) == before


def test_the_arena_is_kept_from_save_to_save_and_grows_when_it_must(stager: Stager) -> None:
    layout = FileLayout([(torch.float32, (1000,))])
    arena = stager.take(image_of([torch.zeros(1000)], layout=layout)).arena
    again = image_of([torch.ones(1000)], b"objects" * 100, layout=layout)
    second = stager.take(again)
    assert data_of(second) == whole(again)
    assert second.arena is arena
    larger = image_of([torch.ones(2_000_000)])
    third = stager.take(larger)
    assert data_of(third) == whole(larger)
    assert third.arena is not arena
    assert arena.fd == -1


def test_another_layout_in_the_same_arena_gets_frames_of_its_own(stager: Stager) -> None:
    first, second = image_of([torch.zeros(1000)]), image_of([torch.ones(10), torch.ones(20)])
    for image in (first, second, first):
        assert data_of(stager.take(image)) == whole(image)


def test_a_prepared_arena_is_used_and_kept(stager: Stager) -> None:
    image = image_of([torch.rand(1_000_000)])
    stager.prepare(image.num_bytes)
    stager.finish_preparation()
    arena = stager.pool.slots[0].arena
    for _ in range(2):
        staged = stager.take(image)
        assert staged.arena is arena
        assert data_of(staged) == whole(image)


def test_an_arena_has_every_page_before_it_is_first_used(stager: Stager) -> None:
    stager.prepare(8 << 20)
    stager.finish_preparation()
    arena = stager.pool.slots[0].arena
    assert arena is not None
    assert os.fstat(arena.fd).st_blocks * 512 >= 8 << 20


def test_a_closed_stager_has_no_memory_and_can_be_used_again() -> None:
    stager = Stager(HostCopier())
    image = image_of([torch.rand(1000)])
    staged = stager.take(image)
    memory = os.dup(staged.arena.fd)
    stager.pool.release(staged.slot)
    stager.close()
    assert os.fstat(memory).st_blocks == 0
    os.close(memory)
    assert data_of(stager.take(image)) == whole(image)
    stager.close()


def test_another_mapping_of_the_arena_sees_the_file(stager: Stager) -> None:
    """The writer process has such a mapping."""
    image = image_of([torch.rand(7), torch.rand(3000)])
    staged = stager.take(image)
    descriptor = os.dup(staged.arena.fd)
    elsewhere = mmap.mmap(descriptor, staged.arena.num_bytes)
    os.close(descriptor)
    assert elsewhere[: staged.num_bytes] == whole(image)
    first = image.layout.places[0]
    item = elsewhere[first.item_at : first.item_at + first.item_bytes]
    assert torch.equal(torch.load(io.BytesIO(item), weights_only=True), image.tensors[0])


def test_the_memory_of_a_closed_arena_is_freed_even_if_another_process_has_it_open() -> None:
    """A writer process has it open, and so does a worker that was forked while it existed."""
    arena = StagingArena(1 << 20)
    arena.allocate()
    elsewhere = os.dup(arena.fd)
    arena.close()
    assert os.fstat(elsewhere).st_blocks == 0
    os.close(elsewhere)


def test_closing_twice_is_closing_once() -> None:
    arena = StagingArena(4096)
    arena.close()
    arena.close()
    assert arena.fd == -1


@pytest.mark.parametrize("sizes", [(), (1,), (70_000, 3), (262_144, 5, 1), (5_000_000,), (1_000_001, 2, 9_000_003)])
def test_digests_taken_with_the_copy_are_those_of_the_file(stager: Stager, sizes: tuple[int, ...]) -> None:
    odd = [torch.rand(700, 1100).T, torch.rand(3, 300_000)[:, 1::2], *views()] if sizes else []
    image = image_of([*(torch.rand(size) for size in sizes), *odd], object_item("text"))
    staged = stager.take(image, digests=True)
    assert data_of(staged) == whole(image)
    assert staged.record == FileRecord.of(whole(image))
    assert stager.take(image).record is None, "none were wanted"
