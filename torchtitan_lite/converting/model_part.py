"""The model's part of a checkpoint: which of its keys are weights, and the names that the model has for them.

A full checkpoint of ours, and one of DCP's with a state `model`, has them under `model`; torchtitan has them at the
top, next to its states; a weights-only checkpoint has nothing else. The paths of the nested state show which it is, so
that a model whose own names begin with `model.` keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.structure import Path
from torchtitan_lite.checkpoint.reading.load_rules import LoadRules, unmatched_globs
from torchtitan_lite.errors import CheckpointNotFound, ConfigError
from torchtitan_lite.store.manifest import CheckpointKind, Manifest

MODEL = "model"
_EXTRA_STATE = "_extra_state"
_OTHER_STATES = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "rng.")


class ModelKey(NamedTuple):
    """A key of the checkpoint that belongs to the model."""

    key: str
    """In the checkpoint."""
    path: Path
    """In the model's state dict: the name alone, or the place in a nested extra state."""

    @property
    def name(self) -> str:
        """The model's own, flat."""
        return ".".join(map(str, self.path))


def model_keys(contents: Contents, manifest: Manifest | None) -> list[ModelKey]:
    """Return the keys of the model in `contents`, in their order. Raise CheckpointNotFound if there are none."""
    prefix = _prefix(contents, manifest)
    found = []
    for key in contents:
        path = contents.paths.get(key, (key,))
        if prefix:
            if path[: len(prefix)] == prefix and len(path) > len(prefix):
                found.append(ModelKey(key, path[len(prefix) :]))
            elif len(path) == 1 and key.startswith(f"{MODEL}."):
                # Saved as a flat state.
                found.append(ModelKey(key, (key.removeprefix(f"{MODEL}."),)))
        elif key not in contents.paths and key.startswith(_OTHER_STATES):
            continue
        elif len(path) == 1 or str(path[0]).rpartition(".")[2] == _EXTRA_STATE:
            found.append(ModelKey(key, path))
    if not found:
        states = sorted({str(contents.paths.get(key, (key,))[0]) for key in contents})
        there = ", ".join(states[:8]) + (" ..." if len(states) > 8 else "")
        finding = (
            f"there is no model in it: expected a state {MODEL!r} or weights at the top, found {there or 'nothing'}"
        )
        raise CheckpointNotFound(contents.path, None, finding=finding)
    return found


def chosen(keys: Iterable[ModelKey], include: str, exclude: str) -> list[ModelKey]:
    """Return those of `keys` whose names match a glob of `include`, if it has any, and none of `exclude`.

    Commas separate globs. Raises ConfigError for a glob that matches no name, and if no name remains.
    """
    keys = list(keys)
    rules = LoadRules(include=_globs(include), exclude=_globs(exclude))
    if odd := unmatched_globs(rules, [each.name for each in keys]):
        option = "--include" if odd[0] in rules.include else "--exclude"
        raise ConfigError(f"{option} {odd[0]!r} matches no tensor of the model, such as {keys[0].name}")
    kept = [each for each in keys if rules.wants(each.name)]
    if not kept:
        raise ConfigError("--include and --exclude leave nothing of the model to write")
    return kept


def _prefix(contents: Contents, manifest: Manifest | None) -> Path:
    if manifest is not None:
        return (MODEL,) if manifest.kind is CheckpointKind.FULL else ()
    paths = contents.paths.values()
    for path in paths:
        if MODEL in path[:2] and len(path) > path.index(MODEL) + 1:
            return path[: path.index(MODEL) + 1]
    if paths:
        return ()
    has_others = any(key.startswith(_OTHER_STATES) for key in contents)
    return (MODEL,) if has_others and any(key.startswith(f"{MODEL}.") for key in contents) else ()


def _globs(text: str) -> tuple[str, ...]:
    return tuple(glob for part in text.split(",") if (glob := part.strip()))
