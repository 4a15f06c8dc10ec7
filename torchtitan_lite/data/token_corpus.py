"""A tokenised corpus: its tokens are made once, and kept in a file that all processes and all later starts read.

The order of samples needs the length of the whole stream, and a window anywhere in it, so the tokens must exist before
the first step. The first process of a file system makes them, under a lock; the others wait for the lock, without a
collective whose time-out could end them. The file appears under its name when it is whole and durable. It is made
again if it is damaged, also during the run, or if a file of the corpus changed. A process that may write nothing reads
the file that is there; if there is none, it keeps the tokens in an unnamed temporary file.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from torchtitan_lite.data.documents import (
    DocumentPiece,
    Documents,
    Fingerprint,
    content_digest,
    fingerprint_of,
    names_in_corpus,
)
from torchtitan_lite.data.tokenizer import Tokenizer, marks_of
from torchtitan_lite.disk.digest import BLOCK_BYTES, DIGEST_BYTES, block_digest, digest_blocks, num_blocks
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.errors import ConfigError, CorpusChanged, TokensNotWritten
from torchtitan_lite.log import counted, logger, readable_bytes

TOKENS_FILE, LOCK_FILE = "tokens", "lock"
_BATCH_CHARACTERS = 1 << 20
_LOG_SECONDS = 30.0
_NOT_OURS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Errors of a folder that this user may not write, or that is none: another one is to be named."""


