"""The two forms in which DCP saves an optimizer: by the name of each parameter, or as a list of groups.

Flat, as our checkpoints and torchtitan's have it (`flatten_optimizer_state_dict=True`), each parameter has its own copy
of the settings, and nothing says which group it was in. Nested, as `get_state_dict` returns it by default,
`param_groups` is a list of groups, each with the names of its parameters under `params`. State has the same keys in
both, and other paths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from torchtitan_lite.checkpoint.converting.model_part import model_keys
from torchtitan_lite.checkpoint.converting.new_state import NewObject, NewState
from torchtitan_lite.checkpoint.converting.reader import Reader
from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.structure import Path
from torchtitan_lite.checkpoint.state.optimizer_state import SETTINGS, STATE, split_key
from torchtitan_lite.errors import CheckpointMismatch, ConfigError

OPTIMIZER = "optimizer"
_GROUPS = f"{OPTIMIZER}.{SETTINGS}"
_PARAMS = "params"


def with_flat_groups(state: NewState, reader: Reader) -> NewState:
    """Return `state` with the settings of the optimizer under the name of each parameter, as torch flattens them."""
    groups = [key for key in state.objects if key.startswith(f"{_GROUPS}.") and key.endswith(f".{_PARAMS}")]
    numbers = {key: key.removeprefix(f"{_GROUPS}.").removesuffix(f".{_PARAMS}") for key in groups}
    if not groups or not all(number.isdecimal() for number in numbers.values()):
        return state
    objects, tensors, paths = dict(state.objects), dict(state.tensors), dict(state.paths)
    for key, number in numbers.items():
        prefix = f"{_GROUPS}.{number}."
        names = plain_value.decode(objects[key].plain)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointMismatch(
                reader.contents.path, f"  {key}: expected the names of parameters, found {names!r:.80}"
            )
        settings = [each for each in paths if each.startswith(prefix)]
        for name in names:
            for each in settings:
                flat = f"{SETTINGS}.{name}.{each.removeprefix(prefix)}"
                if each != key:
                    target, held = (objects, objects) if each in objects else (tensors, tensors)
                    target[f"{OPTIMIZER}.{flat}"] = held[each]  # type: ignore[assignment]  # one table at a time
                    paths[f"{OPTIMIZER}.{flat}"] = (OPTIMIZER, flat)
        for each in settings:
            objects.pop(each, None)
            tensors.pop(each, None)
            del paths[each]
    for key in [key for key in paths if key.startswith(f"{OPTIMIZER}.{STATE}.")]:
        paths[key] = (OPTIMIZER, key.removeprefix(f"{OPTIMIZER}."))
    return NewState(tensors, objects, paths)


def with_listed_groups(state: NewState, reader: Reader) -> NewState:
    """Return `state` with the optimizer nested; parameters with equal settings are one group, in their order.

    Raises ConfigError if it has no optimizer by names of parameters.
    """
    names = {each.name for each in model_keys(reader.contents, reader.opened.manifest)}
    objects, tensors, paths = dict(state.objects), dict(state.tensors), dict(state.paths)
    settings: dict[str, dict[Path, str]] = {}
    for key, path in state.paths.items():
        kind, name, inner = _nested(path, names)
        if kind == STATE:
            paths[key] = (OPTIMIZER, STATE, name, *inner)
        elif kind == SETTINGS:
            settings.setdefault(name, {})[inner] = key
    if not settings:
        raise ConfigError(f"--optimizer nested: {reader.opened.folder} has no optimizer with names of parameters")
    for number, (members, group) in enumerate(_groups(state, reader, settings)):
        for inner, key in group.items():
            path = (OPTIMIZER, SETTINGS, number, *inner)
            new = ".".join(map(str, path))
            paths[new] = path
            if key in state.tensors:
                tensors[new] = state.tensors[key]
            else:
                objects[new] = state.objects[key]
        path = (OPTIMIZER, SETTINGS, number, _PARAMS)
        new = ".".join(map(str, path))
        objects[new], paths[new] = NewObject.of(members), path
    for key in [key for group in settings.values() for key in group.values()]:
        for table in (objects, tensors, paths):
            table.pop(key, None)
    return NewState(tensors, objects, paths)


def _nested(path: Path, names: set[str]) -> tuple[str, str, Path]:
    """Return what an entry of a flat optimizer is: state or settings, of which parameter, and its place below that."""
    if path[0] != OPTIMIZER or len(path) == 1:
        return "", "", ()
    kind, _, rest = str(path[1]).partition(".")
    if rest in names:  # A dict with the names that have dots, or are no strings.
        return kind, rest, path[2:]
    name, own = split_key(rest, names)
    return kind, name, (own, *path[2:])


def _groups(
    state: NewState, reader: Reader, settings: dict[str, dict[Path, str]]
) -> Iterable[tuple[list[str], dict[Path, str]]]:
    """Return the names of the parameters with equal settings, and the keys of these settings by their place."""
    groups: dict[str, tuple[list[str], dict[Path, str]]] = {}
    for name, keys in settings.items():
        content = json.dumps([[inner, _content(state, reader, key)] for inner, key in keys.items()])
        groups.setdefault(content, ([], keys))[0].append(name)
    return groups.values()


def _content(state: NewState, reader: Reader, key: str) -> Any:
    """Return what is equal for equal settings, for JSON."""
    if key in state.tensors:
        tensor = state.tensors[key]
        return [str(tensor.dtype), tensor.shape, reader.elements(tensor.source).hex()]
    held = state.objects[key]
    return held.plain if held.is_plain else held.item.hex()
