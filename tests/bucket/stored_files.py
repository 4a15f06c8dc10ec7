"""Checkpoints on a disk that have files of any size, to be uploaded, and what an object store has of uploads."""

from __future__ import annotations

import os
from pathlib import Path

from tests.store.filled import manifest_of
from torchtitan_lite.bucket.s3_parts import s3_parts_at
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.block_writer import in_memory
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.store import CheckpointStore


def written(folder: Path, num_bytes: int, step: int = 1) -> CheckpointStore:
    """Return a folder on disk with a checkpoint that has one file of `num_bytes`, and a small one."""
    store, block = CheckpointStore(folder), os.urandom(1 << 20)
    place = store.begin(step)
    data = (block * (num_bytes // len(block) + 1))[:num_bytes]
    files = {name: store.new_file(place, name).write(in_memory(content)) for name, content in _contents(data).items()}
    store.add_metadata(place, b"no pickle")
    store.commit(step, manifest_of(step, files=files, lineage=Lineage("run0")), place=place)
    return store


def _contents(data: bytes) -> dict[str, bytes]:
    return {layout.data_file(0, 0): data, layout.data_file(1, 0): b"small"}


def uploads_under_way(folder: str) -> list[str]:
    """Return the keys of the uploads below the address `folder` that are not complete."""
    parts, address = s3_parts_at(folder), parse_address(folder)
    assert parts is not None
    found = parts._client.list_multipart_uploads(Bucket=address.bucket, Prefix=f"{address.prefix}/")
    return [each["Key"] for each in found.get("Uploads", ())]
