"""Which checkpoints a trainer names as its best or its last one.

transformers writes it into trainer_state.json, and Lightning into the pickle of a .ckpt file or of meta.pt. That pickle
is parsed as inert values: nothing that it names is imported or called. People name one by a link. What cannot be read
is not known, and then no checkpoint may count as one that is not named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from torchtitan_lite.checkpoint.examining.lightning_checkpoint import META
from torchtitan_lite.checkpoint.examining.transformers_folder import TRAINER_STATE
from torchtitan_lite.checkpoint.untrusted.inert_pickle import AnyName
from torchtitan_lite.checkpoint.untrusted.saved_file import SavedFile
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.errors import CheckpointDamaged, TorchtitanLiteError

_MOST_STATE_BYTES = 256 << 20
_LAST = re.compile(r"last(-v[0-9]+)?\.ckpt")
_PATHS = ("best_model_path", "last_model_path")
"""In the state of Lightning's ModelCheckpoint."""


@dataclass(frozen=True)
class Named:
    """What one checkpoint says of others."""

    names: frozenset[str] = frozenset()
    """Of the folders or files that it names as the best or the last."""
    step: int | None = None
    """Its own, if it says it."""
    finding: str = ""
    """Why it is not known which ones it names."""


def named_by_trainer(folder: Path) -> Named:
    """Return what trainer_state.json in `folder` names as the best; nothing where accelerate has no such file."""
    if not (folder / TRAINER_STATE).is_file():
        return Named()
    try:
        state = json.loads(read_plain(folder / TRAINER_STATE, _MOST_STATE_BYTES))
        best, step = state["best_model_checkpoint"], state.get("best_global_step")
        names = {PurePath(best).name} if best else set()
        return Named(frozenset(names | ({f"checkpoint-{step}"} if isinstance(step, int) else set())))
    except (OSError, TorchtitanLiteError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Named(finding=f"{folder.name}/{TRAINER_STATE} cannot be read: {error!s:.100}")


def named_by_lightning(path: Path) -> Named:
    """Return what the callbacks in `path` name, and its step. Raises `CheckpointDamaged` if it is cut."""
    file = path / META if path.is_dir() else path
    try:
        held = SavedFile(file, AnyName()).root
    except CheckpointDamaged:
        raise
    except (OSError, TorchtitanLiteError) as error:
        return Named(finding=f"{file.name} cannot be parsed without running it: {error!s:.100}")
    held = held if type(held) is dict else {}
    step = held.get("global_step")
    step = step if type(step) is int else None
    if type(held.get("callbacks")) is not dict:
        return Named(step=step, finding=f"{file.name} has no callbacks in it")
    return Named(frozenset(PurePath(name).name for name in _checkpoint_paths(held["callbacks"])), step)


def _checkpoint_paths(callbacks: dict[Any, Any]) -> Iterator[str]:
    for state in callbacks.values():
        for key in _PATHS if type(state) is dict else ():
            if type(state.get(key)) is str and state[key]:
                yield state[key]


def named_by_person(root: Path) -> frozenset[str]:
    """Return the names in `root` that say themselves that they are the last, and those that links in it lead to."""
    names, home = set(), root.resolve()
    for path in root.iterdir():
        if _LAST.fullmatch(path.name):
            names.add(path.name)
        if path.is_symlink() and (target := path.resolve()).is_relative_to(home) and target != home:
            names.add(target.relative_to(home).parts[0])
    return frozenset(names)
