"""What the run that saved last would remove from its folder, by the `keep_` keys in its latest checkpoint.

A running job may have other keys by now, and it also keeps what it loaded or saved itself; so this is an outlook.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from torchtitan_lite.checkpoint.examining.inventory import FolderState, ListedCheckpoint
from torchtitan_lite.config.job_config import Checkpoint, flat_config
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.retention import Verdict, build_retention, judge

_DEFAULTS = Checkpoint()
_KEYS = [each.name for each in dataclasses.fields(Checkpoint) if each.name.startswith("keep_")]


def keep_keys(entries: Iterable[ListedCheckpoint]) -> dict[str, Any]:
    """Return the `keep_` keys of the latest full checkpoint that are not at their defaults, by name."""
    full = [entry for entry in entries if entry.state is FolderState.COMMITTED and entry.kind is CheckpointKind.FULL]
    today = flat_config(full[-1].config) if full else {}
    found = {key: today[f"checkpoint.{key}"] for key in _KEYS if f"checkpoint.{key}" in today}
    return {key: value for key, value in found.items() if value != getattr(_DEFAULTS, key)}


def outlook(
    entries: Iterable[ListedCheckpoint], keys: dict[str, Any], pinned: AbstractSet[int], now: float
) -> dict[int, Verdict]:
    """Return what retention by `keys` would do with each committed checkpoint, by step; nothing for invalid keys."""
    try:
        policy = build_retention(Checkpoint(**keys))
    except (ConfigError, TypeError, ValueError):
        return {}
    committed = [entry.info for entry in entries if entry.info is not None]
    return {verdict.info.step: verdict for verdict in judge(policy, committed, pinned=pinned, now=now)}
