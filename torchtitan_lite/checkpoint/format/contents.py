"""The contents of a checkpoint: its tensors and objects, and their places in its files. Without torch.

`Contents` is made from our manifest's tables or from DCP's metadata, and readers do not see which. `check`
refuses contents that the files cannot hold, before any memory is allocated for them: after it, the chunks
of every tensor cover it exactly once and lie inside the folder's own files, and all tensors together are
no larger than these files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.chunk_runs import Chunk as Chunk
from torchtitan_lite.checkpoint.format.chunk_runs import FileSizes, check_rows, files_of_rows
from torchtitan_lite.checkpoint.format.chunk_runs import Item as Item
from torchtitan_lite.checkpoint.format.chunk_runs import Shape as Shape
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.format.stored_tensor import StoredTensor as StoredTensor
from torchtitan_lite.checkpoint.format.stored_tensor import chunk_mismatch
from torchtitan_lite.checkpoint.format.structure import LIST, Branch, Containers, Path, decode_structure, paths_of
from torchtitan_lite.checkpoint.format.tensor_table import BadEntry, TensorTable, as_list
from torchtitan_lite.disk.plain_file import is_plain_name, is_plain_path
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.manifest_fields import bare, shown_text


class StoredObject(NamedTuple):
    """A small object: its `value`, or the `item` that holds it."""

    value: Any = None
    item: Item | None = None
    is_file: bool = False
    """Whether the item is a complete file of another library: it is compared as bytes, and not parsed."""
    is_typed: bool = False
    """Whether the item holds the document of `plain_value` in place of the object."""


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
    has_folders: bool = False
    """Whether a file may be in a folder below; then its name is a path."""

    def container(self, name: str) -> Branch | None:
        """Return the container of the nested state with this flat name; None if there is none or `structure` is."""
        return None if self._containers is None else self._containers.find(name)

    @classmethod
    def of_manifest(cls, manifest: Manifest, path: str, dtypes: Mapping[str, Any] = DTYPES) -> Contents:
        """Return the contents that the tables in `manifest` describe, with the values of `dtypes`.

        Raises `CheckpointDamaged` for malformed tables.
        """
        objects: dict[str, StoredObject] = {}
        paths: dict[str, Path] = {}
        key = ""
        try:
            tensors = TensorTable.parse(manifest.tensors, dtypes)
            check_rows(tensors.rows, len(manifest.files))
            for key, entry in manifest.objects.items():
                objects[key] = _stored_object(entry)
            if "root" in manifest.structure:
                return cls(path, tensors, objects, *_structure(manifest.structure["root"], tensors, objects, path))
            # It was converted from one of DCP's own, which does not store the types of keys.
            for key, entry in (*manifest.tensors.items(), *manifest.objects.items()):
                paths[key] = _path(entry["path"])
        except CheckpointDamaged:
            raise
        except BadEntry as error:
            raise CheckpointDamaged(path, f"{layout.MANIFEST}: {error}") from None
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointDamaged(path, f"{layout.MANIFEST}: {BadEntry(key, error)}") from None
        return cls(path, tensors, objects, paths)

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.objects

    def __contains__(self, key: object) -> bool:
        return key in self.tensors or key in self.objects

    @cached_property
    def table(self) -> TensorTable:
        """The same tensors in columns."""
        return TensorTable.of(self.tensors)

    def keys_within(self, depth: int) -> frozenset[str]:
        """Return the keys that are in at least `depth` nested containers."""
        return KeyPaths.of(self.paths).longer_than(depth)

    @cached_property
    def files(self) -> frozenset[str]:
        """The names of all files that hold a tensor or an object."""
        return files_of_rows(self.table.rows) | self._named_files

    @cached_property
    def _named_files(self) -> frozenset[str]:
        """Those that stand in the contents; the others follow from the runs."""
        listed = (tensor.chunks for tensor in self.table.others.values() if tensor.runs is None)
        in_tensors = {chunk.file if chunk.item is None else chunk.item.file for chunks in listed for chunk in chunks}
        in_tensors |= {kind.file for kind in self.table.places_by_kind}
        in_objects = {stored.item.file for stored in self.objects.values() if stored.item is not None}
        return frozenset(in_tensors | in_objects)

    def check_names(self) -> None:
        """Raise `CheckpointUnsafe` for a file name that could lead out of the folder."""
        for file in self._named_files:
            if not (is_plain_path if self.has_folders else is_plain_name)(file):
                raise CheckpointUnsafe(
                    self.path, f"{self.described_in}: {shown_text(file)} is not the name of a file in it"
                )

    def check(self, files: Mapping[str, int]) -> None:
        """Raise `CheckpointDamaged` unless `files` can hold all of it and chunks cover every tensor exactly once.

        `files` maps names to sizes in bytes. Call `check_names` before.
        """
        # What is wrong is found in columns, and named by a look at each tensor.
        tensors = self.table.others if self._whole_ones_are_in(files) else self.tensors
        by_rank = FileSizes(files)
        fitting: set[Any] = set()
        for key, tensor in tensors.items():
            # Parameters of many layers, and their moments, are cut alike.
            cut = None if tensor.runs is None else (tensor.shape, tensor.dtype, tensor.runs.cuts)
            if cut in fitting:
                continue
            finding = chunk_mismatch(tensor)
            if finding:
                raise CheckpointDamaged(self.path, f"{self.described_in}: {bare(key)}: {finding}")
            if cut is not None:
                fitting.add(cut)

        def to_check(tensor: StoredTensor) -> Iterable[Chunk]:
            return tensor.chunks if tensor.runs is None else by_rank.outside(tensor.runs, tensor.dtype.itemsize)

        for file, begin, num_bytes, key in self._ranges(tensors, to_check):
            if file not in files:
                finding = f"{bare(file)} is missing; {bare(key)} is in it, says {self.described_in}"
                raise CheckpointDamaged(self.path, finding)
            # An empty range may begin anywhere: no byte of it is read.
            end = begin + num_bytes
            if begin < 0 or num_bytes < 0 or (num_bytes and end > files[file]):
                finding = f"{bare(file)} has {files[file]} bytes; {bare(key)} is in bytes {begin} to {end} of it"
                raise CheckpointDamaged(self.path, finding)
        whole = self.table.nbytes
        if whole > sum(files.values()):
            finding = f"{self.described_in}: tensors of {whole} bytes cannot be in files of {sum(files.values())}"
            raise CheckpointDamaged(self.path, finding)

    def keys_in(self, file: str, begin: float, end: float) -> list[str]:
        """Return the keys with bytes in [begin, end) of `file`, in the order of the contents."""
        ranges = self._ranges(self.tensors, lambda tensor: tensor.chunks_in(file))
        return list(dict.fromkeys(key for name, at, n, key in ranges if name == file and at < end and begin < at + n))

    def _whole_ones_are_in(self, files: Mapping[str, int]) -> bool:
        """Return whether all tensors of the table that are one whole chunk are possible, and lie inside `files`."""
        return all(
            not chunk_mismatch(kind.tensor(0))
            and kind.file in files
            and min(places) >= 0
            and (kind.nbytes == 0 or max(places) + kind.nbytes <= files[kind.file])
            for kind, places in self.table.places_by_kind.items()
        )

    def _ranges(
        self, tensors: Mapping[str, StoredTensor], chunks_of: Callable[[StoredTensor], Iterable[Chunk]]
    ) -> Iterator[tuple[str, int, int, str]]:
        """Yield (file, first byte, number of bytes, key) of these chunks, and of all objects that lie in a file."""
        for key, tensor in tensors.items():
            itemsize = tensor.dtype.itemsize
            for chunk in chunks_of(tensor):
                if chunk.item is not None:
                    yield *chunk.item, key
                elif chunk.at is not None:
                    yield chunk.file, chunk.at, math.prod(chunk.sizes) * itemsize, key
        for key, stored in self.objects.items():
            if stored.item is not None:
                yield *stored.item, key

    @cached_property
    def _containers(self) -> Containers | None:
        return None if self.structure is None else Containers(self.structure)


def _stored_object(entry: Mapping[str, Any]) -> StoredObject:
    if "value" in entry or "item" not in entry:
        return StoredObject(plain_value.decode_value(entry["value"]))
    file, offset, length = as_list(entry["item"])
    if (type(file), type(offset), type(length)) != (str, int, int):
        raise ValueError("expected an item of [file, offset, length]")
    return StoredObject(item=Item(file, offset, length), is_typed=entry.get("typed") is True)


def _structure(
    document: Any, tensors: Mapping[str, StoredTensor], objects: Mapping[str, StoredObject], path: str
) -> tuple[Mapping[str, Path], Branch]:
    """Return the paths through the containers in `document` to all `tensors` and `objects`, and the containers."""
    try:
        structure = decode_structure(document)
        return key_paths(structure, tensors, objects), structure
    except ValueError as error:
        raise CheckpointDamaged(path, f"{layout.MANIFEST}: the structure of the state: {error}") from None


def _path(value: Any) -> Path:
    if not as_list(value) or not {*map(type, value)} <= {str, int}:
        raise ValueError("expected a path of names and numbers")
    return tuple(value)


@dataclass(frozen=True, eq=False)
class _Container:
    """What is kept for all of its keys together, of which there may be thousands."""

    path: Path
    is_list: bool
    prefix: str
    """What the flat names of its entries begin with."""

    def path_of(self, key: str) -> Path:
        last = key[len(self.prefix) :]
        return (*self.path, int(last) if self.is_list else last)


class KeyPaths(Mapping[str, Path]):
    """Paths in the nested state by flat key, made at each use.

    Of each key in `containers` through its container, of all others as they are.
    """

    def __init__(self, containers: Mapping[str, _Container], others: Mapping[str, Path]) -> None:
        self._containers = containers
        self._others = others

    @classmethod
    def of(cls, paths: Mapping[str, Path]) -> KeyPaths:
        """Return `paths` in this form: itself, if it is one."""
        return paths if isinstance(paths, cls) else cls({}, paths)

    def __getitem__(self, key: str) -> Path:
        container = self._containers.get(key)
        return self._others[key] if container is None else container.path_of(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the path of `key`, or `default`, without an exception for each of thousands of keys without one."""
        container = self._containers.get(key)
        return self._others.get(key, default) if container is None else container.path_of(key)

    def __iter__(self) -> Iterator[str]:
        yield from self._containers
        yield from self._others

    def __len__(self) -> int:
        return len(self._containers) + len(self._others)

    def longer_than(self, length: int) -> frozenset[str]:
        """Return the keys whose path is longer than `length`."""
        deep = {container for container in {*self._containers.values()} if len(container.path) >= length}
        below = [key for key, container in self._containers.items() if container in deep] if deep else []
        return frozenset([*below, *(key for key, path in self._others.items() if len(path) > length)])


