"""The differences between two checkpoints, however each of them is sharded.

`compare_checkpoints` reads descriptions and small objects, no tensor: where both manifests have digests of whole
tensors, these say which values differ, too. Names, dtypes, shapes, containers, objects and values are the state, and
make two checkpoints different. The clocks of their runs, and where they come from (step, run, ranks, configuration,
versions) are listed, and do not: the same state of two runs is equal. Without torch.
"""

from __future__ import annotations

import io
import reprlib
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_lite.checkpoint.format.contents import Item, StoredObject, StoredTensor, is_clock
from torchtitan_lite.checkpoint.format.plain_value import decode_value, encoded
from torchtitan_lite.checkpoint.format.structure import Branch
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.checkpoint.untrusted.inert_pickle import (
    AnyName,
    InertPickleError,
    Instance,
    Persistent,
    PickledName,
    parse_pickle,
)
from torchtitan_lite.config.job_config import flat_config
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import text_digest
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.errors import CheckpointDamaged, reading
from torchtitan_lite.examining.opened import OpenedCheckpoint
from torchtitan_lite.log import readable_bytes
from torchtitan_lite.store.manifest_fields import TENSOR_DIGESTS
from torchtitan_lite.store.place import Place

NOTHING = "-"
"""Stands for what one of the two does not have."""

Pairs = dict[str, tuple[str, str]]
"""What is in A and what in B, in a few words, by name."""


@dataclass(frozen=True)
class ValuesByDigest:
    """What the digests in both manifests say of the values of tensors that have one dtype and shape."""

    equal: frozenset[str] = frozenset()
    different: frozenset[str] = frozenset()
    different_clocks: frozenset[str] = frozenset()
    unknown: tuple[str, ...] = ()
    """Those without digests: only their values can be compared; no clocks."""


@dataclass(frozen=True)
class Difference:
    """What differs between checkpoint A and checkpoint B."""

    only_in_a: dict[str, str]
    """Each key with what it is."""
    only_in_b: dict[str, str]
    tensors: Pairs
    """Tensors of another dtype or shape."""
    containers: Pairs
    """Containers of another type, and containers that only one of the two has."""
    objects: Pairs
    origin: Pairs
    """Where the two come from; no difference of their state."""
    has_common_names: bool = False
    """Whether there is a tensor, or an object, of the same name in both."""
    clocks: frozenset[str] = frozenset()
    """Clocks of the same form in both, whose values are no difference of their state."""
    by_digest: ValuesByDigest = ValuesByDigest()
    comparable: tuple[str, ...] = field(default=(), repr=False)
    """Tensors of the same shape in both, whose values can be compared."""

    @property
    def has_any(self) -> bool:
        """Return whether the states differ, as far as this was compared."""
        return self.is_beyond_values or bool(self.by_digest.different)

    @property
    def is_beyond_values(self) -> bool:
        """Return whether more differs than the values of tensors."""
        return any(map(bool, (self.only_in_a, self.only_in_b, self.tensors, self.containers, self.objects)))


def compare_checkpoints(a: OpenedCheckpoint, b: OpenedCheckpoint) -> Difference:
    """Return the differences between `a` and `b`. Raises `CheckpointDamaged`, `CheckpointUnreadable` and so on."""
    in_a, in_b = a.contents.tensors, b.contents.tensors
    forms = {key: (dtype_and_shape_text(in_a[key]), dtype_and_shape_text(in_b[key])) for key in in_a if key in in_b}
    tensors = {key: sides for key, sides in forms.items() if sides[0] != sides[1]}
    same = [key for key in forms if key not in tensors]
    clocks = frozenset(key for key in same if is_clock(key, in_a))
    return Difference(
        only_in_a=_only_in(a, b),
        only_in_b=_only_in(b, a),
        tensors=tensors,
        containers=_containers(a.contents.structure, b.contents.structure),
        objects=_object_differences(a, b),
        origin=_origin_differences(a, b),
        has_common_names=bool(same or tensors or a.contents.objects.keys() & b.contents.objects.keys()),
        clocks=clocks,
        by_digest=_values_by_digest(a.extra.get(TENSOR_DIGESTS, {}), b.extra.get(TENSOR_DIGESTS, {}), same, clocks),
        comparable=tuple(key for key in forms if in_a[key].shape == in_b[key].shape),
    )


