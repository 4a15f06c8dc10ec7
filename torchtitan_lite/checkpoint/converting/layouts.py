"""What a checkpoint becomes in another layout: its keys there, and what is left out.

Tensors keep their elements; keys, the forms of small states, and what belongs to one tool alone change. docs/export.md
lists it all. Nothing is written here.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torchtitan_lite.checkpoint.converting.model_part import MODEL, ModelKey, model_keys
from torchtitan_lite.checkpoint.converting.new_state import NewObject, NewState
from torchtitan_lite.checkpoint.converting.optimizer_groups import with_flat_groups, with_listed_groups
from torchtitan_lite.checkpoint.converting.reader import Reader
from torchtitan_lite.checkpoint.examining.opened import OpenedCheckpoint, kind_of
from torchtitan_lite.errors import CheckpointMismatch
from torchtitan_lite.store.manifest import CheckpointKind

_OPTIMIZER = ("optimizer.state.", "optimizer.param_groups.")


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


def as_weights(reader: Reader, keys: Iterable[ModelKey]) -> NewState:
    """Return the model alone, under its own names."""
    return reader.state({each.key: (each.name, each.path) for each in keys})


def as_ours(reader: Reader) -> Relaid:
    """Return a checkpoint of plain DCP or torchtitan with the keys of ours: `model.<fqn>`, or bare in weights only."""
    opened = reader.opened
    model = model_keys(opened.contents, None)
    outer_name = _outer(reader, model)
    if _kind(opened, outer_name) is CheckpointKind.WEIGHTS_ONLY:
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
    if _kind(opened, outer) is CheckpointKind.WEIGHTS_ONLY:
        return Relaid(weights, CheckpointKind.WEIGHTS_ONLY, _left_out(opened, taken))
    optimizer = {
        key: (inner, ("optimizer", inner.removeprefix("optimizer.")))
        for key in opened.contents
        if key not in taken and (inner := key.removeprefix(outer)).startswith(_OPTIMIZER)
    }
    if not optimizer:
        raise CheckpointMismatch(opened.contents.path, "  it has no optimizer whose state has names of parameters")
    state = with_flat_groups(reader.state(optimizer), reader)
    small = dict(_small_states(reader, outer, dp_ranks))
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


def _small_states(reader: Reader, outer: str, dp_ranks: int) -> Iterator[tuple[str, Any]]:
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


def _kind(opened: OpenedCheckpoint, outer: str) -> CheckpointKind:
    return opened.kind if not outer else kind_of(key.removeprefix(outer) for key in opened.contents)


def _left_out(opened: OpenedCheckpoint, taken: set[str]) -> list[str]:
    """Return the top-level states of which nothing is `taken`, and the keys of others that are not."""
    states = {key.partition(".")[0] for key in taken}
    names = (
        key if (state := key.partition(".")[0]) in states else state for key in opened.contents if key not in taken
    )
    return list(dict.fromkeys(names))
