"""The contents of a checkpoint: its tensors and objects, and their places in its files. Without torch.

`Contents` is made from our manifest's tables or from DCP's metadata, and readers do not see which. `check`
refuses contents that the files cannot hold, before any memory is allocated for them: after it, the chunks
of every tensor cover it exactly once and lie inside the folder's own files, and all tensors together are
no larger than these files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.chunk_runs import Chunk as Chunk
from torchtitan_lite.checkpoint.format.chunk_runs import FileSizes, check_rows, chunk_mismatch, files_of_rows
from torchtitan_lite.checkpoint.format.chunk_runs import Item as Item
from torchtitan_lite.checkpoint.format.chunk_runs import Shape as Shape
from torchtitan_lite.checkpoint.format.chunk_runs import StoredTensor as StoredTensor
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.format.structure import FORM, Branch, Containers, Path, decode_structure, paths_of
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
                try:
                    structure = decode_structure(manifest.structure["root"])
                    return cls(path, tensors, objects, key_paths(structure, tensors, objects), structure)
                except ValueError as error:
                    what = f"{layout.MANIFEST}: the structure of the state: {error}"
                    raise CheckpointDamaged(path, what) from None
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

    @cached_property
    def made_of_others(self) -> tuple[str, ...]:
        """With these the keys of the parts of tensors begin that are made of others: they are none by themselves."""
        return tuple(key.removesuffix(FORM) for key in self.objects if key.endswith(f".{FORM}"))

    @cached_property
    def files(self) -> frozenset[str]:
        """The names of all files that hold a tensor or an object."""
        return files_of_rows(self.table.rows) | self._named_files

    @cached_property
    def _named_files(self) -> frozenset[str]:
        """Those that stand in the contents; the others follow from the runs."""
        listed = (tensor.chunks for tensor in self.table.others.values() if tensor.runs is None)
        in_tensors = {chunk.file for chunks in listed for chunk in chunks}
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
                yield *chunk.place(itemsize), key
        for key, stored in self.objects.items():
            if stored.item is not None:
                yield *stored.item, key

    @cached_property
    def _containers(self) -> Containers | None:
        return None if self.structure is None else Containers(self.structure)


CLOCKS = ("run_seconds", "productive_seconds")
"""Fields of a `TrainState` that no training depends on: they differ between two runs that are the same otherwise."""
_COUNTERS = ("step", "n_tokens_seen", "log_steps")
"""Fields of a `TrainState` of every version: a user's state may have a `run_seconds` of its own."""


def is_clock(key: str, keys: Collection[str]) -> bool:
    """Return whether `key`, one of the `keys` of a checkpoint, is a clock of its run under any name of its state."""
    state, dot, name = key.rpartition(".")
    return name in CLOCKS and all(f"{state}{dot}{field}" in keys for field in _COUNTERS)


def _stored_object(entry: Mapping[str, Any]) -> StoredObject:
    if "value" in entry or "item" not in entry:
        return StoredObject(plain_value.decode_value(entry["value"]))
    file, offset, length = as_list(entry["item"])
    if (type(file), type(offset), type(length)) != (str, int, int):
        raise ValueError("expected an item of [file, offset, length]")
    return StoredObject(item=Item(file, offset, length), is_typed=entry.get("typed") is True)


def _path(value: Any) -> Path:
    if not as_list(value) or not {*map(type, value)} <= {str, int}:
        raise ValueError("expected a path of names and numbers")
    return tuple(value)


def key_paths(structure: Branch, tensors: Collection[str], objects: Collection[str]) -> dict[str, Path]:
    """Return the paths through `structure` to the keys `tensors` and `objects`.

    Raises ValueError, which names the first key that does not fit, unless each of them is in it exactly once, and
    nothing else is. Memory: that of these keys, under any structure.
    """
    expected = {*tensors, *objects}
    paths = paths_of(structure, expected)
    if len(paths) < len(tensors) + len(objects):
        missing = expected - paths.keys() or {*tensors} & {*objects}
        raise ValueError(f"it does not have {min(missing)!r} exactly once")
    return paths
