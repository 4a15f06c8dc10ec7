"""The contents of a checkpoint: its tensors and objects, and their places in its files. Without torch.

`Contents` is made from our manifest's tables or from DCP's metadata, and readers do not see which. `check`
refuses contents that the files cannot hold, before any memory is allocated for them: after it, the chunks
of every tensor cover it exactly once and lie inside the folder's own files, and all tensors together are
no larger than these files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.containers import Containers
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.format.structure import Branch, Path, decode, paths_of
from torchtitan_lite.disk.plain_file import is_plain_name
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.manifest_fields import bare, shown

Shape = tuple[int, ...]

_INT64 = 1 << 63
_MOST_CORNERS = 1 << 24
"""Of the chunks of one tensor that are not cut as a grid. Those of 1,000 ranks over 5 dimensions have 32,000."""


class Item(NamedTuple):
    """The bytes of one `torch.save` within a file."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A stored piece of a tensor: the box of `sizes` at `offsets`."""

    file: str
    at: int | None
    """The byte in `file` where its elements start, row-major; None if only parsing `item` finds it."""
    offsets: Shape
    sizes: Shape
    item: Item | None = None
    """The `torch.save` item that holds it, if a reader must parse that to find the elements."""

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.sizes)


class StoredTensor(NamedTuple):
    """A whole tensor, stored in chunks."""

    dtype: Any
    """A value of the table that the contents were made with: a `Dtype`, or torch's where tensors are loaded."""
    shape: Shape
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        """The size of its elements in bytes."""
        num_bytes: int = math.prod(self.shape) * self.dtype.itemsize
        return num_bytes


class StoredObject(NamedTuple):
    """A small object: its `value`, or the `item` that holds it."""

    value: Any = None
    item: Item | None = None


