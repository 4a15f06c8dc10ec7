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
from typing import Any, NamedTuple

from torchtitan_lite.config.job_config import Training
from torchtitan_lite.data.documents import matching_files, stdlib_sources, text_of
from torchtitan_lite.errors import ConfigError, ExtraMissing

PIECE_BYTES = 1 << 22
_ROWS = 1024
"""Of a Parquet file, read at a time."""


class DocumentPiece(NamedTuple):
    """A document, or a part of one."""

    text: str
    begins: bool = True
    ends: bool = True
    progress: float = 1.0
    """The part of the file that is read, this piece included."""


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


Texts = WholeFiles | Lines | ParquetColumns


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
            _raise_unless_text(arrow, file.schema_arrow, key, path)
            yield file
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # The system's; without a number it is pyarrow's.
        raise ConfigError(
            f"training.dataset_path: {path} is not a Parquet file that pyarrow {arrow.__version__} reads: {error}. "
            "Replace it, or leave it out."
        ) from error


def _raise_unless_text(arrow: Any, schema: Any, key: str, path: Path) -> None:
    texts = [field.name for field in schema if _is_text_column(arrow, field.type)]
    if key not in texts:
        raise ConfigError(
            f"{path}: expected a column of text {key!r}, found columns of text: {', '.join(texts) or 'none'} "
            f"(of {', '.join(schema.names) or 'no columns'}). Set --training.dataset_text_key."
        )


def _is_text_column(arrow: Any, kind: Any) -> bool:
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    return str(kind) in ("string", "large_string", "string_view")
