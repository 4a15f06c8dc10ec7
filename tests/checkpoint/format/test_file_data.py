"""A rank's file before it is written: any range of it can be copied, and torch reads all of it."""

from __future__ import annotations

import io

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from torchtitan_lite.checkpoint.format import file_data
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.format.torch_item import object_item


def image_of(tensors: list[torch.Tensor], objects: bytes = b"") -> FileData:
    return FileData(FileLayout([(t.dtype, tuple(t.shape)) for t in tensors]), tensors, objects)


GUARD = b"\xc5" * 4096
"""What lies around the range that is filled, and must stay."""


def part(image: FileData, begin: int, end: int) -> bytes:
    if begin == end:
        return b""
    memory = bytearray(GUARD + b"\xee" * (end - begin) + GUARD)
    image.fill(memoryview(memory)[len(GUARD) : -len(GUARD)], begin, end)
    assert memory[: len(GUARD)] == memory[-len(GUARD) :] == GUARD
    return bytes(memory[len(GUARD) : -len(GUARD)])


def views() -> list[torch.Tensor]:
    base = torch.arange(4 * 5 * 6, dtype=torch.float32).reshape(4, 5, 6)
    return [
        *(base, base.permute(2, 0, 1), base[:, 1:3, ::2], torch.tensor(7), torch.ones(1).expand(9, 3)),
        *(
            torch.empty(0),
            torch.empty(3, 0, 2),
            torch.view_as_complex(torch.rand(3, 2)).conj(),
            base[1:, :, :1].bfloat16(),
        ),
        *(torch.zeros(1, 1, 1), torch._neg_view(torch.rand(5)), torch.rand(1, 50, 3).transpose(1, 2)),
    ]


def test_torch_loads_every_item() -> None:
    tensors = views()
    image = image_of(tensors, object_item({"n": 1}))
    whole = part(image, 0, image.num_bytes)
    for tensor, place in zip(tensors, image.layout.places, strict=True):
        item = whole[place.item_at : place.item_at + place.item_bytes]
        loaded = torch.load(io.BytesIO(item), weights_only=True)
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor)
    assert torch.load(io.BytesIO(whole[image.layout.end :]), weights_only=True) == {"n": 1}


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_any_range_is_the_same_range_of_the_complete_file(data: st.DataObject) -> None:
    image = image_of(views(), b"objects")
    whole = part(image, 0, image.num_bytes)
    begin = data.draw(st.integers(0, image.num_bytes))
    end = data.draw(st.integers(begin, image.num_bytes))
    if begin < end:
        assert part(image, begin, end) == whole[begin:end]


def test_any_range_of_a_large_tensor_that_is_not_contiguous_is_copied() -> None:
    tensor = torch.arange(3 * 2_000_000).reshape(2_000_000, 3).T.unsqueeze(0)
    image = image_of([tensor])
    place = image.layout.places[0]
    expected = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    for begin, end in ((0, 100), (15_999_990, 16_000_100), (47_000_000, 48_000_000), (3, 33_000_001)):
        assert part(image, place.data_at + begin, place.data_at + end) == expected[begin:end]


def test_items_follow_one_another_without_gaps_on_borders_of_64_bytes() -> None:
    image = image_of([torch.zeros(n, dtype=torch.uint8) for n in (0, 1, 63, 64, 65)])
    ends = [*image.layout.starts[1:], image.layout.end]
    for start, end, place in zip(image.layout.starts, ends, image.layout.places, strict=True):
        assert (start % 64, place.data_at % 64, end - start - place.item_bytes < 64) == (0, 0, True)
    assert b"\xee" * 3 not in part(image, 0, image.num_bytes)


def test_an_intermediate_copy_is_at_most_a_mebibyte_or_one_element() -> None:
    tensor = torch.arange(3 * 700_000, dtype=torch.float32).reshape(700_000, 3).T
    pieces = [piece for piece, _ in file_data.row_major_pieces(tensor, 0, tensor.nbytes)]
    assert max(piece.nbytes for piece in pieces) <= 1 << 20
    assert len(pieces) <= 3 * (-(-700_000 * 4 // (1 << 20)))
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), tensor.reshape(-1))


def test_a_file_without_tensors_holds_its_objects() -> None:
    image = image_of([], b"objects")
    assert part(image, 0, image.num_bytes) == b"objects"
