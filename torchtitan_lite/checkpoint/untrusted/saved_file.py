"""Find the tensors in a file of `torch.save`, without unpickling it and without reading them.

The file is a zip archive with uncompressed entries: a pickle that describes the saved value, and a storage for each
tensor. The pickle is parsed as inert values, and only names that a file of weights needs may occur in it, so nothing
that it names is ever imported or called. Whatever the file says, all elements of a returned layout are inside it.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.format.contents import Item
from torchtitan_lite.checkpoint.untrusted.inert_pickle import (
    InertPickleError,
    Instance,
    PickledName,
    Table,
    parse_pickle,
)
from torchtitan_lite.checkpoint.untrusted.stock_item import (
    TABLE,
    Layout,
    Read,
    StockEntry,
    content,
    content_start,
    described_tensor,
    directory,
    item_reader,
)
from torchtitan_lite.disk.plain_file import opened_plain_file
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable, CheckpointUnsafe

_MOST_DIRECTORY_BYTES = 64 << 20
_MOST_PICKLE_BYTES = 64 << 20
_ARCHIVE = b"PK\x03\x04"
_BEFORE_1_6 = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""The magic number with which files of PyTorch before 1.6 begin."""

_PARAMETER = PickledName("_rebuild_parameter")
_MAPPINGS = ("OrderedDict", "defaultdict")
_HARMLESS = (
    *(("collections", "defaultdict"), ("collections", "Counter"), ("torch", "Size"), ("torch", "device")),
    *(("argparse", "Namespace"), ("pathlib", "PosixPath"), ("pathlib", "Path"), ("datetime", "datetime")),
    *(("_codecs", "encode"), ("__builtin__", "set"), ("builtins", "set"), ("numpy", "dtype"), ("numpy", "ndarray")),
    *(("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar"), ("builtins", "complex")),
    *(("__builtin__", name) for name in ("int", "long", "float", "str", "bool", "dict", "list")),
    *(("builtins", name) for name in ("int", "float", "str", "bool", "dict", "list")),
)
"""What trainers save next to weights: settings, counters, times. It stays inert, and is not used."""
_KNOWN: dict[tuple[str, str], object] = {
    **TABLE,
    ("torch._utils", "_rebuild_parameter"): _PARAMETER,
    **{name: PickledName(name[1]) for name in _HARMLESS},
}


class SavedFile:
    """The value in the file of `torch.save` at `path`: `root`, inert. `mapping` and `layout` look into it."""

    def __init__(self, path: Path, table: Table | None = None) -> None:
        """Read the description, in which names of `table` may occur, by default those that weights need.

        Raises `CheckpointUnsafe`, `CheckpointDamaged`, `CheckpointUnreadable` and OSError.
        """
        self.path = path
        with opened_plain_file(path.resolve()) as fd:
            self._num_bytes = os.fstat(fd).st_size
            read = item_reader(fd, Item(path.name, 0, self._num_bytes))
            self._refuse_other_formats(read)
            try:
                self._entries = directory(read, self._num_bytes, _MOST_DIRECTORY_BYTES)
                self._folder = self._folder_in_archive(read)
                pickled = content(read, self._entries[f"{self._folder}data.pkl"], _MOST_PICKLE_BYTES)
                self._starts = {
                    name.rpartition("/")[2]: (content_start(read, entry), entry)
                    for name, entry in self._entries.items()
                    if name.startswith(f"{self._folder}data/")
                }
            except (IndexError, UnicodeDecodeError, ValueError, struct.error) as error:
                raise CheckpointDamaged(
                    str(path), f"it is not a complete file of torch.save ({error!s:.100}). Download or copy it again"
                ) from None
        try:
            self.root = parse_pickle(pickled, _KNOWN if table is None else table)
        except InertPickleError as error:
            raise CheckpointUnsafe(
                str(path), f"{error!s:.300}. A file of weights alone is made by torch.save(model.state_dict(), FILE)"
            ) from None

    def mapping(self, value: Any) -> Mapping[str, Any] | None:
        """Return the entries of `value` if it is a dict or another mapping with names as keys; else None."""
        if type(value) is Instance and value.kind.name in _MAPPINGS:
            value = value.members or {}
        return value if type(value) is dict and all(type(key) is str for key in value) else None

    def layout(self, value: Any) -> Layout | None:
        """Return the place of the tensor `value`, None if it is no plain tensor. Raises `CheckpointDamaged`."""
        if type(value) is Instance and value.kind is _PARAMETER and value.args:
            value = value.args[0]
        try:
            described = described_tensor(value)
        except (TypeError, KeyError, ValueError):
            described = None
        if described is None:
            return None
        dtype, key, first, shape, strides = described
        if key not in self._starts or len(shape) != len(strides):
            raise CheckpointDamaged(str(self.path), f"its storage {key!r:.50} is missing, or not that of a tensor")
        begin, entry = self._starts[key]
        last = first + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if 0 not in shape else -1
        end = begin + entry.num_bytes
        if (last + 1) * dtype.itemsize > entry.num_bytes or end > self._num_bytes:
            raise CheckpointDamaged(
                str(self.path),
                f"a tensor of shape {list(shape)} reaches beyond its storage, or the file is cut off. "
                "Download or copy it again",
            )
        return Layout(begin + first * dtype.itemsize, dtype, shape, strides)

    def _refuse_other_formats(self, read: Read) -> None:
        head = read(0, len(_BEFORE_1_6))
        if head == _BEFORE_1_6:
            new = self.path.with_name(f"{self.path.stem}-new.pt")
            raise CheckpointUnreadable(
                str(self.path),
                "it has the form of PyTorch before 1.6. Save it again, in Python: "
                f"torch.save(torch.load({str(self.path)!r}, weights_only=True), {str(new)!r}), and name that file",
            )
        if not head.startswith(_ARCHIVE):
            raise CheckpointUnreadable(
                str(self.path), "it is not a file of torch.save: it does not begin as a zip archive"
            )

    def _folder_in_archive(self, read: Read) -> str:
        pickled = [name for name in self._entries if name.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError("there is no description in it")
        folder = pickled[0].removesuffix("data.pkl")
        if f"{folder}constants.pkl" in self._entries:
            raise CheckpointUnreadable(
                str(self.path), "it is a TorchScript program: save its state_dict() with torch.save instead"
            )
        order: StockEntry | None = self._entries.get(f"{folder}byteorder")
        if sys.byteorder != "little" or (order is not None and content(read, order) != b"little"):
            raise CheckpointUnreadable(str(self.path), "its numbers are big-endian: save it on this machine")
        return folder
