"""The layout of items of any size: `zipfile` and `locate` find what we write, without the elements in memory."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

import pytest
import torch

from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.format.torch_item import Frame, object_item, tensor_frame
from torchtitan_lite.checkpoint.untrusted.stock_item import Layout, locate

LIMIT = 2**32 - 1
"""The first number that needs the 64-bit form of a zip archive."""


class Item(io.RawIOBase):
    """A framed tensor of zeros that takes no memory."""

    def __init__(self, frame: Frame, num_bytes: int) -> None:
        self._frame, self._num_zeros, self._at = frame, num_bytes, 0
        self.num_bytes = len(frame.head) + num_bytes + len(frame.tail)

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.num_bytes}[whence]
        return self._at

    def tell(self) -> int:  # words: kept
        return self._at

    def read(self, count: int = -1) -> bytes:
        end = self.num_bytes if count < 0 else min(self._at + count, self.num_bytes)
        data, self._at = self.part(self._at, end - self._at), end
        return data

    def part(self, offset: int, count: int) -> bytes:
        """Return bytes [offset, offset + count), none beyond the end."""
        assert count < 1 << 20, "no reader needs the zeros"
        zeros_end = len(self._frame.head) + self._num_zeros
        data = self._frame.head[offset : offset + count]
        data += bytes(max(0, min(zeros_end, offset + count) - max(len(self._frame.head), offset)))
        return data + self._frame.tail[max(0, offset - zeros_end) : max(0, offset + count - zeros_end)]


def local_header(item: Item, entry: zipfile.ZipInfo) -> tuple[tuple[Any, ...], bytes, int]:
    """Return the fields of the entry's local header, its extra field, and the byte where its content starts."""
    fields = struct.unpack("<4s5H3L2H", item.part(entry.header_offset, 30))
    extra_at = entry.header_offset + 30 + fields[9]
    return fields, item.part(extra_at, fields[10]), extra_at + fields[10]


@pytest.mark.parametrize("size", [0, 1, 7, LIMIT - 2000, LIMIT - 1, LIMIT, LIMIT + 1, 3 * LIMIT])
def test_an_item_of_any_size_is_an_archive_whose_elements_start_on_a_border(size: int) -> None:
    frame = tensor_frame(torch.uint8, (size,))
    item = Item(frame, size)
    with zipfile.ZipFile(item) as archive:  # type: ignore[arg-type]  # it reads and seeks
        entries = archive.infolist()
        assert [entry.filename for entry in entries] == [
            *("archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0")
        ]
        assert (archive.read("archive/byteorder"), archive.read("archive/version")) == (b"little", b"3\n")
    data = entries[-1]
    assert (data.file_size, data.compress_size, data.compress_type) == (size, size, zipfile.ZIP_STORED)
    fields, extra, begin = local_header(item, data)
    assert begin == len(frame.head)
    assert begin % 64 == 0
    assert fields[7:9] == (min(size, LIMIT), min(size, LIMIT))
    long_form = struct.pack("<2H2Q", 1, 16, size, size)
    assert extra.startswith(long_form) if size >= LIMIT else not extra.startswith(long_form[:4])
    padding = extra.removeprefix(long_form)
    assert padding == b"FB" + struct.pack("<H", len(padding) - 4) + b"Z" * (len(padding) - 4)
    assert len(padding) < 4 + 64


@pytest.mark.parametrize("size", [0, 5, LIMIT - 2000, LIMIT - 1, LIMIT, LIMIT + 1, 3 * LIMIT])
def test_the_elements_of_an_item_of_any_size_are_located(size: int) -> None:
    frame = tensor_frame(torch.uint8, (size,))
    item = Item(frame, size)
    assert locate(item.part, item.num_bytes, DTYPES) == Layout(len(frame.head), torch.uint8, (size,), (1,))


@pytest.mark.parametrize("num_bytes", [LIMIT - 1, LIMIT])
def test_the_directory_has_its_long_form_from_the_byte_on_that_does_not_fit_into_32_bits(num_bytes: int) -> None:
    head = len(tensor_frame(torch.uint8, (num_bytes,)).head)
    size = num_bytes - head  # so that the directory begins at `num_bytes`
    item = Item(tensor_frame(torch.uint8, (size,)), size)
    end = struct.unpack("<4s4H2LH", item.part(item.num_bytes - 22, 22))
    assert end[6] == num_bytes
    long_form = item.part(item.num_bytes - 22 - 20 - 56, 56 + 20)
    if num_bytes < LIMIT:
        assert b"PK\x06\x06" not in long_form
        return
    fields = struct.unpack("<4sQ2H2L4Q", long_form[:56])
    # 44 bytes follow; made and read by version 4.5 of the format; one disk; four entries.
    assert fields == (b"PK\x06\x06", 44, 45, 45, 0, 0, 4, 4, end[5], num_bytes)
    assert struct.unpack("<4sLQL", long_form[56:]) == (b"PK\x06\x07", 0, num_bytes + end[5], 1)


def test_every_header_says_which_version_of_the_format_it_needs() -> None:
    frame = tensor_frame(torch.float32, (3,))
    item = Item(frame, 12)
    with zipfile.ZipFile(item) as archive:  # type: ignore[arg-type]  # as above
        for entry in archive.infolist():
            assert (entry.create_version, entry.extract_version, entry.flag_bits) == (45, 45, 0)
            assert local_header(item, entry)[0][1:4] == (45, 0, 0)


def test_an_object_s_item_has_the_entries_that_torch_s_own_has() -> None:
    with zipfile.ZipFile(io.BytesIO(object_item({"n": 1}))) as archive:
        names = [name.partition("/")[2] for name in archive.namelist()]
        contents = [archive.read(f"archive/{name}") for name in names[1:]]
    assert names == ["data.pkl", "byteorder", "version"]
    assert contents == [b"little", b"3\n"]
