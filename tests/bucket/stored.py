"""Complete checkpoints in an object store, made of golden ones without a job, and what a fault does to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.cli.folders import GOLDEN
from tests.disk.sources import bounced
from torchtitan_lite.bucket.bucket_store import BucketStore, open_bucket
from torchtitan_lite.bucket.objects import connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointInfo, Manifest
from torchtitan_lite.store.place import ObjectPlace


@contextmanager
def held(folder: str, timeout_seconds: float = 30.0) -> Iterator[BucketStore]:
    """Yield the store of `folder`, which this process holds in the block."""
    store = open_bucket(folder)
    lease = store.lease("trains", timeout_seconds)
    lease.take()
    try:
        yield store
    finally:
        lease.release()


def add(store: BucketStore, step: int, **changes: Any) -> CheckpointInfo:
    """Save the golden checkpoint as `step`, with these `changes` of its manifest."""
    place, manifest = write(store, step, **changes)
    return store.commit(step, manifest, place=place)


def write(store: BucketStore, step: int, **changes: Any) -> tuple[str, Manifest]:
    """Write the files of the golden checkpoint as a save of `step`; return its place and the manifest to commit."""
    manifest = Manifest.of_folder(GOLDEN)
    assert manifest is not None
    place = store.begin(step)
    for path in sorted(GOLDEN.glob("__*")):
        store.new_file(place, path.name).write(bounced(path.read_bytes()))
    store.add_metadata(place, (GOLDEN / layout.METADATA).read_bytes())
    return place, dataclasses.replace(manifest, step=step, extra=manifest.extra | changes.pop("extra", {}), **changes)


def flip(info: CheckpointInfo, name: str, at: int | None = None) -> None:
    """Flip a bit of the byte `at` of the file `name` of `info`, or of the one in its middle."""
    objects, key = connect(parse_address(_place(info).address)), f"{_place(info).name}/{name}"
    data = bytearray(objects.get(key)[0])
    data[len(data) // 2 if at is None else at] ^= 1
    objects.put(key, bytes(data))


def cut(info: CheckpointInfo, name: str) -> None:
    """Cut the last byte off the file `name` of `info`."""
    objects, key = connect(parse_address(_place(info).address)), f"{_place(info).name}/{name}"
    objects.put(key, objects.get(key)[0][:-1])


def remove(info: CheckpointInfo, name: str) -> None:
    """Delete the file `name` of `info`."""
    connect(parse_address(_place(info).address)).delete([f"{_place(info).name}/{name}"])


def _place(info: CheckpointInfo) -> ObjectPlace:
    assert isinstance(info.path, ObjectPlace)
    return info.path
