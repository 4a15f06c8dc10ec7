"""Small objects out of `torch.save` items.

`torch.load(weights_only=True)` runs none of a pickle's code, but calls what it knows with whatever
numbers it is told: a buffer of a terabyte, out of an item of 100 bytes. So an item is looked through
before it is loaded: nothing in it is compressed, and nothing makes more than the item holds.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from typing import Any

import torch

from torchtitan_lite.checkpoint.inert_pickle import InertPickleError, Kind, parse


class UnsafeItem(ValueError):
    """The item is not one that `torch.save` makes of plain objects and tensors."""


class _Anything(dict[tuple[str, str], object]):
    """A table in which every name is a `Kind`: what may be called, `torch.load` knows."""

    def __missing__(self, name: tuple[str, str]) -> Kind:
        return Kind(".".join(name))


def load_item(data: bytes) -> Any:
    """What was saved into `data`. Raises `UnsafeItem` if that cannot be told without running or trusting it."""
    try:
        _look_through(data)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except UnsafeItem:
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeItem(_told_by_torch(error)) from None
    except MemoryError:
        raise
    except Exception as error:
        raise UnsafeItem(f"{type(error).__name__}: {error}") from None


def _look_through(data: bytes) -> None:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise UnsafeItem("an entry is compressed")
        if sum(entry.file_size for entry in entries) > len(data):
            raise UnsafeItem("its entries are larger than the item")
        pickles = [entry.filename for entry in entries if entry.filename.endswith(".pkl")]
        for name in pickles:
            parse(archive.read(name), _Anything(), _judge)


def _judge(kind: Kind, args: tuple[Any, ...]) -> None:
    makes_room = kind.name in ("builtins.bytearray", "__builtin__.bytearray") and any(type(arg) is int for arg in args)
    if makes_room or (kind.name.startswith("torch.") and kind.name.endswith(("Tensor", "Storage"))):
        raise InertPickleError(f"it makes a {kind.name} of a size of its own")


def _told_by_torch(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if "Unsupported" in line or "not an allowed" in line]
    return (lines or str(error).splitlines() or [type(error).__name__])[0]
