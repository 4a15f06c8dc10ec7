"""Compare a manifest with the published schema of its kind, in which a field that is not known is refused.

The schemas are cut to the fields that the manifests use: a manifest with a further one needs that field from the source
which the file names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_KNOWN = {"type", "enum", "required", "properties", "additionalProperties", "items", "pattern"}
_EITHER = "x-kubernetes-int-or-string"


def findings(manifest: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with `manifest`, a sentence each; empty if nothing is."""
    return list(_findings(manifest, _schema(manifest["kind"]), manifest["kind"]))


@cache
def _schema(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "schemas" / f"{kind}.yaml").read_text())
    return found


def _findings(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    assert schema.keys() <= {*_KNOWN, _EITHER}, f"{place}: the schema has a rule that is not checked"
    wanted = (int, str) if schema.get(_EITHER) else _TYPES[schema["type"]]
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        yield f"{place}: expected {schema.get('type')}, found {value!r}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{place}: expected one of {schema['enum']}, found {value!r}"
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        yield f"{place}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, dict):
        yield from (f"{place}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if inner is None:
                yield f"{place}.{name}: an unknown field"
            else:
                yield from _findings(each, inner, f"{place}.{name}")
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _findings(each, schema["items"], f"{place}[{number}]")
