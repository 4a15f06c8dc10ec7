"""The files of a corpus, and the documents in them: text files, lines of JSON, rows of Parquet, Python's own sources.

Documents have a fixed order (files by name, lines and rows as they are in a file). The bytes of text files can be read
where they are. For a tokenizer the texts of a file come one after the other: one piece of a text file, one line of JSON
or one row group of a Parquet file is in memory. A text file is given in pieces, which end after a line: they are
tokenised one by one, so the cuts are part of what the tokens are and must never change. A `Fingerprint` identifies a
corpus independently of its folder; every kind of corpus has the same fields in it, so that a resume can name the ones
that changed.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.errors import ConfigError, CorpusChanged, ExtraMissing

NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
SAMPLED_BYTES = 1 << 16
"""Bytes to hash at the head and at the tail of a text file: hashing many GB completely would take minutes."""
PIECE_BYTES = 1 << 22
_ROWS = 1024
"""Of a Parquet file, read at a time."""


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a corpus: two corpora with equal fingerprints are taken to be the same."""

    kind: str
    files: int
    bytes: int
    digest: str
    """Hash of names, sizes and contents; of large text files only `SAMPLED_BYTES` at both ends."""


class DocumentPiece(NamedTuple):
    """A document, or a part of one."""

    text: str
    begins: bool = True
    ends: bool = True
    progress: float = 1.0
    """The part of the file that is read, this piece included."""


def build_documents(config: Training) -> Documents:
    """Return the files that `config` names. Raise ConfigError if there are none."""
    if config.dataset == "stdlib":
        return TextFiles(stdlib_sources(), f"stdlib of Python {platform.python_version()}")
    paths, key = matching_files(config.dataset_path or ""), config.dataset_text_key
    if config.dataset == "text":
        return TextFiles(paths)
    return JsonDocuments(paths, key) if config.dataset == "jsonl" else ParquetColumns(paths, key)


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
    """Text files, each of which is one document."""

    def __init__(self, paths: Sequence[Path], kind: str = "text") -> None:
        self.paths, self.kind = list(paths), kind

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each document."""
        return np.array([path.stat().st_size for path in self.paths], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of the files: of large ones only the ends count."""
        sizes: list[int] = self.lengths.tolist()
        contents = (_head_and_tail(path, size) for path, size in zip(self.paths, sizes, strict=True))
        return fingerprint_of(self.kind, self.paths, sizes, contents)

    def read(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start ... stop - 1 of one file. Raise CorpusChanged if the file is now shorter."""
        path = self.paths[document]
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        if len(data) < stop - start:
            raise CorpusChanged([f"{path}: shorter than it was at the start of this run"])
        return data

    def check(self) -> None:
        """Accept every file: what is wrong in one is found as it is read."""

    def pieces(self, path: Path) -> Iterator[DocumentPiece]:
        """Return the file in pieces. Raise ConfigError if it is not UTF-8."""
        size, at, rest, begins = path.stat().st_size, 0, "", True
        decoder = codecs.getincrementaldecoder("utf-8")()
        with path.open("rb") as file:
            while True:
                data = file.read(PIECE_BYTES)
                try:
                    rest += decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    raise ConfigError(
                        f"{path}: expected UTF-8, found {error.object[error.start : error.start + 1]!r} near byte "
                        f"{at + error.start}. Convert the file, or set --model.tokenizer_path=bytes."
                    ) from error
                at += len(data)
                if not data:
                    yield DocumentPiece(rest, begins, True)
                    return
                cut = rest.rfind("\n") + 1 or len(rest)
                if at < size and cut:
                    yield DocumentPiece(rest[:cut], begins, False, at / size)
                    rest, begins = rest[cut:], False


class JsonDocuments:
    """Lines of JSON, each of them one document: the text under `key`."""

    def __init__(self, paths: Sequence[Path], key: str) -> None:
        self.paths, self.kind = list(paths), f"jsonl, key {key}"
        self._key = key

    def check(self) -> None:
        """Accept every file, as `TextFiles` does."""

    def pieces(self, path: Path) -> Iterator[DocumentPiece]:
        """Return the text of each line that is not blank. Raise ConfigError for a line without one."""
        size, at = path.stat().st_size, 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                at += len(line)
                if line.strip():
                    yield DocumentPiece(_text_of(line, self._key, f"{path}:{number}"), progress=at / size)


class ParquetColumns:
    """Rows of Parquet files, each of them one document: the text in the column `key`; rows without one are skipped."""

    def __init__(self, paths: Sequence[Path], key: str) -> None:
        self.paths, self.kind = paths, f"parquet, key {key}"
        self._key = key

    def check(self) -> None:
        """Raise ConfigError if a file is none of Parquet or has no such column of text; reads only their ends.

        Raises ExtraMissing without pyarrow.
        """
        for path in self.paths:
            with _opened_parquet(path, self._key):
                pass

    def pieces(self, path: Path) -> Iterator[DocumentPiece]:
        """Return the texts of the column, one row group in memory at a time.

        Raises what `check` raises, and ConfigError at the first row group that is damaged.
        """
        with _opened_parquet(path, self._key) as file:
            num_rows, at = file.metadata.num_rows, 0
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[self._key]):
                    at += batch.num_rows
                    for text in batch.column(0).to_pylist():
                        if text is not None:
                            yield DocumentPiece(text, progress=at / num_rows)


Documents = TextFiles | JsonDocuments | ParquetColumns


def _text_of(line: bytes, key: str, where: str) -> str:
    """Return the text under `key` in a line of JSON. Raise ConfigError, which begins with `where`, if there is none."""
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where}: expected one JSON object a line, found {line[:40]!r} ({error}). Fix the line."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {line[:40]!r}. Fix the line.")
    return text_under(value, key, where)


def text_under(example: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text under `key` of `example`. Raise ConfigError, which begins with `where`, if there is none."""
    if not isinstance(example.get(key), str):
        found = ", ".join(name for name, value in example.items() if isinstance(value, str)) or "none"
        raise ConfigError(
            f"{where}: expected text under {key!r}, found text under: {found}. Set --training.dataset_text_key."
        )
    return str(example[key])


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


def content_digest(path: Path) -> str:
    """Return the digest of a whole file. Raise OSError if it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while data := file.read(PIECE_BYTES):
            digest.update(data)
    return digest.hexdigest()


@contextmanager
def _opened_parquet(path: Path, key: str) -> Iterator[Any]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ExtraMissing.of(error, "parquet", "pyarrow") from error
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            texts = [field.name for field in schema if _is_text_column(arrow, field.type)]
            if key not in texts:
                raise ConfigError(
                    f"{path}: expected a column of text {key!r}, found columns of text: {', '.join(texts) or 'none'} "
                    f"(of {', '.join(schema.names) or 'no columns'}). Set --training.dataset_text_key."
                )
            yield file
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # The system's; without a number it is pyarrow's.
        raise ConfigError(
            f"training.dataset_path: {path} is not a Parquet file that pyarrow {arrow.__version__} reads: {error}. "
            "Replace it, or leave it out."
        ) from error


def _is_text_column(arrow: Any, kind: Any) -> bool:
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    return str(kind) in ("string", "large_string", "string_view")
