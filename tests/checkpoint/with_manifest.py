"""Make a plain DCP checkpoint one of ours: the same files, and a manifest that describes and digests them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.store.filled import manifest_of
from torchtitan_lite.checkpoint.format.plain_value import NotPlain, encode_value
from torchtitan_lite.checkpoint.untrusted.safe_load import load_item
from torchtitan_lite.checkpoint.untrusted.safe_metadata import read_metadata
from torchtitan_lite.checkpoint.untrusted.stock_item import locate
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest, Table


def add_manifest(folder: Path) -> Manifest:
    """Write and return a manifest for `folder`, a checkpoint of row-major tensors that DCP wrote."""
    contents = read_metadata(folder)
    files = {file: (folder / file).read_bytes() for file in contents.files}
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for key, tensor in contents.tensors.items():
        chunks = []
        for chunk in tensor.chunks:
            assert chunk.item is not None
            file, offset, length = chunk.item
            item = files[file][offset : offset + length]
            found = locate(partial(_part, item), length)
            assert found is not None
            chunks.append([file, offset + found.at, list(chunk.offsets), list(chunk.sizes)])
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "shape": list(tensor.shape), "path": _path(contents, key), "chunks": chunks}
    for key, stored in contents.objects.items():
        assert stored.item is not None
        file, offset, length = stored.item
        try:
            value = {"value": encode_value(load_item(files[file][offset : offset + length]))}
        except NotPlain:
            value = {"item": [file, offset, length]}
        objects[key] = {"path": _path(contents, key), **value}
    files[layout.METADATA] = (folder / layout.METADATA).read_bytes()
    return write_manifest(folder, files, tensors, objects)


def write_manifest(
    folder: Path, files: dict[str, bytes], tensors: dict[str, Any], objects: dict[str, Any], structure: Any = None
) -> Manifest:
    """Write and return a manifest with these tables and the digests of `files`."""
    manifest = manifest_of(
        1,
        files={name: FileRecord.of(data) for name, data in files.items()},
        tensors=Table(tensors),
        objects=Table(objects),
        structure=Table({"root": structure} if structure is not None else {}),
    )
    (folder / layout.MANIFEST).write_bytes(manifest.to_json())
    return manifest


def _part(data: bytes, at: int, count: int) -> bytes:
    return data[at : at + count]


def _path(contents: Any, key: str) -> list[Any]:
    return list(contents.paths.get(key, (key,)))


def tensors_at(folder: Path, file: str, place: int) -> set[str]:
    """Return the tensors with an element at this byte of the file."""
    manifest = Manifest.of_folder(folder)
    assert manifest is not None
    found = set()
    for key, entry in manifest.tensors.items():
        itemsize = getattr(torch, entry["dtype"]).itemsize
        for name, at, _, sizes in entry["chunks"]:
            if name == file and at <= place < at + torch.Size(sizes).numel() * itemsize:
                found.add(key)
    return found
