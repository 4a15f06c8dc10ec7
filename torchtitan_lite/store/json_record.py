"""A small record that is one JSON object in a file of its own, replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torchtitan_lite.store.manifest_fields import json_type, refuse_constant


def json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in `data`. Raise ValueError for anything else, and for NaN and the infinities in it."""
    document = json.loads(data, parse_constant=refuse_constant)
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {json_type(document)}")
    return document


def json_bytes(document: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Return the contents of the file."""
    return (json.dumps(document, indent=indent) + "\n").encode()
