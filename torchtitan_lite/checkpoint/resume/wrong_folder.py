"""Folders that are not what a start takes them for.

A run writes into no checkpoint, and does not start from scratch over the checkpoints of another tool: both are refused
before anything is written or renamed. A fresh start next to checkpoints, one level above or below, is named in a
warning. Looks at names only. Every function is **coordinator only**.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from torchtitan_lite.checkpoint.resume.initial_path import last_step
from torchtitan_lite.checkpoint.run_folders import RunFolders, usable
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store import layout
from torchtitan_lite.store.listing import Listing, is_checkpoint
from torchtitan_lite.store.store import CheckpointStore

_MOST_NAMES = 8


def refuse_wrong_folders(folders: RunFolders, config: Checkpoint, step: int) -> None:
    """Raise ConfigError if one of `folders` is a checkpoint, or has checkpoints of another tool alone.

    The latter are no error where `step`, -1 for none, or `config` names what to load. Raises `FolderUnusable`.
    """
    for root in folders.roots:
        with usable(root):
            _refuse_checkpoint(root)
    store = folders.checkpoints
    if step == config.load_step == -1 and not config.initial_load_path and isinstance(store, CheckpointStore):
        with usable(store.root):
            _refuse_foreign_only(store)


def neighbour_with_steps(root: Path) -> Path | None:
    """Return the latest step of a folder in `root`, or of the folder above it; None if none of them has one."""
    below = [path for path in sorted(root.iterdir()) if path.is_dir()] if root.is_dir() else []
    for folder in (*below, root.parent):
        with suppress(OSError):  # What is next to the run need not be readable.
            if not is_checkpoint(folder) and (found := last_step(folder)):
                return found
    return None


def _refuse_checkpoint(root: Path) -> None:
    """Raise ConfigError if `root` is a checkpoint, or in one."""
    place = _checkpoint_around(root)
    if place is None:
        return
    what = "is a checkpoint" if place == root else f"is in the checkpoint {place}"
    above = place.parent
    resume = (
        f"To resume its run, name the folder above it: folder={str(above)!r} in a loop of your own, or "
        f"--job.dump_folder={above.parent} --checkpoint.folder={above.name}. "
        if layout.parse_step(place.name) is not None
        else ""
    )
    raise ConfigError(
        f"{root} {what}, and no run writes into a checkpoint. {resume}To start a new run from it, name another folder, "
        f"and --checkpoint.initial_load_path={place}."
    )


def _checkpoint_around(root: Path) -> Path | None:
    """Return the checkpoint that `root` is or is in; None if there is none."""
    if root.is_dir() and is_checkpoint(root) and not Listing(root).steps():
        return root
    return next((place for place in (root, *root.resolve().parents) if _is_whole_checkpoint(place)), None)


def _is_whole_checkpoint(folder: Path) -> bool:
    """Return whether `folder` is certainly a checkpoint: other programs have files of these names, too."""
    # Of a folder above that lets this user pass, and not look.
    with suppress(PermissionError):
        if (folder / layout.METADATA).is_file():
            others = (layout.MANIFEST, layout.data_file(0, 0))
            return layout.parse_step(folder.name) is not None or any((folder / name).is_file() for name in others)
        return layout.parse_step(folder.name) is not None and (folder / layout.MANIFEST).is_file()
    return False


def _refuse_foreign_only(store: CheckpointStore) -> None:
    """Raise ConfigError if all that is in the folder of `store` are checkpoints that no run of ours wrote."""
    foreign = store.unmanaged()
    if not foreign or Listing(store.root).has_ours():
        return
    latest = foreign[-1]
    more = "..., " if len(foreign) > _MOST_NAMES else ""
    there = more + ", ".join(path.name for path in foreign[-_MOST_NAMES:])
    out = f"NEW/{store.root.name}/{latest.name}"
    raise ConfigError(
        f"{store.root} has checkpoints of another tool ({there}, without {layout.MANIFEST}) and none of this one, and "
        f"a run does not choose such a checkpoint by itself. Start from one with --checkpoint.initial_load_path="
        f"{latest}; or continue from one in a new folder, after torchtitan-lite convert {latest} {out} --layout ours; "
        "or move them away to start from scratch."
    )