def key_paths(structure: Branch, tensors: Collection[str], objects: Collection[str]) -> KeyPaths:
    """Return the paths through `structure` to the keys `tensors` and `objects`.

    Raises ValueError unless each of them is in it exactly once, and nothing else is. Memory: that of these keys,
    under any structure.
    """
    walk = _KeyWalk(sum(map(len, tensors)) + sum(map(len, objects)))
    num_keys = len(tensors) + len(objects)
    if walk.descend(structure, (), "") and walk.num_found == len(walk.found) == num_keys:
        has = walk.found.__contains__
        if all(map(has, tensors)) and all(map(has, objects)) and not any(key in tensors for key in objects):
            return KeyPaths(walk.found, {})
    return KeyPaths({}, _checked_paths(structure, {*tensors}, {*objects}))


class _KeyWalk:
    """Finds the container of each key; `room` is the length of all names that it may make."""

    def __init__(self, room: int) -> None:
        self.found: dict[str, _Container] = {}
        self.num_found = 0
        self._room = room

    def descend(self, branch: Branch, path: Path, prefix: str) -> bool:
        """Add the keys below `branch`, in their order. Return whether there was room for all."""
        container = _Container(path, branch.kind == LIST, prefix)
        texts = [*map(str, branch.keys)] if branch.kind == LIST or branch.key_reprs else branch.keys
        if not any(branch.children):
            return self._add(texts, container)
        for text, child in zip(texts, branch.children, strict=True):
            if child is None:
                is_done = self._add([text], container)
            elif len(prefix) + len(text) > self._room:
                return False  # Not even the name of one entry in it.
            else:
                is_done = self.descend(child, container.path_of(prefix + text), f"{prefix}{text}.")
            if not is_done:
                return False
        return True

    def _add(self, texts: Collection[str], container: _Container) -> bool:
        self._room -= len(container.prefix) * len(texts) + sum(map(len, texts))
        if self._room < 0:
            return False
        prefix = container.prefix
        self.found |= dict.fromkeys([prefix + text for text in texts], container)
        self.num_found += len(texts)
        return True


def _checked_paths(structure: Branch, tensors: set[str], objects: set[str]) -> Mapping[str, Path]:
    """Return the same paths, made one by one. Raises ValueError that names the first key that does not fit."""
    paths = paths_of(structure, expected=tensors | objects)
    if len(paths) < len(tensors) + len(objects):
        missing = (tensors | objects) - paths.keys() or tensors & objects
        raise ValueError(f"it does not have {min(missing)!r} exactly once")
    return paths
