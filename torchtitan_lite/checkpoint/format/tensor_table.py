"""The tensors of a checkpoint by key, in columns. Without torch.

Most tensors are one whole chunk: row-major, in one file. Of thousands of these the table keeps once, as a `TensorKind`,
what they have in common, and of each one only its kind and where it begins. All others it keeps as they are. The
`StoredTensor` of a key is the same for both, and made at its first use; code that needs thousands reads the columns.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

from torchtitan_lite.checkpoint.format import chunk_runs
from torchtitan_lite.checkpoint.format.chunk_runs import Chunk, Shape, StoredTensor
from torchtitan_lite.store.manifest import Table
from torchtitan_lite.store.manifest_fields import bare

_ROW = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{"dtype":"'
    r'(\w+","shape":\[[\d,]*\],"chunks":\[\["[^"\\\x00-\x1f]*"),'
    r"(0|[1-9]\d{0,17}),"
    r'(\[[\d,]*\],\[[\d,]*\])\]\]\}(?:,(?=")|\}\Z)',
    re.ASCII,
)
"""An entry as we write it, of a tensor of one chunk: its key, what is before the chunk's place, that, and the rest."""
_BETWEEN = len('"":{"dtype":"},,,]]')
"""Characters of an entry that are in none of these."""


class BadEntry(ValueError):
    """The entry of `key` in a table of the manifest is malformed: `error`."""

    def __init__(self, key: str, error: Exception) -> None:
        super().__init__(f"the entry of {bare(key)} ({type(error).__name__}: {error!s:.200})")


@dataclass(frozen=True, eq=False)
class TensorKind:
    """What many tensors that are one whole chunk each have in common."""

    dtype: Any
    shape: Shape
    file: str

    @cached_property
    def nbytes(self) -> int:
        """The size of one of them in bytes."""
        num_bytes: int = math.prod(self.shape) * self.dtype.itemsize
        return num_bytes

    def tensor(self, at: int) -> StoredTensor:
        """Return the tensor of this kind that begins at byte `at` of the file."""
        return StoredTensor(self.dtype, self.shape, [Chunk(self.file, at, _zeros(len(self.shape)), self.shape)])


# With an object for each entry, plan, piece and copy, a load of 20,000 tensors of 4 KiB took eight times as long in
# Python as on the disk.
class TensorTable(Mapping[str, StoredTensor]):
    """Tensors by key, in the order of `keys`."""

    def __init__(
        self,
        keys: Mapping[str, Any],
        kinds: Mapping[str, TensorKind],
        places: Mapping[str, int],
        others: Mapping[str, StoredTensor],
    ) -> None:
        self._keys = keys
        self.kinds = kinds
        """The kind of each tensor that is one whole chunk."""
        self.places = places
        """The byte of its file where each of these begins. The keys and their order are those of `kinds`."""
        self.others = others
        """All other tensors."""
        self._made: dict[str, StoredTensor] = {}

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor]) -> TensorTable:
        """Return `tensors` as a table: itself, if it is one."""
        if isinstance(tensors, cls):
            return tensors
        kinds: dict[str, TensorKind] = {}
        places: dict[str, int] = {}
        others: dict[str, StoredTensor] = {}
        known: dict[tuple[Any, Shape, str], TensorKind] = {}
        for key, tensor in tensors.items():
            chunk = _whole_chunk(tensor)
            if chunk is None or chunk.at is None:
                others[key] = tensor
                continue
            alike = tensor.dtype, tensor.shape, chunk.file
            kinds[key] = known.get(alike) or known.setdefault(alike, TensorKind(*alike))
            places[key] = chunk.at
        return cls(kinds if not others else dict.fromkeys(tensors), kinds, places, others)

    @classmethod
    def parse(cls, entries: Table, dtypes: Mapping[str, Any]) -> TensorTable:
        """Return the tensors that `entries` of a manifest describe, with the values of `dtypes`.

        Raises `BadEntry`, and `CheckpointDamaged` for what is no table.
        """
        found = cls._of_text(entries.unparsed, dtypes)
        return cls.of(_tensors_of_table(entries, dtypes)) if found is None else found

    def __getitem__(self, key: str) -> StoredTensor:
        made = self._made.get(key)
        if made is None:
            kind = self.kinds.get(key)
            self._made[key] = made = self.others[key] if kind is None else kind.tensor(self.places[key])
        return made

    def get(self, key: str, default: Any = None) -> Any:
        """Return the tensor `key`, or `default`, without an exception for each of thousands of keys of objects."""
        return self[key] if key in self._keys else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    @cached_property
    def places_by_kind(self) -> Mapping[TensorKind, Sequence[int]]:
        """Where the tensors of each kind begin."""
        found: dict[TensorKind, list[int]] = {kind: [] for kind in self.kinds.values()}
        for kind, at in zip(self.kinds.values(), self.places.values(), strict=True):
            found[kind].append(at)
        return found

    @cached_property
    def rows(self) -> frozenset[chunk_runs.Row]:
        """The files of all runs."""
        tensors = self.others.values()
        return frozenset(run.row for tensor in tensors if tensor.runs is not None for run in tensor.runs.runs)

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        of_whole = sum(kind.nbytes * len(places) for kind, places in self.places_by_kind.items())
        return of_whole + sum(tensor.nbytes for tensor in self.others.values())

    @property
    def dtypes(self) -> Sequence[Any]:
        """The dtypes of all tensors, each once."""
        of_kinds = [kind.dtype for kind in self.places_by_kind]
        return [*dict.fromkeys(of_kinds + [tensor.dtype for tensor in self.others.values()])]

    @classmethod
    def _of_text(cls, text: bytes | None, dtypes: Mapping[str, Any]) -> TensorTable | None:
        """Return the table in the JSON `text`; None unless every entry is, as we write it, of a whole chunk.

        JSON's parser would make a dozen objects for each entry: of 20,000 it takes ten times as long. A text in which
        such entries follow one another without a gap, and with different keys, means to JSON's parser what it means
        here.
        """
        if not text or not text.startswith(b"{") or not text.isascii():
            return None
        rows = _ROW.findall(text[1:].decode("ascii"))
        if not rows:
            return None
        columns = keys, heads, places, tails = [*zip(*rows, strict=True)]
        if sum(sum(map(len, column)) for column in columns) + _BETWEEN * len(rows) != len(text) - 1:
            return None
        likes = list(zip(heads, tails, strict=True))
        known = {like: _tensor_kind(*like, dtypes) for like in dict.fromkeys(likes)}
        kinds: dict[str, Any] = dict(zip(keys, map(known.__getitem__, likes), strict=True))
        if None in known.values() or len(kinds) < len(rows):
            return None
        return cls(kinds, kinds, dict(zip(keys, map(int, places), strict=True)), {})