class TokenCorpus:
    """The tokens of `documents`, with the tokenizer's marks around each. Keeps them in a folder in `folder`.

    Where BOS and EOS are one token, it only follows each document. Without `writes`, nothing in `folder` changes.
    """

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        folder: Path,
        *,
        writes: bool,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.tokenizer = tokenizer.fingerprint
        self._documents, self._tokenizer, self._writes, self._sleep = documents, tokenizer, writes, sleep
        self._names = names_in_corpus(documents.paths)
        self._sizes = [path.stat().st_size for path in documents.paths]
        self._folder = folder / self._key()

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the corpus. Reads its files, unless there are tokens of them as they are."""
        digests = [bytes.fromhex(digest) for digest in self._digests]
        return fingerprint_of(self._documents.kind, self._documents.paths, self._sizes, digests)

    @property
    def tokens_file(self) -> Path | None:
        """Return the file that holds the tokens; None for a process that writes none."""
        return self._path if self._writes else None

    @property
    def num_tokens(self) -> int:
        """Return the length of the stream. The first call may tokenise the corpus, or wait for who does."""
        return int(self._tokens.num_tokens)

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return tokens start ... stop - 1."""
        try:
            return self._tokens.read(start, stop)
        except TokensDamaged as damage:
            logger.warning("The tokens in %s are damaged: %s. Making them again", self._path, damage)
        self._tokens = self._open_or_make(lambda found: found.read(start, stop))
        return self._tokens.read(start, stop)

    @cached_property
    def _tokens(self) -> TokenFile:
        found = self._open() or self._open_or_make()
        logger.info("The corpus has %s tokens", f"{found.num_tokens:,}")
        return found

    @cached_property
    def _digests(self) -> list[str]:
        found = self._open()
        if found is not None:
            return [str(digest) for *_, digest in found.description["files"]]
        return [content_digest(path) for path in self._documents.paths]

    @property
    def _token_bytes(self) -> int:
        return 2 if self._tokenizer.vocab_size <= 1 << 16 else 4

    @property
    def _path(self) -> Path:
        return self._folder / TOKENS_FILE

    def _key(self) -> str:
        """Return a name that other corpora and other tokenizers do not have, without reading any file."""
        digest = hashlib.blake2b(f"{self._documents.kind}\0{self.tokenizer}".encode(), digest_size=8)
        for name, size in zip(self._names, self._sizes, strict=True):
            digest.update(f"\0{name}\0{size}".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def _open(self) -> TokenFile | None:
        """Return the tokens that are there; None if there are none, or they are damaged or of other files."""
        try:
            with self._path.open("rb") as file:
                found = TokenFile(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except TokensDamaged as damage:
            logger.warning("The tokens in %s are damaged: %s", self._path, damage)
            return None
        changed = self._changed_file(found.description)
        if changed is not None:
            logger.info("The tokens in %s are those of another state of %s", self._path, changed)
            return None
        return found

    def _changed_file(self, description: dict[str, Any]) -> str | None:
        """Return the first file that is not as `description` says; None if all are.

        Reads only files whose time of change is another one.
        """
        for path, (name, size, time_ns, digest) in zip(self._documents.paths, description["files"], strict=True):
            stat = path.stat()
            if stat.st_size != size or (stat.st_mtime_ns != time_ns and content_digest(path) != digest):
                return str(name)
        return None

    def _open_or_make(self, check: Callable[[TokenFile], object] = lambda found: None) -> TokenFile:
        """Return the tokens that another process made meanwhile, if they pass `check`; else make them."""
        if not self._writes:
            logger.info("This run writes nothing into %s: the tokens are for this run only", self._folder.parent)
            with self._naming_the_folder(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as file:
                self._write(file, lambda progress: None)
                return TokenFile(file)
        with self._naming_the_folder(self._folder):
            DISK.make_dir(self._folder)
            # A lock, not rank 0 and a collective: making the file may take hours, collectives have time-outs, and ranks
            # on other file systems need a file of their own.
            with _making_lock(self._folder / LOCK_FILE, self._sleep) as (note, is_alone):
                with suppress(TokensDamaged):
                    found = self._open()
                    if found is not None:
                        check(found)
                        return found
                if is_alone:
                    for leftover in self._folder.glob(f".{TOKENS_FILE}.*.tmp"):
                        DISK.remove_file(leftover)
                return self._make(note)

    def _make(self, note: Callable[[str], None]) -> TokenFile:
        with suppress(FileNotFoundError):
            DISK.remove_file(self._path)  # If it is damaged, no later start may begin with it.
        temporary = self._folder / f".{TOKENS_FILE}.{socket.gethostname()}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                self._write(file, note)
                file.flush()
                DISK.fsync_file(file.fileno())
            DISK.replace(temporary, self._path)
        except BaseException:
            with suppress(OSError):
                DISK.remove_file(temporary)
            raise
        DISK.fsync_dir(self._folder)
        with self._path.open("rb") as file:
            return TokenFile(file)

    def _write(self, file: BinaryIO, note: Callable[[str], None]) -> None:
        self._documents.check()
        begin = time.monotonic()
        size, paths = readable_bytes(sum(self._sizes)), self._documents.paths
        files = counted(len(paths), "file")
        logger.info("Tokenising %s (%s) into %s", files, size, self._path if self._writes else "a temporary file")
        times = [path.stat().st_mtime_ns for path in paths]
        # A damaged file of tokens is made again from the corpus that this run began with, or not at all.
        expected = self.__dict__.get("_digests")
        digests = [content_digest(path) for path in paths]
        if expected is not None and digests != expected:
            changed = [n for n, a, b in zip(self._names, digests, expected, strict=True) if a != b]
            raise CorpusChanged([f"{name}: it changed during this run" for name in changed])
        described = list(zip(self._names, self._sizes, times, digests, strict=True))
        # Tokens, not an index of lengths: with that, each window would tokenise its document again, and read a whole
        # row group of a Parquet file for it.
        write_tokens(
            file,
            self._arrays(note),
            token_bytes=self._token_bytes,
            description={"kind": self._documents.kind, "tokenizer": self.tokenizer, "files": described},
        )
        after = [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        for name, now, before in zip(self._names, after, zip(self._sizes, times, strict=True), strict=True):
            if now != before:
                raise CorpusChanged([f"{name}: it changed while it was tokenised"])
        self.__dict__["_digests"] = digests
        logger.info(
            "Tokenised %s (%s) in %.1f s: %s of tokens",
            files,
            size,
            time.monotonic() - begin,
            readable_bytes(file.tell()),  # words: kept
        )

    def _arrays(self, note: Callable[[str], None]) -> Iterator[npt.NDArray[np.uint32]]:
        total, logged = max(1, sum(self._sizes)), time.monotonic()
        # Batches span files: the tokenizer uses all cores only for several texts at once.
        for batch in _document_batches(self._pieces()):
            yield self._marked(batch)
            if time.monotonic() - logged >= _LOG_SECONDS:
                logged, percent = time.monotonic(), 100 * batch[-1].progress / total
                logger.info("Tokenised %.0f %% of the corpus", percent)
                note(f"{percent:.0f} %")

    def _pieces(self) -> Iterator[DocumentPiece]:
        """Yield the texts of all files; their progress is in bytes of all files."""
        done = 0
        for path, size in zip(self._documents.paths, self._sizes, strict=True):
            for piece in self._documents.pieces(path):
                yield piece._replace(progress=done + piece.progress * size)
            done += size

    def _marked(self, batch: list[DocumentPiece]) -> npt.NDArray[np.uint32]:
        before, after = marks_of(self._tokenizer)
        tokens: list[int] = []
        for piece, encoded in zip(batch, self._tokenizer.encode([piece.text for piece in batch]), strict=True):
            tokens += (before if piece.begins else []) + encoded + (after if piece.ends else [])
        return np.array(tokens, dtype=np.uint32)

    @contextmanager
    def _naming_the_folder(self, folder: Path) -> Iterator[None]:
        """Raise what the system refuses in `folder` as ConfigError if it is not ours to write, else TokensNotWritten.

        The first is a folder of another user, the second a disk that is full or fails.
        """
        try:
            yield
        except OSError as error:
            if error.filename in map(str, self._documents.paths):
                raise
            if error.errno in _NOT_OURS:
                raise ConfigError(
                    f"training.tokens_folder: the tokens could not be written in {folder}: {error}. "
                    "Set --training.tokens_folder to a folder that this user may write."
                ) from error
            cause = error.strerror or str(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                cause += f", {readable_bytes(shutil.disk_usage(folder).free)} are free"
            raise TokensNotWritten(str(folder), cause) from error


def _document_batches(pieces: Iterator[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    batch: list[DocumentPiece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


# The lock under which one of several processes makes the file that all of them read.
#
# It ends with its process, so a kill leaves nothing to remove. The file of the lock says who has it and how far the
# work is: a process that waits logs that. Waits have no time-out.


_POLL_SECONDS = 0.2


@contextmanager
def _making_lock(path: Path, sleep: Callable[[float], None]) -> Iterator[tuple[Callable[[str], None], bool]]:
    """Hold the lock of the file `path` in the block, however long that takes.

    Yield a function that notes in the file how far the work is, and whether no other process is in the block. A file,
    not its folder: NFS has such locks on files. Where there is none, every process gets it: each then writes a file of
    its own, and the last one stays.
    """
    with path.open("a+b", buffering=0) as file:
        waited = 0.0
        while (is_locked := _try_lock(file)) is False:
            if waited == 0 or waited % _LOG_SECONDS < _POLL_SECONDS:
                file.seek(0)
                holder = file.read(256).decode(errors="replace") or "another process"
                logger.info("Waiting for %s, which tokenises the corpus", holder)
            sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS

        def note(progress: str) -> None:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}{progress and f': {progress}'}".encode())

        try:
            note("")
            yield note, bool(is_locked)
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # A process that was forked meanwhile has the descriptor, too.


def _try_lock(file: BinaryIO) -> bool | None:
    """Return whether this process has the lock; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


# A file that holds a stream of tokens.
#
# The tokens come first, 2 or 4 bytes each, then a digest of each MiB of them, then a description as JSON, then a fixed
# end. What was cut off lacks the end; any other damage is found when the MiB that it is in is first read. The file
# never changes after it was written. Nothing here knows what the description says.


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
