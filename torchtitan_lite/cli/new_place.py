"""Where a verb may make something new: never in place of checkpoints, nor among their files."""

from __future__ import annotations

from pathlib import Path

from torchtitan_lite.cli.named_checkpoint import IN_DUMP_FOLDER
from torchtitan_lite.config.address import is_address
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store import layout
from torchtitan_lite.store.layout import Listing, is_checkpoint


def new_place(spelling: str, *, is_step: bool) -> Path:
    """Return `spelling`, the argument OUT, as a path.

    Raise ConfigError for an address, and if there are checkpoints in it, or it would be part of one. Unless what is
    made there `is_step`, a checkpoint in our layout or DCP's, it must not have the name of one among others either: a
    job would take it for a save that was cut off.
    """
    if is_address(spelling):
        raise ConfigError(f"OUT {spelling}: expected a folder on disk, found an address")
    out = Path(spelling)
    for folder in (out, out / IN_DUMP_FOLDER):
        if steps := _steps_in(folder):
            raise ConfigError(
                f"OUT {out}: expected a new folder, found {_in_list(steps)}{'' if folder == out else f' in {folder}'}: "
                "name a folder that does not exist yet"
            )
    if out.is_dir() and is_checkpoint(out):
        raise ConfigError(
            f"OUT {out}: expected a new folder, found a checkpoint: name a folder that does not exist yet"
        )
    parent = out.absolute().parent
    if parent.is_dir() and is_checkpoint(parent):
        raise ConfigError(f"OUT {out}: expected a place outside of checkpoints, found the checkpoint {out.parent}")
    if not is_step and layout.parse_step(out.name) is not None and (steps := _steps_in(parent)):
        raise ConfigError(
            f"OUT {out}: {out.parent} has {_in_list(steps)}, and a job there would take {out.name} for a checkpoint: "
            "name OUT in another folder"
        )
    return out


def _steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in `folder`, complete or not."""
    if not folder.is_dir():
        return []
    places = Listing(folder).places().items()
    return [step for step, paths in places if paths[0].is_dir() and is_checkpoint(paths[0])]


def _in_list(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} checkpoints, step {steps[0]} to {steps[-1]}"
