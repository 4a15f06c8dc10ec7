"""A digest of a small object that is the same in our manifest and in a `torch.save` item, and a few words about it.

Nothing is unpickled: a pickle is parsed inertly, and what it would call is part of the digest by its name and its
arguments. Numbers count to the last bit, types count, the order of keys does not. Pickles of the same object from two
versions of torch may differ, so an equal digest proves equality and a different one does not quite prove the opposite.
"""

from __future__ import annotations

import io
import reprlib
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torchtitan_lite.checkpoint.format.contents import Item, StoredObject
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.checkpoint.untrusted.inert_pickle import (
    AnyName,
    InertPickleError,
    Instance,
    Persistent,
    PickledName,
    parse,
)
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import text_digest
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnreadable
from torchtitan_lite.log import readable_bytes
from torchtitan_lite.store.place import Place

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
        return _Digests(lambda name: b"").of(stored.value), shown(stored.value)
    if stored.item.length > MOST_BYTES or stored.is_file:
        parts = (_read(folder, part) for part in _parts_of(stored.item))
        what = "a file" if stored.is_file else "an object"
        return _digest("item", text_digest(parts)), f"{what} of {readable_bytes(stored.item.length)}"
    data = _read(folder, stored.item)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if sum(entry.file_size for entry in entries.values()) > len(data):
                raise ValueError("its entries are larger than the item")
            value = parse(archive.read(entries["data.pkl"]), AnyName())
            return _Digests(lambda name: archive.read(entries[f"data/{name}"])).of(value), shown(value)
    except (InertPickleError, zipfile.BadZipFile, NotImplementedError, KeyError, RuntimeError, ValueError) as error:
        finding = f"{stored.item.file}: the item of {key} is not what torch.save writes: {error!s:.200}"
        raise CheckpointDamaged(str(folder), finding, [key]) from None


def shown(value: Any) -> str:
    """Return a short description of `value`, on one line."""
    if type(value) is Instance:
        if value.kind.name == _BYTES:
            return _cut(repr(_bytes_of(value)))
        is_tensor = value.kind.name.startswith(_TENSOR)
        return "a tensor" if is_tensor else f"a {value.kind.name.rpartition('.')[2]}"
    if type(value) in (list, tuple, dict) and any(type(part) is Instance for part in _parts(value)):
        return f"a {type(value).__name__} of {len(value)}"
    return _cut(_short.repr(value))


def _parts(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value


def _cut(text: str) -> str:
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
            return _digest(kind.__name__, repr(value))
        if kind is float:
            return _digest("float", struct.pack(">d", value).hex())
        if kind is bytes:
            return _digest("bytes", text_digest([value]))
        if id(value) not in self._known:
            self._known[id(value)] = self._of_container(value, depth + 1)
        return self._known[id(value)]

    def _of_container(self, value: Any, depth: int) -> str:
        if type(value) in (list, tuple):
            return _digest(type(value).__name__, *(self.of(part, depth) for part in value))
        if type(value) is dict:
            return _digest("dict", *self._pairs(value, depth))
        if type(value) is PickledName:
            return _digest("name", value.name)
        if type(value) is Persistent:
            return self._of_storage(value)
        if type(value) is not Instance:
            raise ValueError(f"a {type(value).__name__} is in it")
        if value.kind.name == _BYTES and (content := _bytes_of(value)) is not None:
            return _digest("bytes", text_digest([content]))
        if value.kind.name.endswith(".set") and len(value.args) == 1 and type(value.args[0]) is list:
            return _digest("set", *sorted(self.of(part, depth) for part in value.args[0]))
        is_dict = value.kind.name in _DICTS
        parts = (self.of(value.args, depth), self.of(value.state, depth), self.of(value.items, depth))
        return _digest(
            "dict of" if is_dict else "call", value.kind.name, *parts, *self._pairs(value.members or {}, depth)
        )

    def _pairs(self, value: dict[Any, Any], depth: int) -> list[str]:
        return sorted(_digest("pair", self.of(key, depth), self.of(part, depth)) for key, part in value.items())

    def _of_storage(self, reference: Persistent) -> str:
        word, kind, name, _, count = reference.id
        if word != "storage" or type(kind) is not PickledName or type(name) is not str or type(count) is not int:
            raise ValueError("it refers to something outside of it")
        return _digest("storage", kind.name, str(count), text_digest([self._read(name)]))


def _bytes_of(value: Instance) -> bytes | None:
    text, encoding = value.args if len(value.args) == 2 else (None, None)
    # Protocol 2 has no bytes: pickle writes them as a string with one character for each byte.
    return text.encode("latin1") if type(text) is str and encoding == "latin1" else None


def _digest(*parts: str) -> str:
    return text_digest(f"{len(part)}:{part}".encode(errors="surrogatepass") for part in parts)


def _parts_of(item: Item) -> Iterator[Item]:
    for at in range(0, item.length, MOST_BYTES):
        yield Item(item.file, item.offset + at, min(MOST_BYTES, item.length - at))


def _read(folder: Place, item: Item) -> bytes:
    files, data = files_of(folder), bytearray(item.length)
    try:
        files.reader(cached=True).read(files.path_of(item.file), None, [Piece(item.offset, memoryview(data))])
    except DamagedRange as damage:
        finding = f"bytes {damage.begin} to {damage.end} of {item.file}: {damage.finding}"
        raise CheckpointDamaged(str(folder), finding) from None
    except OSError as error:
        raise CheckpointUnreadable(str(folder), f"{type(error).__name__}: {error}") from error
    return bytes(data)
