"""The text column of a Parquet file, one row group in memory at a time. Needs the library pyarrow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchtitan_lite.errors import ConfigError, ExtraMissing

_ROWS = 1024


def parquet_texts(path: Path, key: str) -> Iterator[tuple[str, float]]:
    """Return the texts in the column `key`, each with the part of the file that is read; rows without one are skipped.

    Raises what `check_column` raises, and ConfigError at the first row group that is damaged.
    """
    with _opened(path, key) as file:
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
    with _opened(path, key):
        return


@contextmanager
def _opened(path: Path, key: str) -> Iterator[Any]:
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
    texts = [field.name for field in schema if _is_text(arrow, field.type)]
    if key not in texts:
        raise ConfigError(
            f"{path}: expected a column of text {key!r}, found columns of text: {', '.join(texts) or 'none'} "
            f"(of {', '.join(schema.names) or 'no columns'}). Set --training.dataset_text_key."
        )


def _is_text(arrow: Any, kind: Any) -> bool:
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    return any(is_kind(kind) for is_kind in (arrow.types.is_string, arrow.types.is_large_string)) or str(kind) == (
        "string_view"
    )
