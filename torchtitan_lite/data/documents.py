"""Documents as bytes: the sources of the running Python, text files, lines of JSON.

Documents have a fixed order (files by name, lines as they are in a file) and are read from disk a piece at a time, so
memory grows with their number, not with their size. A `Fingerprint` identifies a corpus independently of its folder.
Every kind of corpus has the same fields in it, so that a resume can name the ones that changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.errors import ConfigError, CorpusChanged

NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SAMPLED_BYTES = 1 << 16
"""Bytes to hash at the head and at the tail of a text file: hashing many GB completely would take minutes."""


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a corpus: two corpora with equal fingerprints are taken to be the same."""

    kind: str
    files: int
    bytes: int
    digest: str
    """Hash of names, sizes and contents; of large text files only `SAMPLED_BYTES` at both ends."""


def build_documents(config: Training) -> Documents:
    """Return the corpus that `config` names. Raise ConfigError if it has no files."""
    if config.dataset == "stdlib":
        return TextFiles(stdlib_sources(), kind=f"stdlib of Python {platform.python_version()}")
    paths = matching_files(config.dataset_path or "")
    return TextFiles(paths) if config.dataset == "text" else JsonDocuments(paths, config.dataset_text_key)


def stdlib_sources(folder: Path | None = None) -> list[Path]:
    """Return the .py files of the running Python's standard library, sorted, without tests and generated files."""
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = {*folders} - NOT_STDLIB  # Not entered: they may be large.
        paths += [Path(parent, name) for name in names if name.endswith(".py")]
    sources = sorted(path for path in paths if not path.name.startswith("_sysconfigdata") and path.is_file())
    if not sources:
        raise ConfigError(
            f"training.dataset: {folder} has no sources of the standard library (this Python may be a bundle). "
            "Set --training.dataset=text, and --training.dataset_path to files of your own."
        )
    return sources


def matching_files(pattern: str) -> list[Path]:
    """Return the files that match a glob, sorted. Raise ConfigError if there are none."""
    files = sorted(_matches(pattern))
    if not files:
        raise _no_match(pattern)
    return files


def check_some_file_matches(pattern: str) -> None:
    """Raise ConfigError if no file matches the glob `pattern`; ends at the first one that does."""
    if next(_matches(pattern), None) is None:
        raise _no_match(pattern)


def _matches(pattern: str) -> Iterator[Path]:
    path = Path(pattern).expanduser()
    root = Path(path.anchor) if path.is_absolute() else Path.cwd()
    return (file for file in root.glob(str(path.relative_to(path.anchor))) if file.is_file())


def _no_match(pattern: str) -> ConfigError:
    return ConfigError(
        f"training.dataset_path: no file matches {pattern!r} (looked from {Path.cwd()}). "
        "Quote the glob against the shell; ** matches folders at any depth."
    )


class TextFiles:
    """Text files, each of which is one document; `lengths` has their bytes."""

    def __init__(self, paths: Sequence[Path], kind: str = "text") -> None:
        self._paths = list(paths)
        sizes = [path.stat().st_size for path in self._paths]
        self.lengths = np.array(sizes, dtype=np.int64)
        contents = (_head_and_tail(path, size) for path, size in zip(self._paths, sizes, strict=True))
        self.fingerprint = fingerprint_of(kind, self._paths, sizes, contents)

    def read(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start ... stop - 1 of one file. Raise CorpusChanged if the file is now shorter."""
        path = self._paths[document]
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        if len(data) < stop - start:
            raise CorpusChanged([f"{path}: shorter than it was at the start of this run"])
        return data


class JsonDocuments:
    """Lines of JSON, each of them one document: the text under `key`, as UTF-8; `lengths` has their bytes.

    The constructor parses all lines.
    """

    def __init__(self, paths: Sequence[Path], key: str) -> None:
        self._paths, self._key = list(paths), key
        self._file, self._offset, lengths = array("i"), array("q"), array("q")
        digests = []
        for number, path in enumerate(self._paths):
            digest, offset = hashlib.blake2b(digest_size=16), 0
            with path.open("rb") as file:
                for line_number, line in enumerate(file, start=1):
                    if line.strip():
                        self._file.append(number)
                        self._offset.append(offset)
                        lengths.append(len(_document_text(line, key, f"{path}:{line_number}")))
                    digest.update(line)
                    offset += len(line)
            digests.append(digest.digest())
        self.lengths = np.array(lengths, dtype=np.int64)
        sizes = [path.stat().st_size for path in self._paths]
        self.fingerprint = fingerprint_of(f"jsonl, key {key}", self._paths, sizes, digests)

    def read(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start ... stop - 1 of one line's text."""
        path = self._paths[self._file[document]]
        with path.open("rb") as file:
            file.seek(self._offset[document])
            return _document_text(file.readline(), self._key, str(path))[start:stop]


Documents = TextFiles | JsonDocuments


def _document_text(line: bytes, key: str, where: str) -> bytes:
    return text_of(line, key, where).encode("utf-8", "surrogatepass")


def text_of(line: bytes, key: str, where: str) -> str:
    """Return the text under `key` in a line of JSON. Raise ConfigError, which begins with `where`, if there is none."""
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where}: expected one JSON object a line, found {line[:40]!r} ({error}). Fix the line."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {line[:40]!r}. Fix the line.")
    if not isinstance(value.get(key), str):
        found = ", ".join(name for name in value if isinstance(value[name], str)) or "none"
        raise ConfigError(
            f"{where}: expected text under {key!r}, found text under: {found}. Set --training.dataset_text_key."
        )
    return str(value[key])


def _head_and_tail(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        if size <= 2 * SAMPLED_BYTES:
            return file.read()
        head = file.read(SAMPLED_BYTES)
        file.seek(-SAMPLED_BYTES, os.SEEK_END)
        return head + file.read()


def fingerprint_of(kind: str, paths: Sequence[Path], sizes: Sequence[int], contents: Iterable[bytes]) -> Fingerprint:
    """Return the fingerprint of files whose contents, or digests of them, are `contents`."""
    digest = hashlib.blake2b(digest_size=16)
    for name, size, content in zip(names_in_corpus(paths), sizes, contents, strict=True):
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
        digest.update(content)
    return Fingerprint(kind=kind, files=len(paths), bytes=sum(sizes), digest=digest.hexdigest())


def names_in_corpus(paths: Sequence[Path]) -> list[str]:
    """Return the names relative to the common folder, so that a corpus moved as a whole stays the same corpus."""
    root = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(root).as_posix() for path in paths]
