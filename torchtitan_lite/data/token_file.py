"""A file that holds a stream of tokens.

The tokens come first, 2 or 4 bytes each, then a digest of each MiB of them, then a description as JSON, then a fixed
end. What was cut off lacks the end; any other damage is found when the MiB that it is in is first read. The file never
changes after it was written. Nothing here knows what the description says.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from torchtitan_lite.disk.digest import BLOCK_BYTES, DIGEST_BYTES, block_digest, digest_blocks, num_blocks

_END = struct.Struct("<QQ8s8s")  # bytes of a token, bytes of the JSON, digest of digests and JSON, magic
_MAGIC = b"TTLTOKS1"


class TokensDamaged(ValueError):
    """A file of tokens is not what was written."""


def write_tokens(
    file: BinaryIO, tokens: Iterable[npt.NDArray[Any]], *, token_bytes: int, description: Mapping[str, Any]
) -> None:
    """Write `tokens` and `description` into the empty `file`. `token_bytes` is 2 or 4."""
    digests = bytearray()
    waiting = bytearray()
    for array in tokens:
        waiting += array.astype(f"<u{token_bytes}").tobytes()
        whole = len(waiting) // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            digests += digest_blocks(bytes(waiting[:whole]))
            file.write(waiting[:whole])
            del waiting[:whole]
    digests += digest_blocks(bytes(waiting))
    text = json.dumps(description).encode()
    file.write(waiting)
    file.write(digests)
    file.write(text)
    file.write(_END.pack(token_bytes, len(text), block_digest(bytes(digests) + text), _MAGIC))


class TokenFile:
    """The tokens in the open `file`, in memory only where they are read. Raises TokensDamaged at its first damage."""

    def __init__(self, file: BinaryIO) -> None:
        size = file.seek(0, 2)
        if size < _END.size:
            raise TokensDamaged(f"it has only {size} bytes")
        file.seek(size - _END.size)
        token_bytes, text_bytes, digest, magic = _END.unpack(file.read(_END.size))
        if magic != _MAGIC or token_bytes not in (2, 4):
            raise TokensDamaged("its end is missing")
        # Tokens of n bytes and n's digests: n + 8 * ceil(n / MiB) bytes.
        body = size - _END.size - text_bytes
        data_bytes = body - DIGEST_BYTES * -(-body // (BLOCK_BYTES + DIGEST_BYTES))
        if data_bytes < 0 or data_bytes % token_bytes or data_bytes + DIGEST_BYTES * num_blocks(data_bytes) != body:
            raise TokensDamaged(f"its size of {size} bytes is not that of whole tokens")
        file.seek(data_bytes)
        self._digests, text = file.read(body - data_bytes), file.read(text_bytes)
        if block_digest(self._digests + text) != digest:
            raise TokensDamaged("its description has another digest")
        self.description: dict[str, Any] = json.loads(text)
        self.num_tokens = int(data_bytes) // token_bytes
        self._token_bytes = token_bytes
        self._bytes: npt.NDArray[np.uint8] = (
            np.memmap(file, dtype=np.uint8, mode="r", shape=(data_bytes,)) if data_bytes else np.empty(0, np.uint8)
        )
        # Each block when it is first read: to verify all of them at a start would read the file once for each rank.
        self._is_verified = np.zeros(num_blocks(data_bytes), dtype=np.bool_)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens start ... stop - 1."""
        first, last = start * self._token_bytes, stop * self._token_bytes
        for block in range(first // BLOCK_BYTES, num_blocks(last)):
            if not self._is_verified[block]:
                self._verify(block)
        return self._bytes[first:last].view(f"<u{self._token_bytes}").astype(np.int64)

    def _verify(self, block: int) -> None:
        data = self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        if digest_blocks(data.tobytes()) != self._digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]:
            raise TokensDamaged(f"bytes {block * BLOCK_BYTES} to {block * BLOCK_BYTES + len(data)} have another digest")
        self._is_verified[block] = True