@dataclass(frozen=True)
class Contents:
    """All keys of the checkpoint at `path`."""

    path: str
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The path of each flat key in the nested state dict; DCP calls this the planner data."""
    structure: Branch | None = None
    """The containers of the nested state; None if the checkpoint has only `paths`."""
    described_in: str = layout.MANIFEST
    """The file that these contents were read from, for error messages."""

    def container(self, name: str) -> Branch | None:
        """Return the container of the nested state with this flat name; None if there is none or `structure` is."""
        return None if self._containers is None else self._containers.find(name)

    @cached_property
    def _containers(self) -> Containers | None:
        return None if self.structure is None else Containers(self.structure)

    @classmethod
    def of_manifest(cls, manifest: Manifest, path: str, dtypes: Mapping[str, Any] = DTYPES) -> Contents:
        """Return the contents that the tables in `manifest` describe, with the values of `dtypes`.

        Raises `CheckpointDamaged` for malformed tables.
        """
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, StoredObject] = {}
        paths: dict[str, Path] = {}
        key = ""
        try:
            for key, entry in manifest.tensors.items():
                tensors[key] = _tensor(entry, dtypes)
            for key, entry in manifest.objects.items():
                objects[key] = _object(entry)
            if "root" in manifest.structure:
                return cls(path, tensors, objects, *_structure(manifest.structure["root"], tensors, objects, path))
            for key, entry in (*manifest.tensors.items(), *manifest.objects.items()):
                paths[key] = _path(entry["path"])
        except CheckpointDamaged:
            raise
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            finding = f"{layout.MANIFEST}: the entry of {bare(key)} ({type(error).__name__}: {error!s:.200})"
            raise CheckpointDamaged(path, finding) from None
        return cls(path, tensors, objects, paths)

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.objects

    def __contains__(self, key: object) -> bool:
        return key in self.tensors or key in self.objects

    @cached_property
    def files(self) -> frozenset[str]:
        """The names of all files that hold a tensor or an object."""
        chunks = (chunk for tensor in self.tensors.values() for chunk in tensor.chunks)
        in_tensors = {chunk.file if chunk.item is None else chunk.item.file for chunk in chunks}
        return frozenset(in_tensors | {stored.item.file for stored in self.objects.values() if stored.item is not None})

    def check_names(self) -> None:
        """Raise `CheckpointUnsafe` for a file name that could lead out of the folder."""
        for file in self.files:
            if not is_plain_name(file):
                raise CheckpointUnsafe(self.path, f"{self.described_in}: {shown(file)} is not the name of a file in it")

    def check(self, files: Mapping[str, int]) -> None:
        """Raise `CheckpointDamaged` unless `files` can hold all of it and chunks cover every tensor exactly once.

        `files` maps names to sizes in bytes. Call `check_names` before.
        """
        for key, tensor in self.tensors.items():
            finding = _misfit(tensor)
            if finding:
                raise CheckpointDamaged(self.path, f"{self.described_in}: {bare(key)}: {finding}")
        for file, begin, num_bytes, key in self._ranges():
            if file not in files:
                finding = f"{bare(file)} is missing; {bare(key)} is in it, says {self.described_in}"
                raise CheckpointDamaged(self.path, finding)
            # An empty range may begin anywhere: no byte of it is read.
            end = begin + num_bytes
            if begin < 0 or num_bytes < 0 or (num_bytes and end > files[file]):
                finding = f"{bare(file)} has {files[file]} bytes; {bare(key)} is in bytes {begin} to {end} of it"
                raise CheckpointDamaged(self.path, finding)
        whole = sum(tensor.nbytes for tensor in self.tensors.values())
        if whole > sum(files.values()):
            finding = f"{self.described_in}: tensors of {whole} bytes cannot be in files of {sum(files.values())}"
            raise CheckpointDamaged(self.path, finding)

    def keys_in(self, file: str, begin: float, end: float) -> list[str]:
        """Return the keys with bytes in [begin, end) of `file`, in the order of the contents."""
        ranges = self._ranges()
        return list(dict.fromkeys(key for name, at, n, key in ranges if name == file and at < end and begin < at + n))

    def _ranges(self) -> Iterator[tuple[str, int, int, str]]:
        """Yield (file, first byte, number of bytes, key) of everything that lies in a file."""
        for key, tensor in self.tensors.items():
            itemsize = tensor.dtype.itemsize
            for chunk in tensor.chunks:
                if chunk.item is not None:
                    yield *chunk.item, key
                elif chunk.at is not None:
                    yield chunk.file, chunk.at, math.prod(chunk.sizes) * itemsize, key
        for key, stored in self.objects.items():
            if stored.item is not None:
                yield *stored.item, key


def _tensor(entry: Mapping[str, Any], dtypes: Mapping[str, Any]) -> StoredTensor:
    dtype, shape, chunks = _dtype(entry["dtype"], dtypes), _ints(entry["shape"]), _list(entry["chunks"])
    return StoredTensor(dtype, shape, [_chunk(shape, entry["shape"], *chunk) for chunk in chunks])


def _chunk(shape: Shape, shape_in_json: Any, file: Any, at: Any, offsets: Any, sizes: Any) -> Chunk:
    if type(file) is not str or type(at) is not int:
        raise ValueError("expected a chunk of [file, at, offsets, sizes]")
    # Most tensors are one chunk; thousands of them share the two tuples.
    is_whole = sizes == shape_in_json and offsets == [0] * len(shape)
    return Chunk(file, at, _zeros(len(shape)), shape) if is_whole else Chunk(file, at, _ints(offsets), _ints(sizes))


@cache
def _zeros(num_dims: int) -> Shape:
    return (0,) * num_dims


def _object(entry: Mapping[str, Any]) -> StoredObject:
    if "item" not in entry:
        return StoredObject(plain_value.decode(entry["value"]))
    file, offset, length = _list(entry["item"])
    if (type(file), type(offset), type(length)) != (str, int, int):
        raise ValueError("expected an item of [file, offset, length]")
    return StoredObject(item=Item(file, offset, length))


def _structure(
    document: Any, tensors: Mapping[str, StoredTensor], objects: Mapping[str, StoredObject], path: str
) -> tuple[dict[str, Path], Branch]:
    """Return the paths through the containers in `document` to all `tensors` and `objects`, and the containers."""
    try:
        structure = decode(document)
        paths = paths_of(structure, expected={*tensors, *objects})
        if len(paths) < len(tensors) + len(objects):
            missing = {*tensors, *objects} - paths.keys() or tensors.keys() & objects.keys()
            raise ValueError(f"it does not have {min(missing)!r} exactly once")
    except ValueError as error:
        raise CheckpointDamaged(path, f"{layout.MANIFEST}: the structure of the state: {error}") from None
    return paths, structure


def _dtype(name: Any, dtypes: Mapping[str, Any]) -> Any:
    if type(name) is not str or name not in dtypes:
        raise ValueError("expected the name of a dtype")
    return dtypes[name]


def _path(value: Any) -> Path:
    if not _list(value) or not {*map(type, value)} <= {str, int}:
        raise ValueError("expected a path of names and numbers")
    return tuple(value)


def _ints(value: Any) -> Shape:
    return _shape(tuple(_list(value)))


@lru_cache(maxsize=4096)
def _shape(value: tuple[Any, ...]) -> Shape:
    """Return `value` if it is whole numbers. Cached: a checkpoint has thousands of tensors of the same few shapes."""
    if not {*map(type, value)} <= {int}:
        raise ValueError("expected whole numbers")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return value


def _misfit(tensor: StoredTensor) -> str:
    """Return why the chunks of `tensor` do not make up the tensor; the empty string if they do."""
    shape, chunks = tensor.shape, tensor.chunks
    # torch computes the strides of an empty tensor from its other sizes, so these must not overflow either.
    if not _is_possible(shape, tensor.dtype.itemsize):
        return "its shape is not possible for a tensor"
    if len(chunks) == 1 and chunks[0].sizes == shape and not any(chunks[0].offsets):
        return "" if len(chunks[0].offsets) == len(shape) else "a chunk has another number of dimensions"
    boxes = []
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return "a chunk has another number of dimensions"
        if min(chunk.sizes, default=0) < 0 or min(chunk.offsets, default=0) < 0:
            return "a chunk has a negative offset or size"
        if 0 in chunk.sizes:
            continue
        if any(offset + size > end for offset, size, end in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return "a chunk is partly outside of it"
        boxes.append(chunk)
    covered, numel = sum(chunk.numel for chunk in boxes), math.prod(shape)
    if covered == numel and (_is_grid(boxes) or _is_tiling(boxes, shape)):
        return ""
    return f"its chunks have {covered} elements where there are {numel}" if covered != numel else "its chunks overlap"


@lru_cache(maxsize=4096)
def _is_possible(shape: Shape, itemsize: int) -> bool:
    """Return whether a tensor can have this shape: its strides, and its size in bytes, are numbers of 64 bits."""
    return min(shape, default=0) >= 0 and math.prod(max(size, 1) for size in shape) * itemsize < _INT64


def _is_grid(boxes: Sequence[Chunk]) -> bool:
    """Return whether the boxes, all inside the tensor, are distinct cells of one grid; such boxes do not overlap."""
    if len({box.offsets for box in boxes}) < len(boxes):
        return False
    for dim in range(len(boxes[0].offsets) if boxes else 0):
        extents = sorted({(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box in boxes})
        if any(end > begin for (_, end), (begin, _) in pairwise(extents)):
            return False
    return True


def _is_tiling(boxes: Sequence[Chunk], shape: Shape) -> bool:
    """Return whether the boxes, none of them empty, cover a tensor of `shape` exactly once.

    The number of boxes around a point is a function, and so is the 1 of the whole tensor. The two are equal if and only
    if their mixed differences are: 1 or -1 at each corner of a box, in turn along each edge, summed over all boxes.
    Also returns False where boxes are cut along so many dimensions that their corners cannot be counted.
    """
    # Along the other dimensions every box is as long as the tensor, and the corners are the same.
    cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]
    if len(boxes) << len(cut) > _MOST_CORNERS:
        return False
    sums: defaultdict[tuple[int, ...], int] = defaultdict(int)
    whole = Chunk("", None, (0,) * len(shape), shape)
    for box, count in (*((box, 1) for box in boxes), (whole, -1)):
        corners: list[tuple[tuple[int, ...], int]] = [((), count)]
        for dim in cut:
            begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
            corners = [corner for at, sign in corners for corner in (((*at, begin), sign), ((*at, end), -sign))]
        for at, sign in corners:
            sums[at] += sign
    return not any(sums.values())
