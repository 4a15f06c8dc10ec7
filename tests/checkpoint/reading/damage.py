"""Damage a file of a checkpoint as a disk may."""

from __future__ import annotations

from pathlib import Path

from torchtitan_lite.store.manifest import Manifest


def flip(path: Path, at: int = -1) -> None:
    """Flip one bit of the file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def in_tensor(folder: Path, key: str) -> int:
    """Return a byte of the data file that belongs to the tensor `key`."""
    manifest = Manifest.of_folder(folder)
    assert manifest is not None
    at: int = manifest.tensors[key]["chunks"][0][1]
    return at
