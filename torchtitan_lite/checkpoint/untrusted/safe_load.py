"""Load small objects from `torch.save` items that may be hostile.

`torch.load(weights_only=True)` runs no code from a pickle, but calls the functions that it allows with any
numbers that the pickle has: an item of 100 bytes can allocate a terabyte. So `load_item` inspects an item
first: no entry is compressed, and nothing allocates more than the item holds. torchtitan's first
checkpoints have `BytesIO` objects, which torch refuses to load in this mode; they are built here.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch

from torchtitan_lite.checkpoint.format.plain_value import decode_value
from torchtitan_lite.checkpoint.untrusted.inert_pickle import (
    AnyName,
    InertPickleError,
    Instance,
    PickledName,
    parse_pickle,
)


class UnsafeItem(ValueError):
    """The item is not one that `torch.save` makes of plain objects and tensors."""


def load_item(data: bytes, *, is_typed: bool = False) -> Any:
    """Return the object in the item `data`, which `is_typed` if it holds the document of `plain_value`.

    Raises `UnsafeItem` if loading it would mean running or trusting it.
    """
    try:
        parsed = _inspect(data)
        if len(parsed) == 1 and (held := _bytes_held(parsed[0])) is not None:
            return io.BytesIO(held)
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return decode_value(value) if is_typed else value
    except UnsafeItem:
        raise
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines()
        reasons = [line.strip() for line in lines if "Unsupported" in line or "not an allowed" in line]
        raise UnsafeItem((reasons or lines or [type(error).__name__])[0]) from None
    except MemoryError:
        raise
    except Exception as error:
        raise UnsafeItem(f"{type(error).__name__}: {error}") from None


def _inspect(data: bytes) -> list[Any]:
    """Return the pickles of the item as inert values. Raises `UnsafeItem` if it would load to more than its size."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        # A compressed entry may be a thousand times as large as the item.
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise UnsafeItem("an entry is compressed")
        if sum(entry.file_size for entry in entries) > len(data):
            raise UnsafeItem("its entries are larger than the item")
        pickles = [entry.filename for entry in entries if entry.filename.endswith(".pkl")]
        return [parse_pickle(archive.read(name), AnyName(), _judge) for name in pickles]


def _bytes_held(value: Any) -> bytes | None:
    """Return the content of the `BytesIO` that `value` describes; None if `value` describes anything else."""
    if type(value) is not Instance or value.kind.name != "_io.BytesIO" or value.args or type(value.state) is not tuple:
        return None
    content = value.state[0] if value.state else None
    # Protocol 2 has no bytes: pickle writes them as a string with one character for each byte.
    if type(content) is not Instance or content.kind.name != "_codecs.encode" or len(content.args) != 2:
        return None
    text, encoding = content.args
    return text.encode("latin1") if type(text) is str and encoding == "latin1" else None


def _judge(kind: PickledName, args: tuple[Any, ...]) -> None:
    makes_room = kind.name in ("builtins.bytearray", "__builtin__.bytearray") and any(type(arg) is int for arg in args)
    if makes_room or (kind.name.startswith("torch.") and kind.name.endswith(("Tensor", "Storage"))):
        raise InertPickleError(f"it allocates a {kind.name} of any size")
