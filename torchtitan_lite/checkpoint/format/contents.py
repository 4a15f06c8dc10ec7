"""What a checkpoint holds, and where in its files.

From our manifest's table or from DCP's metadata, whichever there is; from then on the two are alike.
`check` refuses a table that its files cannot bear out, before a byte of memory is taken for what it
describes: after it, every tensor is covered exactly once, by ranges that lie within the folder's own
files, and all tensors together are no larger than those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_lite.checkpoint.format.structure import Branch, Path, decode, paths_of
from torchtitan_lite.disk.plain_file import is_plain_name
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe
from torchtitan_lite.store import layout, plain_value
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.manifest_fields import bare, shown

Shape = tuple[int, ...]

_INT64 = 1 << 63
_DTYPE_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
"""By name, the dtypes whose elements are whole bytes and need nothing else to be understood."""


class Item(NamedTuple):
    """The bytes of one `torch.save` within a file."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A stored piece of a tensor: the box of `sizes` at `offsets`."""

    file: str
    at: int | None
    """The byte in `file` where its elements start, row-major; None: where `item` says."""
    offsets: Shape
    sizes: Shape
    item: Item | None = None
    """What holds it, if that must be parsed to find its elements."""

    @property
    def numel(self) -> int:
        """Elements in it."""
        return math.prod(self.sizes)


class StoredTensor(NamedTuple):
    """A whole tensor, in chunks."""

    dtype: torch.dtype
    shape: Shape
    chunks: Sequence[Chunk]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredObject(NamedTuple):
    """A small object: `value`, or what `item` holds."""

    value: Any = None
    item: Item | None = None


@dataclass(frozen=True)
class Contents:
    """All keys of the checkpoint at `path`."""

    path: str
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    paths: Mapping[str, Path] = field(default_factory=dict)
    """The keys that lead to each in the nested state dict; DCP's planner data."""
    structure: Branch | None = None
    """The containers of the nested state; None where the checkpoint does not say more than `paths`."""
    described_in: str = layout.MANIFEST
    """The file that says all this."""

    @classmethod
    def of_manifest(cls, manifest: Manifest, path: str) -> Contents:
        """What the table in `manifest` says. Raises `CheckpointDamaged` where it does not say it rightly."""
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, StoredObject] = {}
        paths: dict[str, Path] = {}
        key = ""
        try:
            for key, entry in manifest.tensors.items():
                tensors[key] = _tensor(entry)
            for key, entry in manifest.objects.items():
                objects[key] = _object(entry)
            if "root" in manifest.structure:
                return cls(path, tensors, objects, *_structure(manifest.structure["root"], tensors, objects, path))
            for key, entry in (*manifest.tensors.items(), *manifest.objects.items()):
                paths[key] = _path(entry["path"])
        except CheckpointDamaged:
            raise
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            told = f"{layout.MANIFEST}: the entry of {bare(key)} ({type(error).__name__}: {error!s:.200})"
            raise CheckpointDamaged(path, told) from None
        return cls(path, tensors, objects, paths)

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.objects

    def __contains__(self, key: object) -> bool:
        return key in self.tensors or key in self.objects

    def files(self) -> set[str]:
        """The names of all files that something lies in."""
        return {file for file, *_ in self._ranges()}

    def check_names(self) -> None:
        """Raise `CheckpointUnsafe` for the name of a file that could be anywhere else than in the folder."""
        for file in self.files():
            if not is_plain_name(file):
                raise CheckpointUnsafe(self.path, f"{self.described_in}: {shown(file)} is not the name of a file in it")

    def check(self, files: Mapping[str, int]) -> None:
        """Returns if all of it can be in `files` (name to size in bytes) and every tensor is covered exactly once.

        Call `check_names` before. Raises `CheckpointDamaged`.
        """
        for key, tensor in self.tensors.items():
            finding = _misfit(tensor)
            if finding:
                raise CheckpointDamaged(self.path, f"{self.described_in}: {bare(key)}: {finding}")
        for file, begin, num_bytes, key in self._ranges():
            if file not in files:
                told = f"{bare(file)} is missing; {bare(key)} is in it, says {self.described_in}"
                raise CheckpointDamaged(self.path, told)
            # Where nothing is said to lie may be anywhere: nothing is read there.
            if begin < 0 or num_bytes < 0 or (num_bytes and begin + num_bytes > files[file]):
                told = f"{bare(file)} has {files[file]} bytes; {bare(key)} is in bytes {begin} to {begin + num_bytes}"
                raise CheckpointDamaged(self.path, f"{told} of it")
        whole = sum(tensor.nbytes for tensor in self.tensors.values())
        if whole > sum(files.values()):
            told = f"{self.described_in}: tensors of {whole} bytes cannot be in files of {sum(files.values())}"
            raise CheckpointDamaged(self.path, told)

    def to_metadata(self) -> Metadata:
        """The same in DCP's own words."""
        described: dict[str, Any] = {key: BytesStorageMetadata() for key in self.objects}
        where: dict[MetadataIndex, _StorageInfo] = {}
        for key, stored in self.objects.items():
            where[MetadataIndex(key)] = _StorageInfo(*(stored.item or ("", 0, 0)))
        for key, tensor in self.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
            described[key] = TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks
            )
            for index, chunk in enumerate(tensor.chunks):
                nbytes = chunk.numel * tensor.dtype.itemsize
                place = chunk.item or Item(chunk.file, chunk.at or 0, nbytes)
                where[MetadataIndex(key, chunk.offsets, index)] = _StorageInfo(*place)
        return Metadata(described, planner_data=dict(self.paths), storage_data=where, storage_meta=StorageMeta())

    def _ranges(self) -> Iterator[tuple[str, int, int, str]]:
        """(file, first byte, number of bytes, key) of all that lies in a file."""
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


