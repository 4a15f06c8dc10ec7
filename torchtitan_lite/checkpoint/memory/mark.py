"""The mark of an image: whether the arena beside it holds one, which, and the card that describes it.

The mark lies in a memfd of its own, so that it outlives the process that wrote it, as the arena does. Its first page
says whether the image is valid, and the card follows. `clear` is one store into shared memory, which a killed process
has made or not made; `set` writes the card first and the word that makes it valid last.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

import xxhash

PAGE_BYTES = 4096
MAX_CARD_BYTES = 4 << 30
"""A longer card is no card: a reader allocates that much."""

_MAGIC = b"TTLIMAGE"
_VERSION = 1
_FIELDS = struct.Struct("<8sIIQQQ16s")
"""Magic, version, (unused), step, bytes of the image, bytes of the card, digest of the card."""
_SEAL_BYTES = 8
_VALID = struct.Struct("<Q")
_VALID_AT = PAGE_BYTES - _VALID.size
"""The place of the word that is 1 while the image is valid. Aligned, so that the store cannot be cut."""


class UnusableMark(ValueError):
    """A mark says that its image is valid, but is not one that this version wrote: the message says what it is."""


@dataclass(frozen=True)
class Marked:
    """A valid image."""

    step: int
    num_bytes: int
    """Bytes of the image, from the first byte of the arena."""
    card: bytes


class Mark:
    """The mark in the memfd `fd`, which this object owns; a new memfd without one."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("torchtitan_lite-mark", os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, PAGE_BYTES)
        self._page = mmap.mmap(self.fd, PAGE_BYTES)

    def clear(self) -> None:
        """Make the image invalid: call it before the first byte of the arena changes. Idempotent."""
        _VALID.pack_into(self._page, _VALID_AT, 0)

    def set(self, step: int, num_bytes: int, card: bytes) -> None:
        """Make the image valid: the first `num_bytes` of the arena are that of `step`, described by `card`."""
        self.clear()
        needed = PAGE_BYTES + len(card)
        if os.fstat(self.fd).st_size < needed:
            os.ftruncate(self.fd, needed)
        _write_at(self.fd, PAGE_BYTES, card)
        fields = _FIELDS.pack(_MAGIC, _VERSION, 0, step, num_bytes, len(card), xxhash.xxh3_128_digest(card))
        sealed = fields + xxhash.xxh3_64_digest(fields)
        self._page[: len(sealed)] = sealed
        _VALID.pack_into(self._page, _VALID_AT, 1)

    def close(self) -> None:
        """Unmap the page and close the descriptor; the mark stays as long as another process holds it. Idempotent."""
        if self.fd >= 0:
            self._page.close()
            os.close(self.fd)
            self.fd = -1


def read_mark(fd: int) -> Marked | None:
    """Return what the mark in `fd` says; None if no image is valid. Raises `UnusableMark`, and OSError."""
    page = os.pread(fd, PAGE_BYTES, 0)
    if len(page) < PAGE_BYTES:
        raise UnusableMark(f"it has {len(page)} bytes, not a page")
    (valid,) = _VALID.unpack_from(page, _VALID_AT)
    if not valid:
        return None
    fields, found = page[: _FIELDS.size], page[_FIELDS.size : _FIELDS.size + _SEAL_BYTES]
    magic, version, _, step, num_bytes, card_bytes, card_digest = _FIELDS.unpack(fields)
    if magic != _MAGIC:
        raise UnusableMark("it is no mark of an image")
    if version != _VERSION:
        raise UnusableMark(f"it has format version {version}, this version reads {_VERSION}")
    if found != xxhash.xxh3_64_digest(fields):
        raise UnusableMark("its digest is wrong")
    if card_bytes > min(MAX_CARD_BYTES, max(0, os.fstat(fd).st_size - PAGE_BYTES)):
        raise UnusableMark(f"its card of {card_bytes} bytes is not in it")
    card = _read_at(fd, PAGE_BYTES, card_bytes)
    if xxhash.xxh3_128_digest(card) != card_digest:
        raise UnusableMark("the digest of its card is wrong")
    return Marked(step, num_bytes, card)


def _write_at(fd: int, at: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, at)
        view, at = view[count:], at + count


def _read_at(fd: int, at: int, num_bytes: int) -> bytes:
    parts = []
    while num_bytes and (part := os.pread(fd, num_bytes, at)):
        parts.append(part)
        at, num_bytes = at + len(part), num_bytes - len(part)
    return b"".join(parts)
