"""Texts of files, one after the other, for a tokenizer.

A source reads its files from the beginning to the end, in a fixed order, and holds one piece of a text file, one line
of JSON or one row group of a Parquet file in memory. A text file is one document and is given in pieces, which end
after a line: they are tokenised one by one, so the cuts are part of what the tokens are and must never change.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.data.documents import matching_files, stdlib_sources, text_of
from torchtitan_lite.errors import ConfigError, ExtraMissing

PIECE_BYTES = 1 << 22


class DocumentPiece(NamedTuple):
    """A document, or a part of one."""

    text: str
    begins: bool = True
    ends: bool = True
    progress: float = 1.0
    """The part of the file that is read, this piece included."""


class Texts(Protocol):
    """Files, and how to read their texts."""

    kind: str
    paths: Sequence[Path]

    def check(self) -> None:
        """Raise ConfigError if it is quickly known that a file has no such texts."""

    def pieces(self, path: Path) -> Iterator[DocumentPiece]:
        """Return the texts of one file."""


def build_texts(config: Training) -> Texts:
    """Return the files that `config` names. Raise ConfigError if there are none."""
    if config.dataset == "stdlib":
        return WholeFiles(stdlib_sources(), f"stdlib of Python {platform.python_version()}")
    paths, key = matching_files(config.dataset_path or ""), config.dataset_text_key
    if config.dataset == "text":
        return WholeFiles(paths, "text")
    return Lines(paths, key) if config.dataset == "jsonl" else ParquetColumns(paths, key)


class WholeFiles:
    """Text files in UTF-8, each of which is one document."""

    def __init__(self, paths: Sequence[Path], kind: str) -> None:
        self.paths, self.kind = paths, kind

    def check(self) -> None:
        """Accept every file."""

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


class Lines:
    """Lines of JSON, each of them one document: the text under `key`."""

    def __init__(self, paths: Sequence[Path], key: str) -> None:
        self.paths, self.kind = paths, f"jsonl, key {key}"
        self._key = key

    def check(self) -> None:
        """Accept every file."""

    def pieces(self, path: Path) -> Iterator[DocumentPiece]:
        """Return the text of each line that is not blank. Raise ConfigError for a line without one."""
        size, at = path.stat().st_size, 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                at += len(line)
                if line.strip():
                    yield DocumentPiece(text_of(line, self._key, f"{path}:{number}"), progress=at / size)


class ParquetColumns:
    """Rows of Parquet files, each of them one document: the text in the column `key`; rows without one are skipped."""

    def __init__(self, paths: Sequence[Path], key: str) -> None:
        self.paths, self.kind = paths, f"parquet, key {key}"
        self._key = key

    def check(self) -> None:
        """Raise ConfigError if a file has no such column of text."""
        for path in self.paths:
            check_column(path, self._key)

    def pieces(self, path: Path) -> Iterator[DocumentPiece]:
        """Return the texts of the column. Raise ConfigError if the file has no such column of text."""
        for text, progress in parquet_texts(path, self._key):
            yield DocumentPiece(text, progress=progress)


def content_digest(path: Path) -> str:
    """Return the digest of a whole file. Raise OSError if it cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while data := file.read(PIECE_BYTES):
            digest.update(data)
    return digest.hexdigest()


# The text column of a Parquet file, one row group in memory at a time. Needs the library pyarrow.


_ROWS = 1024


def parquet_texts(path: Path, key: str) -> Iterator[tuple[str, float]]:
    """Return the texts in the column `key`, each with the part of the file that is read; rows without one are skipped.

    Raises what `check_column` raises, and ConfigError at the first row group that is damaged.
    """
    with _opened_parquet(path, key) as file:
        num_rows, at = file.metadata.num_rows, 0
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[key]):
                at += batch.num_rows
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield text, at / num_rows


def check_column(path: Path, key: str) -> None:
    """Raise ConfigError if the file is none of Parquet or has no column `key` of text; reads only its end.

    Raises ExtraMissing without pyarrow.
    """
    with _opened_parquet(path, key):
        return


@contextmanager
def _opened_parquet(path: Path, key: str) -> Iterator[Any]:
    arrow, parquet = require_pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            _raise_unless_text(arrow, file.schema_arrow, key, path)
            yield file
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # The system's; without a number it is pyarrow's.
        raise ConfigError(
            f"training.dataset_path: {path} is not a Parquet file that pyarrow {arrow.__version__} reads: {error}. "
            "Replace it, or leave it out."
        ) from error


def require_pyarrow() -> tuple[Any, Any]:
    """Return the modules pyarrow and pyarrow.parquet. Raise ExtraMissing if they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ExtraMissing.of(error, "parquet", "pyarrow") from error
    return pyarrow, pyarrow.parquet


def _raise_unless_text(arrow: Any, schema: Any, key: str, path: Path) -> None:
    texts = [field.name for field in schema if _is_text_column(arrow, field.type)]
    if key not in texts:
        raise ConfigError(
            f"{path}: expected a column of text {key!r}, found columns of text: {', '.join(texts) or 'none'} "
            f"(of {', '.join(schema.names) or 'no columns'}). Set --training.dataset_text_key."
        )


def _is_text_column(arrow: Any, kind: Any) -> bool:
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    return any(is_kind(kind) for is_kind in (arrow.types.is_string, arrow.types.is_large_string)) or str(kind) == (
        "string_view"
    )
