"""Checkpoints of other libraries: a folder that transformers or accelerate wrote, and what Lightning wrote.

The former is a checkpoint of the Trainer, of `save_state`, or a model alone. Its tensors are those of its safetensors
files, and of the folders below that FSDP wrote with DCP. Each pickle is an object that is a complete file: its size is
known, it can be compared as bytes, and it is not parsed. Only names and descriptions are read. The Trainer writes
trainer_state.json last, and accelerate the states of the generators, so a `checkpoint-N` or `checkpoint_N` without
either is not complete.
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
from torchtitan_lite.log import listed
from torchtitan_lite.store import layout
from torchtitan_lite.store.layout import is_folder

SAVED = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
"""Suffixes of files of `torch.save`."""
TRAINER_STATE = "trainer_state.json"
GENERATORS = "random_states_0.pkl"
_INDEX = "model.safetensors.index.json"
_FILES = ("model.safetensors", "adapter_model.safetensors")
_MOST_INDEX_BYTES = 64 << 20
_STEP = re.compile(r"checkpoint[-_](0|[1-9][0-9]*)")
WEIGHTS = re.compile(r".*\.safetensors|(pytorch_model|adapter_model).*\.bin")
"""Names of files with weights."""
_SHARD = re.compile(r"(.+)-[0-9]+-of-[0-9]+(\.safetensors|\.bin)")


def transformers_step_of(name: str) -> int | None:
    """Return the step of the checkpoint called `name`, or its number as accelerate counts; None for other names."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def description_of(folder: Path) -> Path | None:
    """Return the file that shows that one of the two wrote `folder`, the one written last; None if neither did."""
    if os.path.lexists(folder / layout.MANIFEST) or os.path.lexists(folder / layout.METADATA):
        return None
    names = (TRAINER_STATE, GENERATORS, _INDEX, *_FILES)
    # Not pathlib: of a folder that this user cannot read nothing is known.
    return next((folder / name for name in names if os.path.isfile(folder / name)), None)  # noqa: PTH113


def absence_in(folder: Path) -> str:
    """Return why `folder`, with the name of a step, is no complete checkpoint; the empty string if it may be one."""
    name = folder.absolute().name
    if transformers_step_of(name) is None:
        return ""
    if not (folder / TRAINER_STATE).is_file() and not (folder / GENERATORS).is_file():
        last, library = (GENERATORS, "accelerate") if "_" in name else (TRAINER_STATE, "transformers")
        return f"there is no {last} in it, which {library} writes last"
    paths = [*folder.iterdir()]
    below = [path for path in paths if is_folder(path)]
    for path in below:
        names = {each.name for each in path.iterdir()}
        if layout.METADATA not in names and any(map(layout.is_data_file, names)):
            return f"there are files of tensors in {path.name}, but no {layout.METADATA}"
    indexes = {f"{shard[1]}{shard[2]}.index.json" for path in paths if (shard := _SHARD.fullmatch(path.name))}
    if missing := sorted(indexes - {path.name for path in paths}):
        return f"there is no {missing[0]} in it"
    # A folder below may have them in a form that is not known here.
    has_weights = below or any(WEIGHTS.fullmatch(path.name) for path in paths)
    return "" if has_weights else "there are no weights in it"


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
        finding = f"{_INDEX}: of its {len(files)} files, these are missing: {listed(missing)}"
        raise CheckpointDamaged(str(folder), finding)
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


# A checkpoint that Lightning wrote, called NAME.ckpt: one file of `torch.save`, or a folder of DCP with a meta.pt.
#
# The file is a pickle, which is not parsed: its size is known, its entries have checksums, and its bytes can be
# compared.


_SUFFIX = ".ckpt"
META = "meta.pt"
"""Of a folder: what is in a file but the tensors."""
_NAMED_STEP = re.compile(r"(?:^|\W)step=(0|[1-9][0-9]*)(?:\W|$)")


def is_lightning_file(path: Path) -> bool:
    """Return whether `path` is a checkpoint in one file; a link to one is none."""
    return path.suffix == _SUFFIX and path.is_file() and not path.is_symlink()


def is_lightning_folder(folder: Path) -> bool:
    """Return whether `folder` is a checkpoint that Lightning wrote with DCP."""
    if folder.suffix != _SUFFIX or not is_folder(folder):
        return False
    # Not pathlib: of a folder that this user cannot read nothing is known.
    return all(os.path.isfile(folder / name) for name in (META, layout.METADATA))  # noqa: PTH113


def is_half_written(folder: Path) -> bool:
    """Return whether `folder` is named like a checkpoint of Lightning and has a part of one of DCP."""
    if folder.suffix != _SUFFIX or os.path.lexists(folder / layout.METADATA):
        return False
    return any(layout.is_data_file(path.name) for path in folder.iterdir())


def lightning_step_of(name: str) -> int | None:
    """Return the step in `name`, as in epoch=0-step=10.ckpt; None if it has none."""
    match = _NAMED_STEP.search(name.removesuffix(_SUFFIX))
    return int(match[1]) if match else None


def contents_of(path: Path) -> Contents:
    """Return the contents of the file `path`, one object that is all of it; they name its folder. Raises OSError."""
    stored = StoredObject(item=Item(path.name, 0, path.lstat().st_size), is_file=True)
    return Contents(str(path.parent), {}, {"checkpoint": stored}, described_in=path.name)
