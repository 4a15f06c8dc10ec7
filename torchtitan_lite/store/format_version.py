"""The version of the files that a run keeps, and which of other versions are read.

One number counts for manifests, heads of buckets, records of uploads and of rollbacks, and cards in memory. Each file
names it, and the oldest reader that understands the file: a version that only adds fields leaves that as it is. So an
earlier reader ignores what it does not know, and keeps it where it writes the file again. What was written before the
first release is neither read nor touched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torchtitan_lite.errors import FormatTooNew, FormatTooOld
from torchtitan_lite.store.manifest_fields import integer_field

FORMAT_VERSION = 7
_FIRST_VERSION = 7
"""The first released one; commits before the release used 1 to 6."""
_VERSION, _OLDEST_READER = "format_version", "oldest_reader"
FORMAT: Mapping[str, int] = {_VERSION: FORMAT_VERSION, _OLDEST_READER: 7}
"""The fields with which a file begins."""


def check_format(document: Mapping[str, Any], path: str) -> None:
    """Raise FormatTooOld or FormatTooNew unless this version reads the file `path` with the fields `document`.

    Raises ValueError for a wrong field.
    """
    version = integer_field({**document}, _VERSION, 1)
    if version < _FIRST_VERSION:
        raise FormatTooOld(path, version, _FIRST_VERSION)
    if integer_field({**document}, _OLDEST_READER, 1) > FORMAT_VERSION:
        raise FormatTooNew(path, version, FORMAT_VERSION)


def unknown_fields(document: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return what `document` has next to the fields `known`, and its version if that is a later one."""
    of_format = FORMAT.keys() if document.get(_VERSION, FORMAT_VERSION) > FORMAT_VERSION else ()
    return {name: value for name, value in document.items() if name in of_format or name not in (*known, *FORMAT)}
