"""Keys below the address of a folder of checkpoints in an object store.

A save writes below `step-N.<attempt>/`, where the attempt is random, so no save ever writes a key of another one. Each
parser accepts exactly what its maker produces; all else in the folder is an unknown name: never read, never
removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from torchtitan_lite.bucket.objects import Listed
from torchtitan_lite.store import layout

HEAD = "head.json"
"""The list of checkpoints and the job that writes them: the only object that is ever replaced on condition."""

CHECKPOINTS = "step"
"""Every key of a checkpoint begins with it."""

BEATS = "beat-"
_NUMBER = re.compile("0|[1-9][0-9]{0,18}")
_ATTEMPT = re.compile("[0-9a-f]{16}")


def attempt_name(step: int, attempt: str) -> str:
    """Return the name of the checkpoint that the save `attempt` of `step` writes."""
    return f"{layout.step_dir(step)}.{attempt}"


def parse_attempt(name: str) -> tuple[int, str] | None:
    """Return the step and the attempt of the checkpoint called `name`; None for other names."""
    spelt, _, attempt = name.partition(".")
    step = layout.parse_step(spelt)
    return None if step is None or not is_attempt(attempt) else (step, attempt)


def is_attempt(text: str) -> bool:
    """Return whether `text` has the form of an attempt."""
    return _ATTEMPT.fullmatch(text) is not None


def split_object_key(key: str) -> tuple[str, str] | None:
    """Return the name of the checkpoint that has the object `key`, and its file there; None for other keys."""
    name, slash, file = key.partition("/")
    return (name, file) if slash and parse_attempt(name) is not None else None


@dataclass
class AttemptObjects:
    """The objects of one checkpoint, as a listing shows them; the default is none."""

    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each file, by name."""
    modified: float = 0.0
    """When the latest of them was written, in Unix seconds."""


def attempts_in(listed: Iterable[Listed]) -> dict[str, AttemptObjects]:
    """Return those of the objects `listed` that are of checkpoints, by the name of the checkpoint."""
    found: dict[str, AttemptObjects] = {}
    for each in listed:
        if (split := split_object_key(each.key)) is not None:
            attempt = found.setdefault(split[0], AttemptObjects())
            attempt.sizes[split[1]] = each.size
            attempt.modified = max(attempt.modified, each.modified)
    return found


def beat_key(epoch: int) -> str:
    """Return the key that the holder of `epoch` writes to show that it lives."""
    return f"{BEATS}{epoch}"


def parse_beat(key: str) -> int | None:
    """Return the epoch of the beats at `key`; None for other keys."""
    number = key.removeprefix(BEATS)
    return int(number) if key.startswith(BEATS) and _NUMBER.fullmatch(number) else None