def dtype_and_shape_text(tensor: StoredTensor) -> str:
    """Return dtype and shape of `tensor`."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def _values_by_digest(
    a: Mapping[str, str], b: Mapping[str, str], same: Sequence[str], clocks: frozenset[str]
) -> ValuesByDigest:
    known = frozenset(key for key in same if key in a and key in b)
    equal = frozenset(key for key in known if a[key] == b[key])
    unknown = tuple(key for key in same if key not in known and key not in clocks)
    return ValuesByDigest(equal, known - equal - clocks, (known - equal) & clocks, unknown)


def _only_in(one: OpenedCheckpoint, other: OpenedCheckpoint) -> dict[str, str]:
    """Return the keys of `one` that `other` has not, or has as another kind of thing."""
    tensors, objects = one.contents.tensors, one.contents.objects
    found = {key: dtype_and_shape_text(tensors[key]) for key in tensors if key not in other.contents.tensors}
    for key, stored in objects.items():
        if key not in other.contents.objects:
            found[key] = "an object" if stored.item is not None else shown_object(stored.value)
    return found


def _object_differences(a: OpenedCheckpoint, b: OpenedCheckpoint) -> Pairs:
    found = {}
    for key, stored in a.contents.objects.items():
        other = b.contents.objects.get(key)
        if other is None:
            continue
        # Types within containers are left to the digests.
        is_plain = type(stored.value) is type(other.value) and type(stored.value) in (int, bool, str, type(None))
        if stored.item is other.item is None and is_plain and stored.value == other.value:
            continue
        digest_a, words_a = digest_of(a.home, key, stored)
        digest_b, words_b = digest_of(b.home, key, other)
        if digest_a != digest_b:
            found[key] = words_a, words_b
    return found


def _containers(a: Branch | None, b: Branch | None) -> Pairs:
    """Return the containers that differ; nothing if one checkpoint does not record its containers."""
    return {} if a is None or b is None else dict(_differing(a, b, ""))


def _differing(a: Branch, b: Branch, name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    if a.kind != b.kind:
        yield name or "the complete state", (a.kind, b.kind)
    below_a, below_b = _child_containers(a), _child_containers(b)
    for key in sorted(below_a.keys() | below_b.keys()):
        one, other = below_a.get(key), below_b.get(key)
        path = f"{name}.{key[0]}" if name else key[0]
        if one is not None and other is not None:
            yield from _differing(one, other, path)
        elif one is not None or other is not None:
            yield path, (one.kind if one else NOTHING, other.kind if other else NOTHING)


def _child_containers(branch: Branch) -> dict[tuple[str, str], Branch]:
    """Return the containers in `branch` by key, and by its type."""
    pairs = zip(branch.keys, branch.children, strict=True)
    return {(str(key), type(key).__name__): child for key, child in pairs if child is not None}


def _origin_differences(a: OpenedCheckpoint, b: OpenedCheckpoint) -> Pairs:
    both_ours = a.manifest is not None and b.manifest is not None
    of_a, of_b = dict(_origin_fields(a, both_ours)), dict(_origin_fields(b, both_ours))
    names = [*of_a, *(name for name in of_b if name not in of_a)]
    return {
        name: (of_a.get(name, NOTHING), of_b.get(name, NOTHING))
        for name in names
        if of_a.get(name, NOTHING) != of_b.get(name, NOTHING)
    }


def _origin_fields(checkpoint: OpenedCheckpoint, in_detail: bool) -> Iterator[tuple[str, str]]:
    """Yield what is known; `in_detail` what only our manifests have, which says nothing next to one that has none."""
    manifest = checkpoint.manifest
    yield "written by", checkpoint.origin.value
    yield "kind", checkpoint.kind.value
    for name, value in (("step", checkpoint.step), ("ranks", checkpoint.saved_by.world_size)):
        yield name, NOTHING if value is None else str(value)
    if manifest is not None and in_detail:
        yield "topology", checkpoint.saved_by.topology or NOTHING
        lineage = manifest.lineage
        yield "run", lineage.run_id
        for name, step in (("parent step", lineage.parent_step), ("branched at step", lineage.branch_point)):
            yield name, NOTHING if step is None else str(step)
        yield from ((f"version of {name}", version) for name, version in sorted(manifest.versions.items()))
        for key, value in flat_config(checkpoint.saved_by.config).items():
            yield key, value if isinstance(value, str) else shown_object(value)


# A digest of a small object that is the same in our manifest and in a `torch.save` item, and a few words about it.
#
# Nothing is unpickled: a pickle is parsed inertly, and what it would call is part of the digest by its name and its
# arguments. Numbers count to the last bit, types count, the order of keys does not. Pickles of the same object from two
# versions of torch may differ, so an equal digest proves equality and a different one does not quite prove the
# opposite.


MAX_DEPTH = 200
MOST_BYTES = 16 << 20
"""The largest item that is parsed, because that takes up to 72 times its size; larger ones are compared as bytes."""
_SHOWN_LETTERS = 36
_BYTES, _TENSOR = "_codecs.encode", "torch._utils._rebuild_tensor"
_DICTS = ("collections.OrderedDict", "collections.Counter", "collections.defaultdict")


def digest_of(folder: Place, key: str, stored: StoredObject) -> tuple[str, str]:
    """Return the digest of the object `key` of the checkpoint in `folder`, and a few words that describe it.

    Raises `CheckpointDamaged` for an item that is not what torch.save writes, and `CheckpointUnreadable`.
    """
    if stored.item is None:
        document, is_typed = encoded(stored.value)  # As an item has it.
        return _Digests(lambda name: b"").of(document if is_typed else stored.value), shown_object(stored.value)
    if stored.item.length > MOST_BYTES or stored.is_file:
        parts = (_read_item(folder, part) for part in _item_pieces(stored.item))
        what = "a file" if stored.is_file else "an object"
        return _parts_digest("item", text_digest(parts)), f"{what} of {readable_bytes(stored.item.length)}"
    data = _read_item(folder, stored.item)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if sum(entry.file_size for entry in entries.values()) > len(data):
                raise ValueError("its entries are larger than the item")
            value = parse_pickle(archive.read(entries["data.pkl"]), AnyName())
            digest = _Digests(lambda name: archive.read(entries[f"data/{name}"])).of(value)
            return digest, shown_object(decode_value(value) if stored.is_typed else value)
    except (InertPickleError, zipfile.BadZipFile, NotImplementedError, KeyError, RuntimeError, ValueError) as error:
        finding = f"{stored.item.file}: the item of {key} is not what torch.save writes: {error!s:.200}"
        raise CheckpointDamaged(str(folder), finding, [key]) from None


def shown_object(value: Any) -> str:
    """Return a short description of `value`, on one line."""
    if type(value) is Instance:
        if value.kind.name == _BYTES:
            return _shortened_line(repr(_bytes_of(value)))
        is_tensor = value.kind.name.startswith(_TENSOR)
        return "a tensor" if is_tensor else f"a {value.kind.name.rpartition('.')[2]}"
    parts = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    if any(type(part) is Instance for part in parts):
        return f"a {type(value).__name__} of {len(value)}"
    return _shortened_line(_short.repr(value))


def _shortened_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_LETTERS else line[: _SHOWN_LETTERS - 3] + "..."


_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict = 3, 4, 4, 3
_short.maxstring = _short.maxother = 24


class _Digests:
    """Digests of the parts of one value; `read` returns the bytes of a storage by its name."""

    def __init__(self, read: Callable[[str], bytes]) -> None:
        self._read = read
        self._known: dict[int, str] = {}
        """By the id of a part: a pickle may refer to the same part many times."""

    def of(self, value: Any, depth: int = 0) -> str:
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply, or contains itself")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return _parts_digest(kind.__name__, repr(value))
        if kind is float:
            return _parts_digest("float", struct.pack(">d", value).hex())
        if kind is bytes:
            return _parts_digest("bytes", text_digest([value]))
        if id(value) not in self._known:
            self._known[id(value)] = self._of_container(value, depth + 1)
        return self._known[id(value)]

    def _of_container(self, value: Any, depth: int) -> str:
        if type(value) in (list, tuple):
            return _parts_digest(type(value).__name__, *(self.of(part, depth) for part in value))
        if type(value) is dict:
            return _parts_digest("dict", *self._pairs(value, depth))
        if type(value) is PickledName:
            return _parts_digest("name", value.name)
        if type(value) is Persistent:
            return self._of_storage(value)
        if type(value) is not Instance:
            raise ValueError(f"a {type(value).__name__} is in it")
        if value.kind.name == _BYTES and (content := _bytes_of(value)) is not None:
            return _parts_digest("bytes", text_digest([content]))
        if value.kind.name.endswith(".set") and len(value.args) == 1 and type(value.args[0]) is list:
            return _parts_digest("set", *sorted(self.of(part, depth) for part in value.args[0]))
        is_dict = value.kind.name in _DICTS
        parts = (self.of(value.args, depth), self.of(value.state, depth), self.of(value.items, depth))
        return _parts_digest(
            "dict of" if is_dict else "call", value.kind.name, *parts, *self._pairs(value.members or {}, depth)
        )

    def _pairs(self, value: dict[Any, Any], depth: int) -> list[str]:
        return sorted(_parts_digest("pair", self.of(key, depth), self.of(part, depth)) for key, part in value.items())

    def _of_storage(self, reference: Persistent) -> str:
        word, kind, name, _, count = reference.id
        if word != "storage" or type(kind) is not PickledName or type(name) is not str or type(count) is not int:
            raise ValueError("it refers to something outside of it")
        return _parts_digest("storage", kind.name, str(count), text_digest([self._read(name)]))


def _bytes_of(value: Instance) -> bytes | None:
    text, encoding = value.args if len(value.args) == 2 else (None, None)
    # Protocol 2 has no bytes: pickle writes them as a string with one character for each byte.
    return text.encode("latin1") if type(text) is str and encoding == "latin1" else None


def _parts_digest(*parts: str) -> str:
    return text_digest(f"{len(part)}:{part}".encode(errors="surrogatepass") for part in parts)


def _item_pieces(item: Item) -> Iterator[Item]:
    for at in range(0, item.length, MOST_BYTES):
        yield Item(item.file, item.offset + at, min(MOST_BYTES, item.length - at))


def _read_item(folder: Place, item: Item) -> bytes:
    files, data = files_of(folder), bytearray(item.length)
    try:
        with reading(folder):
            files.reader(cached=True).read(files.path_of(item.file), None, [Piece(item.offset, memoryview(data))])
    except DamagedRange as damage:
        finding = f"bytes {damage.begin} to {damage.end} of {item.file}: {damage.finding}"
        raise CheckpointDamaged(str(folder), finding) from None
    return bytes(data)