def _tensor(entry: Mapping[str, Any]) -> StoredTensor:
    chunks = [_chunk(*chunk) for chunk in _list(entry["chunks"])]
    return StoredTensor(_dtype(entry["dtype"]), _ints(entry["shape"]), chunks)


def _chunk(file: Any, at: Any, offsets: Any, sizes: Any) -> Chunk:
    if type(file) is not str or type(at) is not int:
        raise ValueError("expected a chunk of [file, at, offsets, sizes]")
    return Chunk(file, at, _ints(offsets), _ints(sizes))


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
    """The containers that `document` says, and the paths through them to all of `tensors` and `objects`."""
    try:
        structure = decode(document)
        paths = paths_of(structure, expected={*tensors, *objects})
        if len(paths) < len(tensors) + len(objects):
            missing = {*tensors, *objects} - paths.keys() or tensors.keys() & objects.keys()
            raise ValueError(f"it does not have {min(missing)!r} once")
    except ValueError as error:
        raise CheckpointDamaged(path, f"{layout.MANIFEST}: the structure of the state: {error}") from None
    return paths, structure


def _dtype(name: Any) -> torch.dtype:
    if type(name) is not str or name not in DTYPES:
        raise ValueError("expected the name of a dtype")
    return DTYPES[name]


def _path(value: Any) -> Path:
    if not _list(value) or not {*map(type, value)} <= {str, int}:
        raise ValueError("expected a path of names and numbers")
    return tuple(value)


def _ints(value: Any) -> Shape:
    if not {*map(type, _list(value))} <= {int}:
        raise ValueError("expected whole numbers")
    return tuple(value)


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return value


def _misfit(tensor: StoredTensor) -> str:
    """How the chunks of `tensor` fail to be its parts; empty if they do not."""
    shape, chunks = tensor.shape, tensor.chunks
    # The strides of an empty tensor are products of its other sizes.
    if min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) * tensor.dtype.itemsize >= _INT64:
        return "its shape is none that a tensor can have"
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
    if covered == numel and (_is_grid(boxes) or not _overlap(boxes)):
        return ""
    return f"its chunks have {covered} elements where there are {numel}" if covered != numel else "its chunks overlap"


def _is_grid(boxes: Sequence[Chunk]) -> bool:
    """Whether the boxes, which are within bounds, are cells of one grid, no cell twice; such boxes do not overlap."""
    if len({box.offsets for box in boxes}) < len(boxes):
        return False
    for dim in range(len(boxes[0].offsets) if boxes else 0):
        extents = sorted({(box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box in boxes})
        if any(end > begin for (_, end), (begin, _) in pairwise(extents)):
            return False
    return True


def _overlap(boxes: Sequence[Chunk]) -> bool:
    """Whether two of the boxes have an element in common."""
    if len(boxes) < 2 or not boxes[0].offsets:
        return len(boxes) > 1
    begins = torch.tensor([box.offsets for box in boxes], device="cpu")
    ends = begins + torch.tensor([box.sizes for box in boxes], device="cpu")
    # Along the dimension with the most borders a box has the fewest others beside it.
    dim = max(range(begins.shape[1]), key=lambda d: len({*begins[:, d].tolist()}))
    order = begins[:, dim].argsort()
    begins, ends = begins[order], ends[order]
    beside = torch.searchsorted(begins[:, dim].contiguous(), ends[:, dim].contiguous()).tolist()
    return any(
        bool(((begins[i + 1 : last] < ends[i]) & (ends[i + 1 : last] > begins[i])).all(dim=1).any())
        for i, last in enumerate(beside)
    )
