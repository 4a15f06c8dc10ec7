"""The elements of a `torch.save`d tensor are located only if all of them are inside the item, whatever it says."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

import pytest
import torch

from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.untrusted.stock_item import Layout, locate

WANTED = torch.arange(10, dtype=torch.float32)


def saved(tensor: torch.Tensor = WANTED) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


def located(item: bytes) -> Layout | None:
    return locate(lambda offset, count: item[offset : offset + count], len(item), DTYPES)


def with_entry(item: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """Return `item` with the content of the entry whose name ends in `name` changed."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(changed, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry.filename, change(content) if entry.filename.endswith(name) else content)
    return changed.getvalue()


def with_directory_size(item: bytes, num_bytes: int) -> bytes:
    """Return `item` with a directory that gives the elements `num_bytes`."""
    name = item.rindex(b"/data/0")
    at = item.rindex(b"PK\x01\x02", 0, name)
    return item[: at + 20] + struct.pack("<II", num_bytes, num_bytes) + item[at + 28 :]


def test_the_elements_of_a_whole_item_are_located() -> None:
    for item in (saved(), with_entry(saved(), "data/0", lambda content: content)):
        layout = located(item)
        assert layout is not None
        assert (layout.dtype, layout.shape, layout.strides) == (torch.float32, (10,), (1,))
        assert item[layout.at : layout.at + 40] == WANTED.numpy().tobytes()


@pytest.mark.parametrize("num_bytes", [0, 4, 39])
def test_a_storage_that_is_shorter_than_the_tensor_is_not_located(num_bytes: int) -> None:
    assert located(with_entry(saved(), "data/0", lambda content: content[:num_bytes])) is None


def test_a_part_of_a_storage_is_located_up_to_its_last_element_and_no_further() -> None:
    part = WANTED[2:9:3]  # Elements 2, 5 and 8: it ends after nine.
    layout = located(saved(part))
    assert layout is not None
    assert (layout.shape, layout.strides) == ((3,), (3,))
    assert located(with_entry(saved(part), "data/0", lambda content: content[:36])) is not None
    assert located(with_entry(saved(part), "data/0", lambda content: content[:35])) is None


def test_a_storage_that_reaches_beyond_the_item_is_not_located() -> None:
    item = saved()
    assert located(with_directory_size(item, 40)) is not None
    assert located(with_directory_size(item, len(item))) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"storage", b"storagE"), (b"FloatStorage", b"FloatStoragE"), (b"\x01\x00\x00\x000", b"\x01\x00\x00\x001")],
    ids=["another word", "no kind of storage", "another storage"],
)
def test_a_description_of_anything_else_is_not_located(old: bytes, new: bytes) -> None:
    item = saved()
    assert item.count(old) >= 1
    assert located(with_entry(item, "data.pkl", lambda content: content.replace(old, new, 1))) is None
