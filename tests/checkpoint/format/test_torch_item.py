"""Items that we write ourselves are items of torch.save, for torch and for any reader of zip archives."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest
import torch

from torchtitan_lite.checkpoint.format.torch_item import (
    ALIGNMENT,
    OBJECT_GRAIN,
    object_item,
    pickled,
    tensor_call,
    tensor_frame,
)

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32),
]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (4, 0, 2), (2, 3, 4, 5), (300, 41)]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (num_bytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def test_an_item_is_the_same_whatever_the_default_device() -> None:
    expected = pickled(tensor_call(torch.float32, (2, 3), 0))
    with torch.device("meta"):
        assert pickled(tensor_call(torch.float32, (2, 3), 0)) == expected


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_loads_a_framed_tensor_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    frame = tensor_frame(dtype, shape)
    assert len(frame.head) % ALIGNMENT == 0
    loaded = torch.load(io.BytesIO(frame.head + bits(tensor) + frame.tail), weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.is_contiguous()) == (dtype, torch.Size(shape), True)
    assert bits(loaded) == bits(tensor)


def test_the_pickle_is_the_one_that_torch_writes() -> None:
    for tensor in (torch.zeros(3, 5), torch.zeros(2, dtype=torch.uint16), torch.zeros((), dtype=torch.bfloat16)):
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        frame = tensor_frame(tensor.dtype, tuple(tensor.shape))
        ours = zipfile.ZipFile(io.BytesIO(frame.head + bits(tensor) + frame.tail))
        loads = [archive.read("archive/data.pkl") for archive in (ours, zipfile.ZipFile(buffer))]
        assert loads[0] == loads[1]


def test_the_entries_of_an_item_are_plain_and_have_no_time() -> None:
    for entry in zipfile.ZipFile(io.BytesIO(object_item({"a": 1}))).infolist():
        assert (entry.flag_bits, entry.compress_type, entry.date_time) == (0, zipfile.ZIP_STORED, (1980, 0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -(2**70), 1.5, float("inf"), "text", b"bytes", [1, [2]], (1, "a"), {"a": {"b": (None,)}}, {3: 4}],
    ids=repr,
)
def test_torch_loads_an_object(value: Any) -> None:
    item = object_item(value)
    assert torch.load(io.BytesIO(item), weights_only=True) == value
    assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None


def test_a_longer_number_does_not_move_the_next_item() -> None:
    assert len(object_item(9)) == len(object_item(10**30)) == len(object_item(0.1))
    assert len(object_item(9)) % OBJECT_GRAIN == 0


@pytest.mark.slow
def test_a_tensor_over_four_gib_has_the_long_form_of_the_archive(tmp_path: Any) -> None:
    shape = ((1 << 32) + 5,)
    frame = tensor_frame(torch.uint8, shape)
    path = tmp_path / "item.pt"
    with path.open("wb") as file:
        file.write(frame.head)
        file.seek(len(frame.head) + shape[0] - 1)
        file.write(b"\x07" + frame.tail)
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded.shape == shape
    assert (loaded[0].item(), loaded[-1].item()) == (0, 7)
    assert [entry.file_size for entry in zipfile.ZipFile(path).infolist()][-1] == shape[0]
