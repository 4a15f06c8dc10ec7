"""Names on disk.

The only module that knows how a checkpoint folder is spelt. Each parser accepts exactly what its
maker produces, so `step-10.bak`, `my-step-3` and `step-007` are foreign: never read, never removed.
"""

from __future__ import annotations

import re

METADATA = ".metadata"
"""DCP's own description of the tensors."""

MANIFEST = "manifest.json"
"""Ours, written last; a folder without it was not committed by us."""

LOCK = "writer.lock"
"""Says which job writes the folder of checkpoints; in it, beside them."""

FINDINGS = "findings.json"
"""What was found wrong with a checkpoint that was set aside for its damage; in its folder, beside its files."""

_NUMBER = "(0|[1-9][0-9]*)"
_STEP = re.compile(f"step-{_NUMBER}")
_STAGING = re.compile(rf"step-{_NUMBER}\.staging")
_TRASH = re.compile(rf"\.trash-step-{_NUMBER}-{_NUMBER}")
_REPLACED = re.compile(rf"\.replaced-step-{_NUMBER}-{_NUMBER}")
_DATA_FILE = re.compile(rf"__{_NUMBER}_{_NUMBER}\.distcp")


def step_dir(step: int) -> str:
    """Name of the committed checkpoint of `step`."""
    return f"step-{step}"


def parse_step(name: str) -> int | None:
    """The step whose committed checkpoint is called `name`."""
    return _one(_STEP, name)


def staging_dir(step: int) -> str:
    """Name of a save of `step` under way."""
    return f"step-{step}.staging"


def parse_staging(name: str) -> int | None:
    """The step whose save under way is called `name`."""
    return _one(_STAGING, name)


def trash_dir(step: int, number: int) -> str:
    """Name of what is being removed of `step`."""
    return f".trash-step-{step}-{number}"


def parse_trash(name: str) -> tuple[int, int] | None:
    """The (step, number) of which `name` is the trash."""
    return _two(_TRASH, name)


def replaced_dir(step: int, number: int) -> str:
    """Name of the checkpoint of `step` while another takes its place; the highest number is the latest."""
    return f".replaced-step-{step}-{number}"


def parse_replaced(name: str) -> tuple[int, int] | None:
    """The (step, number) of which `name` is the replaced checkpoint."""
    return _two(_REPLACED, name)


def abandoned_dir(step: int, run_id: str, number: int) -> str:
    """Name of the checkpoint of `step` that `run_id` left when it was told to go back; `number` from 1."""
    return f"step-{step}.abandoned-{run_id}" + ("" if number == 1 else f"-{number}")


def weights_dir(step: int, number: int) -> str:
    """A foreign name for the weights-only checkpoint of `step` once a full one has its name; `number` from 1."""
    return f"step-{step}.weights" if number == 1 else f"step-{step}.weights-{number}"


def quarantined(step: int, number: int) -> str:
    """A foreign name for the checkpoint of `step` once it was found damaged; `number` from 1."""
    return f"step-{step}.corrupt" if number == 1 else f"step-{step}.corrupt-{number}"


def moved_aside(step: int, number: int) -> str:
    """A foreign name for what stood in the way of `step` and is not ours to remove; `number` from 1."""
    return f"step-{step}.foreign" if number == 1 else f"step-{step}.foreign-{number}"


def data_file(rank: int, index: int) -> str:
    """Name of the `index`-th file that `rank` writes."""
    return f"__{rank}_{index}.distcp"


def is_data_file(name: str) -> bool:
    """Whether `name` is some rank's file of tensors."""
    return _DATA_FILE.fullmatch(name) is not None


def _one(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None


def _two(pattern: re.Pattern[str], name: str) -> tuple[int, int] | None:
    match = pattern.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
