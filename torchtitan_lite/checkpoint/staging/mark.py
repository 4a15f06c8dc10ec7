"""The mark of an image: whether the arena next to it holds one, which, and the card that describes it.

The mark lies in a memfd of its own, so that it outlives the process that wrote it, as the arena does. Its first page
has two records and a word that says which of them is valid, if one is; the cards follow. `clear` is one store into
shared memory, which a killed process has made or not made. `set` writes a card and a record next to those that are
valid and the word last, so a card is replaced by another one in one store, too.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass

import xxhash

PAGE_BYTES = 4096
CARD_BYTES = 64 << 20
"""Allowed for a card, however small its image is: the coordinator's describes the tensors of all ranks."""
CARD_RATIO = 64
"""Bytes allowed on top for each byte of the image. A chunk takes 60 to 160 bytes of the coordinator's card, and its
item in one rank's file at least 700: enough for 280 ranks of empty tensors, or 26,000 of 64 KiB in each chunk."""
CARD_MOST_BYTES = 4 << 30
"""Allowed at most, however large the image is."""

_MAGIC = b"TTLIMAGE"
_VERSION = 2
_FIELDS = struct.Struct("<8sIIQQQQ16s")
"""Magic, version, (unused), step, bytes of the image, place and bytes of the card, digest of the card."""
_SEAL_BYTES = 8
_RECORD_BYTES = 256
"""From the first record of the page to the second one."""
_VALID = struct.Struct("<Q")
_VALID_AT = PAGE_BYTES - _VALID.size
"""The place of the word: 0, or the number of the valid record, 1 or 2. Only its lowest byte is ever stored."""


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
        self._page[_VALID_AT] = 0

    def set(self, step: int, num_bytes: int, card: bytes) -> None:
        """Make the image valid: the first `num_bytes` of the arena are that of `step`, described by `card`.

        If it is valid already it stays so: whenever this process is killed, it has the card before or this one. Raises
        ValueError for a card that no reader would read.
        """
        if finding := _too_long(len(card), num_bytes):
            raise ValueError(finding)
        (valid,) = _VALID.unpack_from(self._page, _VALID_AT)
        number = 2 if valid == 1 else 1
        at = PAGE_BYTES
        if valid in (1, 2):
            *_, begin, count, _ = _FIELDS.unpack_from(self._page, _record_at(valid))
            at = PAGE_BYTES if PAGE_BYTES + len(card) <= begin else begin + count
        if os.fstat(self.fd).st_size < at + len(card):
            os.ftruncate(self.fd, at + len(card))
        # Next to the valid card and record, never over them: a kill before the last line leaves these valid.
        _write_at(self.fd, at, card)
        fields = _FIELDS.pack(_MAGIC, _VERSION, 0, step, num_bytes, at, len(card), xxhash.xxh3_128_digest(card))
        sealed = fields + xxhash.xxh3_64_digest(fields)
        self._page[_record_at(number) : _record_at(number) + len(sealed)] = sealed
        # One byte, the lowest of the word: `pack_into` would store zeros first, and a kill in between lose both images.
        self._page[_VALID_AT] = number

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
    record = page[_record_at(valid if valid == 2 else 1) :]
    fields, found = record[: _FIELDS.size], record[_FIELDS.size : _FIELDS.size + _SEAL_BYTES]
    magic, version, _, step, num_bytes, card_at, card_bytes, card_digest = _FIELDS.unpack(fields)
    if magic != _MAGIC or valid > 2:
        raise UnusableMark("it does not begin as an in-memory snapshot does")
    if version != _VERSION:
        raise UnusableMark(f"it has format version {version}, this version reads {_VERSION}")
    if found != xxhash.xxh3_64_digest(fields):
        raise UnusableMark("its valid flag does not match its digest")
    if finding := _too_long(card_bytes, num_bytes):
        raise UnusableMark(finding)
    if card_at < PAGE_BYTES or not _are_written(fd, card_at, card_bytes):
        raise UnusableMark(f"its header of {card_bytes} bytes is missing")
    card = _read_at(fd, card_at, card_bytes)
    if xxhash.xxh3_128_digest(card) != card_digest:
        raise UnusableMark("its header does not match its digest")
    return Marked(step, num_bytes, card)


def _record_at(number: int) -> int:
    """Return the place of record 1 or 2 in the page."""
    return (number - 1) * _RECORD_BYTES


def _too_long(card_bytes: int, num_bytes: int) -> str:
    """Return what is wrong if a card of `card_bytes` is too long for an image of `num_bytes`; empty if it is not."""
    most = min(CARD_BYTES + CARD_RATIO * num_bytes, CARD_MOST_BYTES)
    if card_bytes <= most:
        return ""
    return f"its header has {card_bytes} bytes, {most} are allowed for {num_bytes} bytes of data"


def _are_written(fd: int, at: int, num_bytes: int) -> bool:
    """Return whether the file has these bytes, without holes: a reader then allocates no more than the writer did."""
    if at + num_bytes > os.fstat(fd).st_size:
        return False
    try:
        return not num_bytes or os.lseek(fd, at, os.SEEK_HOLE) >= at + num_bytes
    except OSError:
        return True  # Some sandboxes know no holes.


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
