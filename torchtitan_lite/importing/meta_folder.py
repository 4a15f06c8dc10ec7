"""Meta's own layout of Llama: params.json, and consolidated.00.pth to .NN.pth.

Each of several files has a part of every large tensor: some rows, or some columns, and all of the small ones. Which it
is shows in the shapes, so the embeddings of Llama 2 (cut by columns) and of Llama 3 (cut by rows) are both joined.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format.contents import Chunk, Contents, Shape, StoredTensor
from torchtitan_lite.checkpoint.untrusted.stock_item import Layout
from torchtitan_lite.errors import CheckpointDamaged, ConfigError, reading
from torchtitan_lite.importing.weights_source import WeightsSource, is_strided, read_json, tensors_in_file
from torchtitan_lite.log import counted

PARAMS = "params.json"
KIND = "Meta's Llama"
_PART = re.compile(r"consolidated\.(\d{2,3})\.pth")


class MetaFolder(NamedTuple):
    """The files of one model."""

    path: Path
    params: Mapping[str, Any]
    files: Sequence[Path]
    parts: Sequence[Mapping[str, Layout]]
    """The tensors in each file."""

    @property
    def vocab_size(self) -> int:
        """The rows of `output.weight`, which is always cut by rows; 0 without one."""
        found = [part["output.weight"].shape[0] for part in self.parts if "output.weight" in part]
        return sum(found)


def is_meta_folder(path: Path) -> bool:
    """Return whether `path` is a folder in Meta's layout and in no other that is known."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    has_others = any(name.endswith((".safetensors", ".index.json", "pytorch_model.bin")) for name in names)
    return PARAMS in names and any(map(_PART.fullmatch, names)) and not has_others


def read_meta_folder(path: Path) -> MetaFolder:
    """Return the files in `path`. Raises CheckpointDamaged for a missing one, and as `open_source` does."""
    with reading(path):
        numbers = {int(match[1]): entry for entry in path.iterdir() if (match := _PART.fullmatch(entry.name))}
        missing = [number for number in range(max(numbers)) if number not in numbers]
        if missing:
            raise CheckpointDamaged(str(path), f"consolidated.{missing[0]:02}.pth is missing. Download it")
        files = [numbers[number] for number in sorted(numbers)]
        return MetaFolder(path, read_json(path / PARAMS), files, [tensors_in_file(file)[0] for file in files])


def joined_weights(folder: MetaFolder, shapes: Mapping[str, Shape]) -> WeightsSource:
    """Return the tensors of `folder` as one source, each of the shape in `shapes`, if that has it.

    Raises ConfigError if the parts of a tensor do not make it up.
    """
    tensors: dict[str, StoredTensor] = {}
    strides: dict[str, Shape] = {}
    for name in dict.fromkeys(name for part in folder.parts for name in part):
        places = [part.get(name) for part in folder.parts]
        first = next(place for place in places if place is not None)
        chunks = _chunks(name, folder, places, shapes.get(name, first.shape))
        tensors[name] = StoredTensor(first.dtype, shapes.get(name, first.shape), chunks)
        if any(place is not None and is_strided(place) for place in places):
            if len(chunks) > 1:
                raise ConfigError(f"{folder.path}: {name} is not row-major in its files: save them again")
            strides[name] = first.strides
    contents = Contents(str(folder.path), tensors, {}, described_in=PARAMS)
    contents.check({str(file.resolve()): file.stat().st_size for file in folder.files})
    return WeightsSource(folder.path, KIND, contents, strides, folder.params)


def _chunks(name: str, folder: MetaFolder, places: Sequence[Layout | None], shape: Shape) -> list[Chunk]:
    """Return the chunks that make up the tensor `name` of `shape`: one for all of it, or one of each file."""
    files = [str(file.resolve()) for file in folder.files]
    found = [(file, place) for file, place in zip(files, places, strict=True) if place is not None]
    file, whole = found[0]
    if whole.shape == shape:  # The same in every file.
        return [Chunk(file, whole.at, (0,) * len(shape), shape)]
    for dim in range(len(shape)):
        sizes = [place.shape[dim] if len(place.shape) == len(shape) else 0 for _, place in found]
        others = (*shape[:dim], *shape[dim + 1 :])
        if sum(sizes) == shape[dim] and all((*p.shape[:dim], *p.shape[dim + 1 :]) == others for _, p in found):
            begins = [sum(sizes[:number]) for number in range(len(sizes))]
            return [
                Chunk(each, place.at, (*(0,) * dim, begin, *(0,) * (len(shape) - dim - 1)), place.shape)
                for (each, place), begin in zip(found, begins, strict=True)
            ]
    raise ConfigError(
        f"{folder.path}: {name} has shape {list(whole.shape)} in {counted(len(found), 'file')}, and these do not "
        f"make up the {list(shape)} of {PARAMS}: is a file consolidated.NN.pth missing?"
    )
