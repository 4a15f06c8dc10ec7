"""A folder that transformers wrote: a checkpoint of its Trainer, or a model alone.

Its tensors are those of its safetensors files, and of the folders below that FSDP wrote with DCP. Each pickle is an
object that is a complete file: its size is known, it can be compared as bytes, and it is not parsed. Only names and
descriptions are read. The Trainer writes trainer_state.json last, so a `checkpoint-N` without it is not complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lite.checkpoint.format.contents import Chunk, Contents, Item, StoredObject, StoredTensor
from torchtitan_lite.checkpoint.untrusted.safe_metadata import read_metadata
from torchtitan_lite.checkpoint.untrusted.safetensors_header import read_header
from torchtitan_lite.disk.plain_file import is_plain_name, read_plain
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store import layout
from torchtitan_lite.store.listing import is_folder

SAVED = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files of `torch.save`."""
_TRAINER_STATE = "trainer_state.json"
_INDEX = "model.safetensors.index.json"
_FILES = ("model.safetensors", "adapter_model.safetensors")
_MOST_INDEX_BYTES = 64 << 20
_STEP = re.compile(r"checkpoint-(0|[1-9][0-9]*)")


def step_of(name: str) -> int | None:
    """Return the step of the Trainer's checkpoint called `name`; None for other names."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def description_of(folder: Path) -> Path | None:
    """Return the file that shows that transformers wrote `folder`, the one written last; None if it did not."""
    if os.path.lexists(folder / layout.MANIFEST) or os.path.lexists(folder / layout.METADATA):
        return None
    names = (_TRAINER_STATE, _INDEX, *_FILES)
    # Not pathlib: of a folder that this user cannot read nothing is known.
    return next((folder / name for name in names if os.path.isfile(folder / name)), None)  # noqa: PTH113


def absence_in(folder: Path) -> str:
    """Return why `folder`, which transformers wrote, is no complete checkpoint; the empty string if it may be one."""
    is_step = step_of(folder.absolute().name) is not None
    if is_step and not (folder / _TRAINER_STATE).is_file():
        return f"there is no {_TRAINER_STATE} in it, which transformers writes last"
    return ""


def has_optimizer(contents: Contents) -> bool:
    """Return whether the state of an optimizer is among `contents`."""
    return any(key.startswith("optimizer") for key in contents)


def weights_in(folder: Path) -> dict[str, frozenset[str]]:
    """Return the safetensors files of the model, each with the tensors that its index places there.

    Raises `CheckpointDamaged` for a wrong index, and a missing file; `CheckpointUnsafe` and OSError.
    """
    if not os.path.lexists(folder / _INDEX):
        return {name: frozenset() for name in _FILES if os.path.lexists(folder / name)}
    try:
        places = json.loads(read_plain(folder / _INDEX, _MOST_INDEX_BYTES))["weight_map"]
        files: dict[str, set[str]] = {file: set() for file in sorted(places.values())}
        if not all(map(is_plain_name, files)):
            raise ValueError("a name in it is not that of a file")
        for key, file in places.items():
            files[file].add(key)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(str(folder), f"{_INDEX}: it is no map of tensors to files: {error!s:.200}") from None
    if missing := [file for file in files if not os.path.lexists(folder / file)]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointDamaged(
            str(folder), f"{_INDEX}: of its {len(files)} files, these are missing: {', '.join(missing[:3])}{more}"
        )
    return {file: frozenset(keys) for file, keys in files.items()}


def contents_in(folder: Path) -> Contents:
    """Return what is in `folder`, unchecked. Raises `CheckpointDamaged`, `CheckpointUnsafe` and OSError."""
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    for name, expected in weights_in(folder).items():
        try:
            held = read_header(folder / name)
        except CheckpointDamaged as error:
            raise CheckpointDamaged(str(folder), f"{name}: {error.finding}") from None
        if lost := expected - held.keys():
            raise CheckpointDamaged(str(folder), f"{name}: {min(lost)[:100]} is not in it, but {_INDEX} says so")
        if twice := held.keys() & tensors.keys():
            raise CheckpointDamaged(str(folder), f"{name}: {min(twice)[:100]} is in another file, too")
        for key, place in held.items():
            chunk = Chunk(name, place.at, (0,) * len(place.shape), place.shape)
            tensors[key] = StoredTensor(place.dtype, place.shape, [chunk])
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.endswith(SAVED) and entry.is_file(follow_symlinks=False):
            item = Item(entry.name, 0, entry.stat(follow_symlinks=False).st_size)
            objects[entry.name] = StoredObject(item=item, is_file=True)
        elif is_folder(Path(entry)) and (Path(entry) / layout.METADATA).is_file():
            below = _in_folder(entry.name, read_metadata(Path(entry)))
            if twice := (tensors.keys() | objects.keys()) & {*below}:
                raise CheckpointDamaged(str(folder), f"{min(twice)[:100]} is in {entry.name} and elsewhere")
            tensors |= below.tensors
            objects |= below.objects
    return Contents(str(folder), tensors, objects, described_in="its files", has_folders=True)


def _in_folder(name: str, contents: Contents) -> Contents:
    """Return `contents`, of the folder `name` below, with the paths of its files."""

    def moved(item: Item) -> Item:
        return Item(f"{name}/{item.file}", item.offset, item.length)

    def chunks(tensor: StoredTensor) -> Iterator[Chunk]:
        for chunk in tensor.chunks:
            assert chunk.item is not None, "DCP stores items"
            yield chunk._replace(file=f"{name}/{chunk.file}", item=moved(chunk.item))

    contents.check_names()
    return dataclasses.replace(
        contents,
        tensors={key: tensor._replace(chunks=list(chunks(tensor))) for key, tensor in contents.tensors.items()},
        objects={
            key: stored if stored.item is None else StoredObject(item=moved(stored.item))
            for key, stored in contents.objects.items()
        },
    )
