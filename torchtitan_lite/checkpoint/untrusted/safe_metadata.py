"""Read DCP's `.metadata`, which is a pickle, without unpickling it.

No content of the file makes anything run: `inert_pickle` accepts the names of DCP's own metadata classes, as
torch 2.2 and later write them, and refuses all others; the functions here check the content of these
classes field by field. Any other file raises `CheckpointUnsafe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.format.contents import Chunk, Contents, Item, StoredObject, StoredTensor
from torchtitan_lite.checkpoint.format.dtypes import DTYPES, Dtype
from torchtitan_lite.checkpoint.untrusted.inert_pickle import InertPickleError, Instance, PickledName, parse_pickle
from torchtitan_lite.errors import CheckpointUnreadable, CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.described import read_description

_ENDING = b"."
"""The last byte of every pickle."""

_DCP = ".".join(("torch", "distributed", "checkpoint", "metadata"))
_SHARDED = ".".join(("torch", "distributed", "_shard", "sharded_tensor", "metadata"))

METADATA = PickledName("Metadata")
TENSOR = PickledName("TensorStorageMetadata")
OBJECT = PickledName("BytesStorageMetadata")
CHUNK = PickledName("ChunkStorageMetadata")
PROPERTIES = PickledName("TensorProperties")
INDEX = PickledName("MetadataIndex")
STORAGE = PickledName("_StorageInfo")
SIZE = PickledName("torch.Size")
_ENUMS = frozenset({"_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING"})

_TABLE: dict[tuple[str, str], object] = {
    **{(_DCP, kind.name): kind for kind in (METADATA, TENSOR, OBJECT, CHUNK, PROPERTIES, INDEX)},
    (_DCP, "StorageMeta"): PickledName("StorageMeta"),
    (_DCP, "_MEM_FORMAT_ENCODING"): PickledName("_MEM_FORMAT_ENCODING"),
    # Up to torch 2.2 DCP used the properties class of sharded tensors.
    (_SHARDED, "TensorProperties"): PROPERTIES,
    (_SHARDED, "MEM_FORMAT_ENCODING"): PickledName("MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): STORAGE,
    ("torch", "Size"): SIZE,
    ("torch.serialization", "_get_layout"): PickledName("_get_layout"),
    ("collections", "OrderedDict"): PickledName("OrderedDict"),
    # Python 3.11.0 to 3.11.3 pickle the memory format, a member of an enum, as a `getattr`. It is not called here.
    **{(module, "getattr"): PickledName("builtins.getattr", only_of=_ENUMS) for module in ("builtins", "__builtin__")},
    # The folder that the checkpoint was written to.
    **{(m, c): PickledName("Path") for m in ("pathlib", "pathlib._local") for c in ("PosixPath", "PurePosixPath")},
    **{(m, c): PickledName("Path") for m in ("pathlib", "pathlib._local") for c in ("WindowsPath", "PureWindowsPath")},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


def read_metadata(folder: Path, dtypes: Mapping[str, Any] = DTYPES) -> Contents:
    """Return the contents that `.metadata` in `folder` describes, with the values of `dtypes`.

    Raises `CheckpointDamaged`, `CheckpointUnsafe` and OSError.
    """
    path = folder / layout.METADATA
    data = read_description(path, _ENDING)
    try:
        return _metadata_contents(parse_pickle(data, _TABLE), str(folder), dtypes)
    except (InertPickleError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointUnsafe(str(path), f"it is not metadata as DCP writes it: {error!s:.300}") from None


def _metadata_contents(metadata: Any, path: str, dtypes: Mapping[str, Any]) -> Contents:
    fields = _fields(metadata, METADATA)
    storage = _storage(_dict(fields["storage_data"]), path)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    num_chunks = 0
    for key, described in _dict(fields["state_dict_metadata"]).items():
        if type(key) is not str or type(described) is not Instance:
            raise InertPickleError("a key is not a string, or it has no description")
        if described.kind is OBJECT:
            objects[key] = StoredObject(item=storage[key, None])
            continue
        tensors[key] = _tensor_of_metadata(key, _fields(described, TENSOR), storage, dtypes)
        # A pickle can refer to the same list many times, so a short one could describe a huge number of chunks.
        num_chunks += len(tensors[key].chunks)
        if num_chunks > len(storage):
            raise InertPickleError("it has more chunks than places for them")
    return Contents(path, tensors, objects, _planner_paths(fields.get("planner_data")), described_in=layout.METADATA)


def _storage(described: Mapping[Any, Any], path: str) -> dict[tuple[str, tuple[int, ...] | None], Item]:
    places = {}
    for index, info in described.items():
        where = _fields(index, INDEX)
        place = _fields(info, STORAGE)
        if place.get("transform_descriptors"):
            raise CheckpointUnreadable(path, "its entries are compressed or otherwise transformed. Load it with DCP")
        file, offset, length = place["relative_path"], place["offset"], place["length"]
        if (type(file), type(offset), type(length)) != (str, int, int):
            raise InertPickleError("a place is not a file, an offset and a length")
        offsets = where.get("offset")
        if type(where["fqn"]) is not str:
            raise InertPickleError("a key is not a string")
        places[where["fqn"], None if offsets is None else _torch_size(offsets)] = Item(file, offset, length)
    return places


def _tensor_of_metadata(
    key: str,
    fields: Mapping[str, Any],
    storage: Mapping[tuple[str, tuple[int, ...] | None], Item],
    dtypes: Mapping[str, Any],
) -> StoredTensor:
    properties = fields["properties"]
    if type(properties) is not Instance or properties.kind is not PROPERTIES or type(properties.state) is not tuple:
        raise InertPickleError(f"{key} has no properties")
    dtype = properties.state[0]
    if type(dtype) is not Dtype or dtype.name not in dtypes:
        raise InertPickleError(f"{key} has no dtype")
    chunks = []
    listed = fields["chunks"]
    if type(listed) is not list or len(listed) > len(storage):
        raise InertPickleError(f"{key} has no list of chunks, or it has more chunks than places for them")
    for chunk in listed:
        where = _fields(chunk, CHUNK)
        offsets = _torch_size(where["offsets"])
        if (key, offsets) not in storage:
            raise InertPickleError(f"it has no place for a chunk of {key}")
        item = storage[key, offsets]
        chunks.append(Chunk(item.file, None, offsets, _torch_size(where["sizes"]), item))
    return StoredTensor(dtypes[dtype.name], _torch_size(fields["size"]), chunks)


def _planner_paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """Return the paths that DCP's own planner stores; none if another planner stored something else."""
    if type(planner_data) is not dict:
        return {}
    paths = {}
    for key, path in planner_data.items():
        if type(key) is not str or type(path) is not tuple or not path or not {*map(type, path)} <= {str, int}:
            raise InertPickleError("a path in the state dict is not made of names and numbers")
        paths[key] = path
    return paths


def _fields(instance: Any, kind: PickledName) -> dict[str, Any]:
    if type(instance) is not Instance or instance.kind is not kind or type(instance.state) is not dict:
        raise InertPickleError(f"expected a {kind.name}, found a {type(instance).__name__}")
    return instance.state


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is Instance and value.kind.name == "OrderedDict":
        return value.members or {}
    if type(value) is not dict:
        raise InertPickleError(f"expected a dict, found a {type(value).__name__}")
    return value


def _torch_size(value: Any) -> tuple[int, ...]:
    if type(value) is not Instance or value.kind is not SIZE or len(value.args) != 1:
        raise InertPickleError(f"expected a torch.Size, found a {type(value).__name__}")
    [sizes] = value.args
    if type(sizes) not in (tuple, list) or not {*map(type, sizes)} <= {int}:
        raise InertPickleError("a size is not made of whole numbers")
    return tuple(sizes)
