"""What a checkpoint becomes in another layout: its keys there, and what is left out.

Tensors keep their elements; keys, the forms of small states, and what belongs to one tool alone change. docs/export.md
lists what matters to users. Nothing is written here.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.format import plain_value
from torchtitan_lite.checkpoint.format.contents import StoredObject
from torchtitan_lite.checkpoint.format.structure import Path, paths_of
from torchtitan_lite.checkpoint.state.optimizer_state import SETTINGS, STATE, split_state_key
from torchtitan_lite.checkpoint.untrusted.safe_load import UnsafeItem, load_item
from torchtitan_lite.converting.dcp_folder import NewObject, NewState
from torchtitan_lite.converting.model_part import MODEL, ModelKey, model_keys
from torchtitan_lite.converting.streamed_file import NewTensor
from torchtitan_lite.errors import CheckpointMismatch, CheckpointUnsafe, ConfigError
from torchtitan_lite.examining.opened import OpenedCheckpoint, kind_from_keys
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.store.manifest import CheckpointKind

_OPTIMIZER = ("optimizer.state.", "optimizer.param_groups.")


class Reader:
    """Reads the small things of the checkpoint `opened` that a layout needs."""

    def __init__(self, opened: OpenedCheckpoint) -> None:
        self.opened, self.contents = opened, opened.contents
        self.stream = TensorStream(opened.folder, opened.contents, opened.records)

    def object(self, key: str) -> NewObject:
        """Return the object under `key`, as it is. Raises CheckpointUnsafe if it holds more than plain data."""
        stored = self.contents.objects[key]
        if stored.item is None:
            return NewObject.of(stored.value)
        data = self.stream.read_item(stored.item)
        value = self._loaded(key, data, stored)
        if stored.is_typed:
            return NewObject(data, {"typed": True})
        try:
            return NewObject(data, {"value": plain_value.encode_value(value)})
        except plain_value.NotPlain:
            return NewObject(data, {})

    def elements(self, key: str) -> bytes:
        """Return the elements of the small tensor under `key`."""
        return b"".join(map(bytes, self.stream.slices(key)))

    def value(self, key: str) -> Any:
        """Return the object under `key`, or the whole number in the tensor under it; None if there is neither."""
        if key in self.contents.objects:
            stored = self.contents.objects[key]
            if stored.item is None:
                return stored.value
            return self._loaded(key, self.stream.read_item(stored.item), stored)
        stored_tensor = self.contents.tensors.get(key)
        if stored_tensor is not None and stored_tensor.shape in ((), (1,)) and "int" in str(stored_tensor.dtype):
            [part] = self.stream.slices(key)
            return int.from_bytes(part, "little", signed=True)
        return None

    def state(self, keys: Mapping[str, tuple[str, Path]], dtype: str = "") -> NewState:
        """Return the entries under the given keys of the checkpoint, each under its new key and path."""
        held = self.contents.tensors
        tensors = {new: NewTensor.of(self.contents, key, dtype) for key, (new, _) in keys.items() if key in held}
        objects = {new: self.object(key) for key, (new, _) in keys.items() if key in self.contents.objects}
        return NewState(tensors, objects, dict(keys.values()))

    def paths(self) -> Mapping[str, Path]:
        """Return the path of each key in the nested state, as DCP has it."""
        if self.contents.structure is not None:
            return paths_of(self.contents.structure, tensors=self.contents.tensors)
        return {key: self.contents.paths.get(key, (key,)) for key in self.contents}

    def _loaded(self, key: str, data: bytes, stored: StoredObject) -> Any:
        try:
            return load_item(data, is_typed=stored.is_typed)
        except UnsafeItem as error:
            raise CheckpointUnsafe(self.contents.path, f"{key}: {error}") from None


class Relaid(NamedTuple):
    """A checkpoint in another layout."""

    state: NewState
    kind: CheckpointKind
    left_out: list[str]
    """Top-level states, or keys of a part that is taken, that the layout has no place for."""


def as_stored(reader: Reader) -> Relaid:
    """Return the checkpoint with the keys that it has."""
    return Relaid(reader.state({key: (key, path) for key, path in reader.paths().items()}), reader.opened.kind, [])


def as_nested(reader: Reader) -> Relaid:
    """Return the checkpoint with the keys that it has, except that the optimizer has a list of groups.

    Raises ConfigError if it has no optimizer by names of parameters.
    """
    stored = as_stored(reader)
    return stored._replace(state=with_listed_groups(stored.state, reader))


def as_weights(reader: Reader, keys: Iterable[ModelKey], dtype: str = "") -> NewState:
    """Return the model alone, under its own names, cast to `dtype` if it is not empty."""
    return reader.state({each.key: (each.name, each.path) for each in keys}, dtype)


def as_our_layout(reader: Reader) -> Relaid:
    """Return a checkpoint of plain DCP or torchtitan with the keys of ours: `model.<fqn>`, or bare in weights only.

    Objects become JSON where possible. No structure is recorded: a load takes the types of keys from the live state.
    """
    opened = reader.opened
    model = model_keys(opened.contents, None)
    outer_name = _outer(reader, model)
    if _checkpoint_kind(opened, outer_name) is CheckpointKind.WEIGHTS_ONLY:
        left_out = _left_out(opened, {each.key for each in model})
        return Relaid(as_weights(reader, model), CheckpointKind.WEIGHTS_ONLY, left_out)
    keys = {each.key: (f"{MODEL}.{each.name}", (MODEL, *each.path)) for each in model}
    paths = reader.paths()
    # The state may be one entry of an outer one, as in PyTorch's tutorial.
    outer = paths[model[0].key][:1] if outer_name else ()
    for key, path in paths.items():
        inner = path[len(outer) :] if path[: len(outer)] == outer else path
        keys.setdefault(key, (".".join(map(str, inner)), inner))
    return Relaid(with_flat_groups(reader.state(keys), reader), CheckpointKind.FULL, [])


def as_torchtitan(reader: Reader, dp_ranks: int) -> Relaid:
    """Return the checkpoint as torchtitan 0.3 has it: bare names on top, and its small states.

    Its dataloaders, one for each of `dp_ranks` data-parallel ranks, start from the beginning, unless `reader` has
    positions that torchtitan saved for as many. `dp_ranks` 0: as many as it saved, else one.
    """
    opened = reader.opened
    model = model_keys(opened.contents, opened.manifest)
    weights = as_weights(reader, model)
    taken = {each.key for each in model}
    outer = _outer(reader, model)
    if _checkpoint_kind(opened, outer) is CheckpointKind.WEIGHTS_ONLY:
        return Relaid(weights, CheckpointKind.WEIGHTS_ONLY, _left_out(opened, taken))
    optimizer = {
        key: (inner, ("optimizer", inner.removeprefix("optimizer.")))
        for key in opened.contents
        if key not in taken and (inner := key.removeprefix(outer)).startswith(_OPTIMIZER)
    }
    if not optimizer:
        raise CheckpointMismatch(opened.contents.path, "  it has no optimizer whose state has names of parameters")
    state = with_flat_groups(reader.state(optimizer), reader)
    small = dict(_torchtitan_states(reader, outer, dp_ranks))
    objects = {key: NewObject.of(value) for key, value in small.items()}
    paths = {key: tuple(key.split(".", 1)) for key in small}
    whole = NewState(
        {**weights.tensors, **state.tensors},
        {**weights.objects, **state.objects, **objects},
        {**weights.paths, **state.paths, **paths},
    )
    used = ("train_state.n_tokens_seen", "lr_scheduler.0.last_epoch", *small)
    known = {*taken, *optimizer, *(f"{outer}{key}" for key in used)} & {*opened.contents}
    return Relaid(whole, CheckpointKind.FULL, _left_out(opened, known))


def _torchtitan_states(reader: Reader, outer: str, dp_ranks: int) -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of each object of torchtitan's small states."""
    saved = reader.value(f"{outer}dataloader.world_size")
    saved = saved if isinstance(saved, int) else 0
    dp_ranks = dp_ranks or saved or 1
    step = reader.value(f"{outer}train_state.step")
    step = (reader.opened.step or 0) if step is None else int(step)
    tokens = reader.value(f"{outer}train_state.n_tokens_seen")
    own_tokens = reader.value(f"{outer}train_state.ntokens_seen")
    epochs = (reader.value(f"{outer}lr_scheduler.{name}") for name in ("last_epoch", "0.last_epoch"))
    yield "train_state.step", step
    # Each data-parallel rank of torchtitan counts its own tokens.
    yield "train_state.ntokens_seen", int(tokens) // dp_ranks if tokens is not None else int(own_tokens or 0)
    yield "lr_scheduler.last_epoch", next((int(epoch) for epoch in epochs if epoch is not None), step)
    yield "dataloader.world_size", dp_ranks
    for rank in range(dp_ranks):
        key = f"dataloader.dp_rank_{rank}"
        # torchdata's loader takes an empty position for none.
        yield key, reader.value(f"{outer}{key}") if dp_ranks == saved else pickle.dumps({})


