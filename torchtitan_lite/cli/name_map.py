"""What a person says of a model in other software; the names of its tensors in a JSON file, or by a function.

The file is `{"name in the model": "name in the file"}`, for an export and for an import alike. A function gets a name
of what is read, and returns the name in what is written, or None to leave the tensor out.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store.manifest_fields import json_object

NameMap = Mapping[str, Any] | Callable[[str], str | None]


class GivenModel(NamedTuple):
    """What a person says about the model: the options of `export` of these names."""

    config: str
    names: str
    name_map: str
    tokenizer: str
    no_tokenizer: bool


def read_name_map(given: str) -> NameMap:
    """Return the map that `given` names: FILE.json, or module:function. Raise ConfigError if there is none."""
    if given.endswith(".json"):
        return _names_in_file(Path(given))
    module, colon, function = given.partition(":")
    if not colon or not module or not function:
        raise ConfigError(f"--name-map {given}: expected a file that ends in .json, or module:function")
    sys.path.insert(0, str(Path.cwd()))  # Where python finds the modules of a script that is run here.
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--name-map {given}: {error}") from None
    finally:
        sys.path.pop(0)
    if not callable(found):
        raise ConfigError(f"--name-map {given}: expected a function, found {type(found).__name__}")
    return found  # type: ignore[no-any-return]  # A person's own function.


def _names_in_file(path: Path) -> Mapping[str, Any]:
    try:
        return json_object(path.read_bytes())
    except (ValueError, RecursionError) as error:
        expected = '{"name in the model": "name in the file"}'
        raise ConfigError(f"--name-map {path}: expected {expected}, found something else: {error}") from None