def as_list(value: Any) -> list[Any]:
    """Return `value`, a part of an entry. Raise ValueError if it is no list."""
    if type(value) is not list:
        raise ValueError(f"expected a list, found {type(value).__name__}")
    return value


def _tensor_kind(head: str, tail: str, dtypes: Mapping[str, Any]) -> TensorKind | None:
    """Return the kind of the entries with these texts around their place; None if they are malformed or not whole."""
    try:
        tensor = _tensor_of_entry(json.loads(f'{{"dtype":"{head},0,{tail}]]}}'), dtypes)
    except ValueError:
        return None
    chunk = _whole_chunk(tensor)
    return None if chunk is None else TensorKind(tensor.dtype, tensor.shape, chunk.file)


def _whole_chunk(tensor: StoredTensor) -> Chunk | None:
    """Return the chunk of a tensor that is one whole chunk, in the form of a `TensorKind`."""
    if len(tensor.chunks) != 1 or tensor.runs is not None:
        return None
    chunk = tensor.chunks[0]
    is_whole = chunk.item is None and chunk.sizes == tensor.shape and chunk.offsets == _zeros(len(tensor.shape))
    return chunk if is_whole else None


def _tensors_of_table(entries: Table, dtypes: Mapping[str, Any]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for key, entry in entries.items():
        try:
            tensors[key] = _tensor_of_entry(entry, dtypes)
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise BadEntry(key, error) from None
    return tensors


def _tensor_of_entry(entry: Mapping[str, Any], dtypes: Mapping[str, Any]) -> StoredTensor:
    dtype, shape = _dtype(entry["dtype"], dtypes), _ints(entry["shape"])
    if "runs" in entry:
        runs = chunk_runs.decode_runs(entry["runs"], len(shape))
        return StoredTensor(dtype, shape, runs, runs)
    chunks = as_list(entry["chunks"])
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


def _dtype(name: Any, dtypes: Mapping[str, Any]) -> Any:
    if type(name) is not str or name not in dtypes:
        raise ValueError("expected the name of a dtype")
    return dtypes[name]


def _ints(value: Any) -> Shape:
    # Before the cache, for which True is 1.
    if not {*map(type, as_list(value))} <= {int}:
        raise ValueError("expected whole numbers")
    return _shared(tuple(value))


@lru_cache(maxsize=4096)
def _shared(shape: Shape) -> Shape:
    """Return `shape`, the same tuple for each equal one: a checkpoint has thousands of tensors of a few shapes."""
    return shape