def _outer(reader: Reader, model: list[ModelKey]) -> str:
    """Return the prefix of all keys of a state that is one entry of an outer one; usually the empty string."""
    path = reader.paths()[model[0].key]
    return f"{path[0]}." if path[1:2] == (MODEL,) else ""


def _checkpoint_kind(opened: OpenedCheckpoint, outer: str) -> CheckpointKind:
    return opened.kind if not outer else kind_from_keys(key.removeprefix(outer) for key in opened.contents)


def _left_out(opened: OpenedCheckpoint, taken: set[str]) -> list[str]:
    """Return the top-level states of which nothing is `taken`, and the keys of others that are not."""
    states = {key.partition(".")[0] for key in taken}
    names = (
        key if (state := key.partition(".")[0]) in states else state for key in opened.contents if key not in taken
    )
    return list(dict.fromkeys(names))


# The two forms in which DCP saves an optimizer: by the name of each parameter, or as a list of groups.
#
# Flat, as our checkpoints and torchtitan's have it (`flatten_optimizer_state_dict=True`), each parameter has its own
# copy of the settings, and nothing says which group it was in. Nested, as `get_state_dict` returns it by default,
# `param_groups` is a list of groups, each with the names of its parameters under `params`. State has the same keys in
# both, and other paths.


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
        names = plain_value.decode_value(objects[key].entry.get("value"))
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
    name, own = split_state_key(rest, names)
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
    return held.entry.get("value", held.item.hex())
