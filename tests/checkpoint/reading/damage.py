"""What a disk may do to a file of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from torchtitan_lite.store.manifest import Manifest


def flip(path: Path, at: int = -1) -> None:
    """One bit of the file is another."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def in_tensor(folder: Path, key: str) -> int:
    """A byte of the file of tensors that is the tensor's."""
    manifest = Manifest.of_folder(folder)
    assert manifest is not None
    at: int = manifest.tensors[key]["chunks"][0][1]
    return at
